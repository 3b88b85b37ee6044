"""HybridEP's dispatch in graphs: rows for the loads of eager steps, numbers of rows on the device.

Without a number of rows HybridEP waits for the number of received rows. With one it reads nothing
on the host, omits rows that exceed it, and sets a flag on the device. It sorts rows by expert, in
the same order either way.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch

from chunkgraph.errors import ConfigError, MissingDependencyError, ReplayMismatchError
from chunkgraph.megatron.core.access import import_megatron, private_names, versions
from chunkgraph.megatron.features.experts.dropless_dispatch import Dispatch
from chunkgraph.megatron.features.experts.dropless_rows import DeviceSplits
from chunkgraph.megatron.rules.experts import ALL_TO_ALL
from chunkgraph.settings.rule import Facts

_CONFIG = "megatron.core.transformer.transformer_config"
_FUSED = "megatron.core.transformer.moe.fused_a2a"
_FACTOR = "moe_expert_rank_capacity_factor"
_HANDLE_LENGTH = 11
"""Length of the tuple that HybridEP's dispatch returns, in which `_OVERFLOW` is an index."""
_OVERFLOW = 10


def deep_ep_version() -> str | None:
    """Return the version of the package ``deep_ep``; None if it is not installed."""
    if importlib.util.find_spec("deep_ep") is None:
        return None
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("deep_ep")
    return "unknown version"


def has_hybrid_ep() -> bool:
    """Return whether the installed ``deep_ep`` has HybridEP."""
    return importlib.util.find_spec("hybrid_ep_cpp") is not None


def refuse_without_hybrid_ep(facts: Facts) -> None:
    """Check what HybridEP needs beyond settings, if a model uses it, the only flexible dispatcher.

    Raises:
        ConfigError: This release of Megatron does not report rows without room.
        MissingDependencyError: The package is missing.
    """
    if not (facts.num_moe_experts and facts.moe_token_dispatcher_type == "flex"):
        return
    config = import_megatron(_CONFIG).TransformerConfig
    if _FACTOR not in config.__dataclass_fields__:
        raise ConfigError(
            f"HybridEP of megatron-core {versions()['megatron_core']} does not report rows without "
            "room. Use 0.18 or later, or set moe_token_dispatcher_type to 'alltoall'."
        )
    version = deep_ep_version()
    if version is None or not has_hybrid_ep():
        state = "is not installed" if version is None else f"({version}) lacks HybridEP"
        need = f"deep_ep {state}; build DeepEP's branch hybrid-ep for this machine, or {ALL_TO_ALL}"
        raise MissingDependencyError(facts.text(need))


class HybridEPRows(Dispatch):
    """Replacement of the flexible dispatcher with HybridEP: rows of a rank have limited room."""

    name = "HybridEP"
    names = ("dispatch_postprocess", "dispatch_preprocess", "token_dispatch")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._manager: Any = self._megatrons._comm_manager
        self.tensors = (self._manager.over_budget,)  # Megatron accumulates the flag of omitted rows

    def install(self) -> Callable[[], None]:
        """See `Dispatch`. Eager passes have room for all rows, whatever the user's budget."""
        undo = ExitStack()
        undo.callback(super().install())
        undo.callback(setattr, self._manager, _FACTOR, getattr(self._manager, _FACTOR, None))
        setattr(self._manager, _FACTOR, None)
        return undo.close

    def load(self, *args: Any) -> tuple[int, torch.Tensor]:
        """See `Dispatch`."""
        return self._num_tokens(), torch.tensor(args[0].shape[0])

    def dispatch_preprocess(
        self, hidden: torch.Tensor, chosen: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Set the number of rows in graphs; eager passes have room for all."""
        megatrons = self._megatrons
        sent: tuple[torch.Tensor, torch.Tensor] = type(megatrons).dispatch_preprocess(
            megatrons, hidden, chosen, probs
        )
        num_tokens = self._num_tokens()
        most = self._manager.group.size() * self._most_rows(num_tokens)
        if self._room.is_limited:
            self._manager.num_permuted_tokens = self._room.rows(num_tokens, most)
        return sent

    def token_dispatch(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Send rows to the ranks of their experts; count a dispatch that omitted some.

        Raises:
            ConfigError: This release of DeepEP does not tell.
        """
        megatrons, manager = self._megatrons, self._manager
        # With any factor the manager keeps the numbers of rows, and leaves them on the device.
        setattr(manager, _FACTOR, 1.0 if self._room.is_limited else None)
        try:
            received: tuple[torch.Tensor, torch.Tensor] = type(megatrons).token_dispatch(
                megatrons, *args, **kwargs
            )
        finally:
            setattr(manager, _FACTOR, None)
        if self._room.is_limited and torch.is_grad_enabled():
            if (length := len(manager.handle)) != _HANDLE_LENGTH:
                raise ConfigError(
                    f"DeepEP returns {length} values from a dispatch, expected {_HANDLE_LENGTH}. "
                    "Use the hybrid-ep branch of 1.2.1."
                )
            self._counts.add(self._index, manager.handle[_OVERFLOW])
        return received

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, DeviceSplits, torch.Tensor]:
        """Return the received rows, which are sorted by local expert."""
        counts = self._manager.get_number_of_tokens_per_expert().to(rows.device)
        # Of omitted rows DeepEP promises no counts.
        ends = counts.cumsum(0).clamp(max=rows.shape[0]).int()
        return rows, DeviceSplits(ends), probs

    def _num_tokens(self) -> int:
        """Return the tokens of the current microbatch on this rank."""
        return int(self._megatrons.hidden_shape[:-1].numel())


class HybridEPBuffer:
    """Notices that HybridEP has replaced the process's buffer, to which graphs write.

    Its size depends on the tokens of a pass.
    """

    def __init__(self) -> None:
        private_names(_FUSED, "_hybrid_ep_buffer")
        self._fused = import_megatron(_FUSED)
        self._captured: tuple[Any, int] | None = None

    def remember(self) -> None:
        """Remember the current buffer, with which graphs were captured."""
        self._captured = self._current()

    def is_replaced(self) -> bool:
        """Return whether HybridEP has replaced its buffer since the last capture."""
        return self._captured is not None and self._captured != self._current()

    def check(self) -> None:
        """Check the buffer before a replay.

        Raises:
            ReplayMismatchError: HybridEP has replaced its buffer since the capture.
        """
        if self._captured is not None and self.is_replaced():
            (_, before), (_, tokens) = self._captured, self._current()
            raise ReplayMismatchError(
                "HybridEP replaced its buffer outside of all steps since the graphs were captured: "
                f"a pass had {tokens} tokens on this rank, and the graphs write to the buffer of "
                f"{before}. Run such passes through the wrapped schedule (forward_only), after "
                "which all ranks capture again, or release() the graphs before them."
            )

    def _current(self) -> tuple[Any, int]:
        buffer = self._fused._hybrid_ep_buffer
        if buffer is None:
            return None, 0
        return buffer, int(buffer.configurer.buffer_config.max_num_of_tokens_per_rank)
