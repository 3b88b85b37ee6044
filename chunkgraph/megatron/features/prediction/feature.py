"""Support multi-token prediction, whose loss scale and metrics are state in Python.

Megatron 0.17 also checks on the host whether any token counts, before it divides by their number; a
captured forward checks on the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch

from chunkgraph.engine import Chunk
from chunkgraph.megatron.captured_part import CapturedPart
from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names
from chunkgraph.megatron.feature import Feature, Work
from chunkgraph.megatron.site import Site
from chunkgraph.megatron.tracked_loss import TrackedLoss

__all__ = ["TokenPrediction"]

_MODULE = "megatron.core.transformer.multi_token_prediction"


class TokenPrediction(Feature):
    """Keep the loss scale and the metrics of multi-token prediction right in one rank's graphs."""

    def __init__(self) -> None:
        self._loss = TrackedLoss(
            *private_names(_MODULE, "MTPLossAutoScaler", "MTPLossLoggingHelper")
        )

    @classmethod
    def of(cls, site: Site, _undo: ExitStack) -> Self | None:
        """Apply if a captured part predicts several tokens at once."""
        return cls() if any(part.predicts_tokens for part in site.parts) else None

    def wrap(self, part: CapturedPart, chunk: Chunk) -> Chunk:
        """Handle the scale and the metrics of a part that predicts several tokens."""
        return self._loss.wrap(chunk) if part.predicts_tokens else chunk

    @contextmanager
    def around(self, work: Work) -> Iterator[None]:
        """Let graphs read the scale from a fixed tensor, and count tokens on the device."""
        with ExitStack() as stack:
            if work == "capture":
                stack.callback(_count_on_the_device())
            stack.enter_context(self._loss.around(work))
            yield


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
    module = import_megatron(_MODULE)
    process = getattr(module, "process_mtp_loss", None)
    if process is None or "if num_tokens > 0" not in inspect.getsource(process):
        return lambda: None
    (roll,) = private_names(_MODULE, "roll_tensor")

    def roll_tensor(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rolled, count = roll(*args, **kwargs)
        return rolled, count.as_subclass(_Count)

    return patch_attributes(module, {"roll_tensor": roll_tensor})
