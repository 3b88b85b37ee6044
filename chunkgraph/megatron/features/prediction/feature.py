"""Multi-token prediction: its state in Python and how a graph follows it.

Megatron sets the scale of its loss anew for every microbatch, as another tensor, and keeps its
metrics in one place of the process. Captured, the backward reads the scale from a tensor that
stays, and the metrics are added up where they are. 0.17 also asks on the host whether any token
counts, before it divides by their number; captured, the device asks.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import torch

from chunkgraph.engine import Chunk
from chunkgraph.megatron.captured_part import CapturedPart
from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names
from chunkgraph.megatron.feature import Feature, chained
from chunkgraph.megatron.site import Site

__all__ = ["TokenPrediction"]

_MODULE = "megatron.core.transformer.multi_token_prediction"
_GROUPS = ("reduce_group", "avg_group")


class TokenPrediction(Feature):
    """The loss scale and the metrics of multi-token prediction, for the graphs of one rank."""

    def __init__(self) -> None:
        self._scaler, self._log = private_names(
            _MODULE, "MTPLossAutoScaler", "MTPLossLoggingHelper"
        )
        self._scale: torch.Tensor | None = None
        self._groups: dict[str, Any] = {}

    @classmethod
    def of(cls, site: Site) -> Self | None:
        """Apply where a captured part predicts several tokens at once."""
        return cls() if any(part.predicts_tokens for part in site.parts) else None

    def wrap(self, part: CapturedPart, chunk: Chunk) -> Chunk:
        """Follow the scale and the metrics in a part that predicts several tokens."""
        if not part.predicts_tokens:
            return chunk
        return replace(
            chunk,
            before_forward=chained(chunk.before_forward, self.before_forward),
            before_backward=chained(chunk.before_backward, self.before_backward),
        )

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, Megatron's scale is the tensor that the graphs read; metrics are put back."""
        current = self._scaler.main_loss_backward_scale
        self._scale = current.detach().clone()
        tracker = self._log.tracker
        self._scaler.main_loss_backward_scale = self._scale
        unpatch = _count_on_the_device()
        try:
            with self.beside():
                yield
                self._groups = {name: tracker[name] for name in _GROUPS if name in tracker}
        finally:
            unpatch()
            self._scaler.main_loss_backward_scale = current

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Around forwards that are no part of the training: metrics are put back."""
        tracker = self._log.tracker
        kept = {name: v.clone() for name, v in tracker.items() if isinstance(v, torch.Tensor)}
        groups = {name: tracker[name] for name in _GROUPS if name in tracker}
        try:
            yield
        finally:
            tracker.update(groups)
            for name, value in kept.items():
                tracker[name].copy_(value)

    def before_forward(self) -> None:
        """What the forward leaves in Python: between which ranks its metrics are summed up."""
        self._log.tracker.update(self._groups)

    def before_backward(self) -> None:
        """Give the graphs the scale that Megatron has set."""
        assert self._scale is not None
        self._scale.copy_(self._scaler.main_loss_backward_scale)


class _Count(torch.Tensor):
    """A number of tokens of which the host assumes that it is not zero, and the device knows."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # gives plain tensors

    def __gt__(self, _: object) -> Any:
        return True

    def __rtruediv__(self, total: Any) -> torch.Tensor:
        count = self.as_subclass(torch.Tensor)
        return torch.where(count > 0, total / count, torch.zeros_like(total))


def _count_on_the_device() -> Callable[[], None]:
    """Keep a release that reads numbers of tokens on the host from it; returns what undoes it."""
    module = import_megatron(_MODULE)
    process = getattr(module, "process_mtp_loss", None)
    if process is None or "if num_tokens > 0" not in inspect.getsource(process):
        return lambda: None
    (roll,) = private_names(_MODULE, "roll_tensor")

    def roll_tensor(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rolled, count = roll(*args, **kwargs)
        return rolled, count.as_subclass(_Count)

    return patch_attributes(module, {"roll_tensor": roll_tensor})
