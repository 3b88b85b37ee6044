"""FP8 weights that the optimizer writes (``fp8_param_gather``): graphs read their memory.

The optimizer casts its weights into the FP8 data in place, and after the all-gather Megatron lets
Transformer Engine renew their transposes in place. Both happen outside of graphs. A graph stays
right as long as a weight keeps its data, transpose and scales where they are, and none of them is
created in a capture, where Python state would skip it in the next one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from chunkgraph.errors import CaptureError, ReplayMismatchError

__all__ = ["PrimaryWeights", "keeps_transposes", "memory_of"]


def keeps_transposes() -> bool:
    """Return whether Transformer Engine renews the transposes of weights in place.

    Earlier releases mark them as outdated after each optimizer step, and the next backward renews
    them, which a replay would not do.
    """
    try:
        utils = importlib.import_module("transformer_engine.pytorch.tensor.utils")
    except ImportError:
        return False
    return hasattr(utils, "post_all_gather_processing")


def memory_of(weight: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors inside a quantized tensor, or a plain tensor itself."""
    # Others, such as main_grad, belong to Megatron.
    inner = tuple(
        value
        for name, value in vars(weight).items()
        if name.startswith("_") and isinstance(value, torch.Tensor)
    )
    return inner if inner or not isinstance(weight, torch.Tensor) else (weight,)


class PrimaryWeights:
    """The FP8 weights of captured modules.

    Args:
        parts: For each chunk, its modules.
        labels: Names of the chunks in errors.
    """

    def __init__(self, parts: Sequence[Sequence[nn.Module]], labels: Sequence[str]) -> None:
        # Modules with the names of their quantized weights, and the weights.
        self._places = [
            [
                (module, name, weight)
                for module in modules
                for name, weight in module._parameters.items()
                if hasattr(weight, "update_usage")
            ]
            for modules in parts
        ]
        self._labels = tuple(labels)
        self._captured: list[tuple[torch.Tensor, ...]] = []

    def prepare(self) -> None:
        """Create transposes that do not exist yet, and renew outdated ones."""
        for _, weight in self._named():
            weight.update_usage(rowwise_usage=True, columnwise_usage=True)

    def check_captured(self, index: int) -> None:
        """Check that captures of a chunk read the memory of the weights.

        In a session other tensors on the same memory replace the weights in their modules.

        Raises:
            CaptureError: The session began before a weight had its transpose.
        """
        for module, name, weight in self._places[index]:
            if _addresses(module._parameters[name]) != _addresses(weight):
                raise CaptureError(
                    f"{self._labels[index]}: {name} of {type(module).__name__} is an FP8 weight "
                    "whose transpose was created after the capture had begun.\n  To do: run an "
                    "eager training step before the capture (num_warmup_steps of 1 or more); or "
                    "train without FP8 weights."
                )

    def hold(self) -> None:
        """Keep the memory that captures read, and remember where it is."""
        self._captured = [memory_of(weight) for _, weight in self._named()]

    def check(self) -> None:
        """Check that graphs still read the weights.

        Raises:
            ReplayMismatchError: A weight has moved to other memory.
        """
        for (name, weight), captured in zip(self._named(), self._captured, strict=True):
            if _addresses(weight) != [tensor.data_ptr() for tensor in captured]:
                raise ReplayMismatchError(
                    f"{name}: its FP8 data, transpose or scales have moved to other memory since "
                    "the capture. Update weights in place (copy_), or release the graphs and "
                    "capture again after replacing them."
                )

    def release(self) -> None:
        """Drop the memory; no graph may use it afterwards."""
        self._captured = []

    def _named(self) -> Iterator[tuple[str, Any]]:
        for label, places in zip(self._labels, self._places, strict=True):
            for module, name, weight in places:
                yield f"{label}: {name} of {type(module).__name__}", weight


def _addresses(weight: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in memory_of(weight)]
