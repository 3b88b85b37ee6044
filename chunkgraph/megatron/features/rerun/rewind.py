"""Rewind a training step: its inputs, random state, buffers and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from chunkgraph.megatron.core.random_state import RandomStates
from chunkgraph.megatron.features.rerun.running_metrics import running_metrics

__all__ = ["RewindableInputs", "StepState"]


class RewindableInputs:
    """Repeat the items of a schedule's ``data_iterator``, or of a list of them.

    Containers are returned as copies, so that a forward step may remove items from them; the
    tensors in them are the same objects.

    Args:
        data_iterator: The schedule's argument.

    Attributes:
        data_iterator: The argument to pass to the schedule instead.
    """

    def __init__(self, data_iterator: Any) -> None:
        self._iterators: dict[int, _RecordingIterator] = {}
        if isinstance(data_iterator, (list, tuple)):
            self.data_iterator: Any = [self._recording(source) for source in data_iterator]
        else:
            self.data_iterator = self._recording(data_iterator)

    def rewind(self) -> None:
        """Start again with the first item of the step."""
        for iterator in self._iterators.values():
            iterator.position = 0

    def _recording(self, source: Any) -> Any:
        if source is None:
            return None
        return self._iterators.setdefault(id(source), _RecordingIterator(source))


class _RecordingIterator:
    def __init__(self, source: Any) -> None:
        self._source = source
        self._items: list[Any] = []
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.position == len(self._items):
            self._items.append(next(self._source))
        item = self._items[self.position]
        self.position += 1
        return tree_map(lambda leaf: leaf, item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class StepState:
    """Save and restore the state that a step changes.

    The state consists of buffers, random state, ``more_tensors`` and Megatron's process-wide
    metrics; gradients are reset.

    Args:
        model_chunks: The model chunks of this rank.
        more_tensors: Tensors that the step writes, apart from model buffers.
    """

    def __init__(
        self, model_chunks: Sequence[nn.Module], more_tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        self._chunks = tuple(model_chunks)
        # Not `chunk.buffers()`: Megatron's DDP has a list of that name.
        modules = [m for chunk in model_chunks for m in chunk.modules()]
        buffers = [b for m in modules for b in vars(m)["_buffers"].values() if b is not None]
        self._tensors = list({id(t): t for t in (*buffers, *more_tensors)}.values())
        self._saved = [torch.empty_like(t) for t in self._tensors]
        self._random: RandomStates | None = None
        self._metrics: dict[str, torch.Tensor] = {}

    def save(self) -> None:
        """Save the state, before a step."""
        self._random = RandomStates()
        running = running_metrics()
        previous, self._metrics = self._metrics, {}
        for name, value in running.items():
            copy = previous.get(name)
            if copy is None or copy.shape != value.shape:
                copy = torch.empty_like(value)
            self._metrics[name] = copy
        _copy([*self._saved, *self._metrics.values()], [*self._tensors, *running.values()])

    def restore(self) -> None:
        """Restore the saved state and reset gradients; a step begins without gradients."""
        assert self._random is not None
        self._random.restore()
        _copy(self._tensors, self._saved)
        for name, value in running_metrics().items():
            if name in self._metrics:
                value.copy_(self._metrics[name])
            else:  # first recorded in this step
                value.zero_()
        for chunk in self._chunks:
            zero_buffers: Any = getattr(chunk, "zero_grad_buffer", None)
            if zero_buffers is not None:
                zero_buffers()
            for parameter in chunk.parameters():
                parameter.grad = None
                if zero_buffers is None and hasattr(parameter, "main_grad"):
                    parameter.main_grad.zero_()


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy with few kernels, one for each dtype, since this runs before every step."""
    by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for pair in zip(targets, sources, strict=True):
        by_dtype.setdefault(pair[0].dtype, []).append(pair)
    with torch.no_grad():
        for pairs in by_dtype.values():
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
