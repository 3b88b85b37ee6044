"""Multi-token prediction: its state in Python and how a graph follows it.

Megatron sets the scale of its loss anew for every microbatch, as another tensor, and keeps its
metrics in one place of the process. Captured, the backward reads the scale from a tensor that
stays, and the metrics are added up where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from chunkgraph.megatron.compat.access import private_names

__all__ = ["TokenPrediction"]

_MODULE = "megatron.core.transformer.multi_token_prediction"
_GROUPS = ("reduce_group", "avg_group")


class TokenPrediction:
    """The loss scale and the metrics of multi-token prediction, for the graphs of one rank."""

    def __init__(self) -> None:
        self._scaler, self._log = private_names(
            _MODULE, "MTPLossAutoScaler", "MTPLossLoggingHelper"
        )
        self._scale: torch.Tensor | None = None
        self._groups: dict[str, Any] = {}

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, Megatron's scale is the tensor that the graphs read; metrics are put back."""
        current = self._scaler.main_loss_backward_scale
        self._scale = current.detach().clone()
        tracker = self._log.tracker
        kept = {name: v.clone() for name, v in tracker.items() if isinstance(v, torch.Tensor)}
        groups = {name: tracker[name] for name in _GROUPS if name in tracker}
        self._scaler.main_loss_backward_scale = self._scale
        try:
            yield
        finally:
            self._groups = {name: tracker[name] for name in _GROUPS if name in tracker}
            tracker.update(groups)
            for name, value in kept.items():
                tracker[name].copy_(value)
            self._scaler.main_loss_backward_scale = current

    def before_forward(self) -> None:
        """What the forward leaves in Python: between which ranks its metrics are summed up."""
        self._log.tracker.update(self._groups)

    def before_backward(self) -> None:
        """Give the graphs the scale that Megatron has set."""
        assert self._scale is not None
        self._scale.copy_(self._scaler.main_loss_backward_scale)
