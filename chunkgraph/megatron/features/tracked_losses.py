"""Support losses of multi-token prediction, whose scale and metrics are state in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch

from chunkgraph.engine import Chunk
from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names
from chunkgraph.megatron.feature import Feature, Work, chained
from chunkgraph.megatron.model_part import ModelPart
from chunkgraph.megatron.site import Site
from chunkgraph.settings.rule import Rule

_GROUPS = ("reduce_group", "avg_group")
_PREDICTION = "megatron.core.transformer.multi_token_prediction"


class TokenPrediction(Feature):
    """Keep the loss scale and the metrics of multi-token prediction right in one rank's graphs.

    Megatron may set the scale to another tensor in every microbatch, and keeps the metrics in
    process-wide tensors. A captured backward reads the scale from a fixed tensor, and a captured
    forward adds to the metrics in place.

    Megatron 0.17 also checks on the host whether any token counts, before it divides by their
    number; a captured forward checks on the device.
    """

    replays_forwards = False
    rules = (
        Rule(
            "experimental_attention_variant: chunk graphs do not support sparse attention; train "
            "without graphs",
            lambda f: f.experimental_attention_variant == "dsa",
        ),
    )

    def __init__(self) -> None:
        self._scaler, self._log = private_names(
            _PREDICTION, "MTPLossAutoScaler", "MTPLossLoggingHelper"
        )
        self._scale: torch.Tensor | None = None
        self._groups: dict[str, Any] = {}

    @classmethod
    def of(cls, site: Site, _undo: ExitStack) -> Self | None:
        """Apply if a captured part predicts several tokens at once."""
        return cls() if any(part.predicts_tokens for part in site.parts) else None

    def wrap(self, part: ModelPart, chunk: Chunk) -> Chunk:
        """Set the current scale and groups before replays of a part that predicts tokens."""
        if not part.predicts_tokens:
            return chunk
        return replace(
            chunk,
            before_forward=chained(chunk.before_forward, self._before_forward),
            before_backward=chained(chunk.before_backward, self._before_backward),
        )

    @contextmanager
    def around(self, work: Work) -> Iterator[None]:
        """Capture with a fixed scale and counts on the device; restore the metrics on exit."""
        with ExitStack() as stack:
            if work == "capture":
                stack.callback(_count_on_the_device())
                stack.enter_context(self._capturing())
            elif work == "verify":
                stack.enter_context(self._restoring())
            yield

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


class _Count(torch.Tensor):
    """A number of tokens that the host treats as nonzero; the division checks on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # gives plain tensors

    def __gt__(self, _: object) -> Any:
        return True

    def __rtruediv__(self, total: Any) -> torch.Tensor:
        count = self.as_subclass(torch.Tensor)
        return torch.where(count > 0, total / count, torch.zeros_like(total))


def _count_on_the_device() -> Callable[[], None]:
    """Stop a release from reading numbers of tokens on the host; return the undo function."""
    module = import_megatron(_PREDICTION)
    process = getattr(module, "process_mtp_loss", None)
    if process is None or "if num_tokens > 0" not in inspect.getsource(process):
        return lambda: None
    (roll,) = private_names(_PREDICTION, "roll_tensor")

    def roll_tensor(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rolled, count = roll(*args, **kwargs)
        return rolled, count.as_subclass(_Count)

    return patch_attributes(module, {"roll_tensor": roll_tensor})
