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
from chunkgraph.engine.module_tree import entries
from chunkgraph.errors import CaptureError
from chunkgraph.graphs.operators import OperatorMode, storages_written

_PARTS = ("_modules", "_parameters", "_buffers")

__all__ = ["parts_kept", "put_back", "regions", "tensors_kept", "versions"]


@contextmanager
def tensors_kept(
    chunk: Chunk, written: Sequence[torch.Tensor] = ()
) -> Iterator[list[torch.Tensor]]:
    """Restore, on exit, every tensor of the chunk that is written in this block.

    State, such as buffers, is copied at the start: kernels that torch does not know, among them
    those of ``torch.compile``, write it unseen. Parameters are large, and a forward hardly writes
    them: their memory is copied just before the first operator that does. Graphs run no operators
    that torch sees, so name what they write.

    Args:
        chunk: the chunk.
        written: memory of parameters that is copied at the start.

    Yields:
        The memory of parameters that operators of the block write, filled on exit.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        tensors = list(_tensors(chunk))
        parameters = {_storage(t) for t in tensors if isinstance(t, nn.Parameter)}
        every = _regions(tensors)
        state = [(r, r.clone()) for r in every if _storage(r) not in parameters]
        state += [(r, r.clone()) for r in written]
        watch = _WriteWatch([r for r in every if _storage(r) in parameters])
    regions_written: list[torch.Tensor] = []
    try:
        with versions(every), watch:
            yield regions_written
    finally:
        put_back([*state, *watch.saved])
        regions_written.extend(region for region, _ in watch.saved)


@contextmanager
def parts_kept(chunk: Chunk) -> Iterator[None]:
    """Restore, on exit, the modules, parameters and buffers that are registered in the chunk's.

    Raises:
        CaptureError: the forward replaced one of them.
    """
    modules = chunk.module.modules() if chunk.module is not None else ()
    held: list[dict[str, Any]] = [vars(m)[name] for m in modules for name in _PARTS]
    before = [(d, dict(d)) for d in held]
    try:
        yield
    finally:
        replaced = [k for d, old in before for k in old if d.get(k) is not old[k]]
        for d, old in before:
            d.update(old)
    if replaced := [key for key in replaced if key not in chunk.caches]:
        raise CaptureError(
            f"{chunk.label}: its forward replaces {', '.join(replaced)} by another tensor, so "
            "every replay would start from the value of the capture. Update it in place (add_, "
            "copy_), or keep it out of the chunk."
        )


def put_back(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write copies of tensors back where bits differ; autograd's version counters stay.

    Unchanged memory is not written, since it may be read-only. Waits for the device.

    Args:
        copies: each tensor, with a copy of its old contents.
    """
    for tensor, value in copies:
        if not same_bits(tensor, value):
            with (
                torch.inference_mode(tensor.is_inference()),
                torch.no_grad(),
                versions([tensor]),
            ):
                tensor.copy_(value)


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

    Attributes:
        saved: each region that may have been written, with a copy of its old contents.
    """

    def __init__(self, regions: Sequence[torch.Tensor]) -> None:
        super().__init__()
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
    for _, _, value, _ in entries(chunk.module) if chunk.module is not None else ():
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
