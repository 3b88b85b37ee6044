"""DeepEP's process-wide buffer, to which graphs write."""

from __future__ import annotations

from typing import Any

from chunkgraph.errors import ReplayMismatchError
from chunkgraph.megatron.core.access import import_megatron, private_names

__all__ = ["DeepEPBuffer"]

_FUSED = "megatron.core.transformer.moe.fused_a2a"


class DeepEPBuffer:
    """Notices that DeepEP has replaced the buffer with which graphs were captured.

    Args:
        is_hybrid: Whether it is HybridEP's buffer, whose size depends on the tokens of a pass.
    """

    def __init__(self, *, is_hybrid: bool) -> None:
        self._is_hybrid = is_hybrid
        self._fused = import_megatron(_FUSED)
        private_names(_FUSED, "_hybrid_ep_buffer" if is_hybrid else "_buffer")
        self._captured: tuple[Any, int] | None = None

    def remember(self) -> None:
        """Remember the current buffer, with which graphs were captured."""
        self._captured = self._current()

    def is_replaced(self) -> bool:
        """Return whether DeepEP has replaced its buffer since the last capture."""
        if self._captured is None:
            return False
        (captured, before), (now, tokens) = self._captured, self._current()
        return now is not captured or tokens != before

    def check(self) -> None:
        """Check the buffer before a replay.

        Raises:
            ReplayMismatchError: DeepEP has replaced its buffer since the capture.
        """
        if not self.is_replaced():
            return
        assert self._captured is not None
        (_, before), (_, tokens) = self._captured, self._current()
        if not self._is_hybrid:
            raise ReplayMismatchError(
                "DeepEP replaced its buffer outside of all steps since the graphs were "
                "captured, for other ranks or wider rows, and the graphs write to the old "
                "one. Give the other dispatch in this process a separate buffer, or "
                "release() the graphs before it."
            )
        raise ReplayMismatchError(
            "DeepEP replaced its buffer outside of all steps since the graphs were "
            f"captured: a pass had {tokens} tokens on this rank, and the graphs write to the "
            f"buffer of {before}. Run such passes through the wrapped schedule (forward_only), "
            "after which all ranks capture again, or release() the graphs before them."
        )

    def _current(self) -> tuple[Any, int]:
        if not self._is_hybrid:  # its size does not depend on the tokens
            return self._fused._buffer, 0
        buffer = self._fused._hybrid_ep_buffer
        if buffer is None:
            return None, 0
        return buffer, int(buffer.configurer.buffer_config.max_num_of_tokens_per_rank)
