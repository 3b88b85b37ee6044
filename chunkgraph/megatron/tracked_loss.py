"""A loss inside of layers, whose scale and metrics are state in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from chunkgraph.engine import Chunk
from chunkgraph.megatron.feature import Work, chained

__all__ = ["TrackedLoss"]

_GROUPS = ("reduce_group", "avg_group")


class TrackedLoss:
    """Keeps the scale and the metrics of a loss right in one rank's graphs.

    Megatron may set the scale to another tensor in every microbatch, and keeps the metrics in
    process-wide tensors. A captured backward reads the scale from a fixed tensor, and a captured
    forward adds to the metrics in place.

    Args:
        scaler: Megatron's class with the scale.
        log: Megatron's class with the metrics.
    """

    def __init__(self, scaler: Any, log: Any) -> None:
        self._scaler = scaler
        self._log = log
        self._scale: torch.Tensor | None = None
        self._groups: dict[str, Any] = {}

    def wrap(self, chunk: Chunk) -> Chunk:
        """Return a chunk with the loss, whose replays have the current scale and groups."""
        return replace(
            chunk,
            before_forward=chained(chunk.before_forward, self._before_forward),
            before_backward=chained(chunk.before_backward, self._before_backward),
        )

    def around(self, work: Work) -> AbstractContextManager[None]:
        """Enclose passes of the engine, which are not part of the training."""
        if work == "session":
            return nullcontext()
        return self._capturing() if work == "capture" else self._restoring()

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Set Megatron's scale to the tensor that the graphs read; restore the metrics on exit."""
        current = self._scaler.main_loss_backward_scale
        self._scale = current.detach().clone()
        tracker = self._log.tracker
        self._scaler.main_loss_backward_scale = self._scale
        try:
            with self._restoring():
                yield
                self._groups = {name: tracker[name] for name in _GROUPS if name in tracker}
        finally:
            self._scaler.main_loss_backward_scale = current

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Restore the metrics on exit."""
        tracker = self._log.tracker
        saved = {name: v.clone() for name, v in tracker.items() if isinstance(v, torch.Tensor)}
        groups = {name: tracker[name] for name in _GROUPS if name in tracker}
        try:
            yield
        finally:
            tracker.update(groups)
            for name, value in saved.items():
                tracker[name].copy_(value)

    def _before_forward(self) -> None:
        """Set the groups over which metrics are reduced, as an eager forward does."""
        self._log.tracker.update(self._groups)

    def _before_backward(self) -> None:
        """Copy Megatron's current scale into the tensor that the graphs read."""
        assert self._scale is not None
        self._scale.copy_(self._scaler.main_loss_backward_scale)
