"""Restore the state that eager passes of capture warmup change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import _disable_current_modes

from chunkgraph.engine.bits import same_bits
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.module_tree import containers
from chunkgraph.graphs.operators import OperatorMode, storages_written

__all__ = ["KeptTensors", "put_back", "regions", "tensors_kept", "versions"]


class KeptTensors:
    """The tensors that a block restores.

    Attributes:
        were_written: whether an operator wrote to them, or left other contents; set at the end.
    """

    were_written = False


@contextmanager
def tensors_kept(chunk: Chunk) -> Iterator[KeptTensors]:
    """Restore, on exit, every tensor of the chunk that is written in this block.

    State, such as buffers, is copied at the start: kernels that torch does not know, among them
    those of ``torch.compile``, write it unseen. Parameters are large, and a forward hardly writes
    them: their memory is copied just before the first operator that does.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        tensors = list(_tensors(chunk))
        parameters = {_storage(t) for t in tensors if isinstance(t, nn.Parameter)}
        every = _regions(tensors)
        state = [(r, r.clone()) for r in every if _storage(r) not in parameters]
        watch = _WriteWatch([r for r in every if _storage(r) in parameters], [r for r, _ in state])
    kept = KeptTensors()
    try:
        with versions(every), watch:
            yield kept
    finally:
        have_changed = put_back([*state, *watch.saved])
        kept.were_written = have_changed or bool(watch.saved) or watch.has_written_state


def put_back(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Write copies of tensors back where bits differ; autograd's version counters stay.

    Unchanged memory is not written, since it may be read-only. Waits for the device.

    Args:
        copies: each tensor, with a copy of its old contents.

    Returns:
        Whether the bits of any tensor differed.
    """
    have_changed = False
    for tensor, value in copies:
        if not same_bits(tensor, value):
            have_changed = True
            with (
                torch.inference_mode(tensor.is_inference()),
                torch.no_grad(),
                versions([tensor]),
            ):
                tensor.copy_(value)
    return have_changed


def versions(tensors: Sequence[torch.Tensor]) -> _unsafe_preserve_version_counter:
    """Return autograd's version counters of the tensors; its ``__exit__`` restores them."""
    return _unsafe_preserve_version_counter(tuple(t for t in tensors if not t.is_inference()))


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's memory; 0 for those without."""
    return tensor.untyped_storage()._cdata if _has_memory(tensor) else 0


class _WriteWatch(OperatorMode):
    """Copy regions before the first operator that writes to their storage.

    Args:
        regions: tensors whose memory is watched.
        state: tensors that are not copied.

    Attributes:
        saved: each region that may have been written, with a copy of its old contents.
        has_written_state: whether an operator wrote to ``state``, perhaps what it already held.
    """

    def __init__(self, regions: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.has_written_state = False
        self._state = {tensor.untyped_storage().data_ptr() for tensor in state}
        self.saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._regions: dict[int, list[torch.Tensor]] = {}
        for region in regions:
            storage = region.untyped_storage().data_ptr()
            self._regions.setdefault(storage, []).append(region)

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        for tensor in storages_written(func, args, kwargs):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage().data_ptr()
                self.has_written_state |= storage in self._state
                for region in self._regions.pop(storage, ()):
                    self.saved.append((region, region.clone()))
        return func(*args, **kwargs)


def regions(chunk: Chunk) -> list[torch.Tensor]:
    """Return the memory of the chunk's tensors, each once, without repeats of expanded tensors.

    Hides these operators from recording modes, since they are not part of a graph.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return _regions(_tensors(chunk))


def _regions(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    by_place: dict[tuple[object, ...], torch.Tensor] = {}
    for tensor in tensors:
        if not _has_memory(tensor):
            continue
        strides = tensor.stride()
        shape = [n if stride else 1 for n, stride in zip(tensor.shape, strides, strict=True)]
        region = tensor.detach().as_strided(shape, [stride or 1 for stride in strides])
        place = (region.data_ptr(), region.shape, region.stride(), region.dtype)
        by_place.setdefault(place, region)
    return list(by_place.values())


def _tensors(chunk: Chunk) -> Iterable[torch.Tensor]:
    yield from chunk.parameters
    yield from chunk.buffers
    for container in containers(chunk.module) if chunk.module is not None else ():
        for _, value in container.entries():
            values = value if isinstance(value, tuple) else (value,)
            yield from (v for v in values if isinstance(v, torch.Tensor))


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has its own dense memory, unlike sparse and wrapper tensors."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not tensor.is_quantized
        and not torch.nn.parameter.is_lazy(tensor)
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() > 0  # 0: its owner has freed it
    )
