"""A training step that can be run again: its inputs, random state, buffers and gradients."""

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
    """A schedule's ``data_iterator``, or list of them, that gives the same items again.

    Containers are given out as copies, so that a forward step may take items out of them; tensors
    in them are the same ones.

    Args:
        data_iterator: as the schedule was to get it.
    """

    def __init__(self, data_iterator: Any) -> None:
        self._made: dict[int, _Remembering] = {}
        if isinstance(data_iterator, (list, tuple)):
            self.given: Any = [self._remembering(source) for source in data_iterator]
        else:
            self.given = self._remembering(data_iterator)

    def rewind(self) -> None:
        """Begin anew with the first item of the step."""
        for made in self._made.values():
            made.at = 0

    def _remembering(self, source: Any) -> Any:
        if source is None:
            return None
        return self._made.setdefault(id(source), _Remembering(source))


class _Remembering:
    def __init__(self, source: Any) -> None:
        self._source = source
        self._seen: list[Any] = []
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == len(self._seen):
            self._seen.append(next(self._source))
        item = self._seen[self.at]
        self.at += 1
        return tree_map(lambda leaf: leaf, item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class StepState:
    """What a step of the schedule changes besides gradients.

    Buffers, random state, ``further``, and the metrics that Megatron keeps in the process.

    Args:
        model_chunks: of this rank.
        further: tensors that the step writes besides the model's buffers.
    """

    def __init__(
        self, model_chunks: Sequence[nn.Module], further: Sequence[torch.Tensor] = ()
    ) -> None:
        self._chunks = tuple(model_chunks)
        # Not `chunk.buffers()`: Megatron's DDP has a list of that name.
        modules = [m for chunk in model_chunks for m in chunk.modules()]
        buffers = [b for m in modules for b in vars(m)["_buffers"].values() if b is not None]
        self._tensors = list({id(t): t for t in (*buffers, *further)}.values())
        self._kept = [torch.empty_like(t) for t in self._tensors]
        self._random: RandomStates | None = None
        self._metrics: dict[str, torch.Tensor] = {}

    def keep(self) -> None:
        """Remember all of it, before a step."""
        self._random = RandomStates()
        running = running_metrics()
        before, self._metrics = self._metrics, {}
        for name, value in running.items():
            kept = before.get(name)
            if kept is None or kept.shape != value.shape:
                kept = torch.empty_like(value)
            self._metrics[name] = kept
        _copy([*self._kept, *self._metrics.values()], [*self._tensors, *running.values()])

    def restore(self) -> None:
        """Put it back, and drop the gradients: a step begins without any."""
        assert self._random is not None
        self._random.restore()
        _copy(self._tensors, self._kept)
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


def _copy(into: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """In few kernels, one for each type: this happens before every step."""
    alike: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for pair in zip(into, given, strict=True):
        alike.setdefault(pair[0].dtype, []).append(pair)
    with torch.no_grad():
        for pairs in alike.values():
            torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])
