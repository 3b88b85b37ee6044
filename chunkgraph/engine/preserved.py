"""State around capture warmup: what eager passes change is put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.module_tree import containers
from chunkgraph.graphs import GraphBackend

__all__ = ["generators_kept", "tensors_kept"]


@contextmanager
def generators_kept(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Put the states of random generators back at the end of the block."""
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def tensors_kept(chunk: Chunk, backend: GraphBackend) -> Iterator[None]:
    """Put back, at the end of the block, every tensor of the chunk that was written inside.

    Values are copied before and compared afterwards, so that no kind of write is missed, and no
    version counter of what was not written changes. The copies lie on the host where the device
    has little room.
    """
    regions = _regions(chunk)
    num_bytes = sum(region.numel() * region.element_size() for region in regions)
    free = backend.free_bytes()
    on_host = free is not None and num_bytes > free // 4
    copies = [r.to("cpu", copy=True) if on_host else r.clone() for r in regions]
    try:
        yield
    finally:
        for region, value in zip(regions, copies, strict=True):
            if not torch.equal(_bytes(region), _bytes(value.to(region.device))):
                with torch.inference_mode(region.is_inference()), torch.no_grad():
                    region.copy_(value)


def _regions(chunk: Chunk) -> list[torch.Tensor]:
    """The memory of the chunk's tensors, each once, without what an expanded one repeats."""
    found: dict[tuple[object, ...], torch.Tensor] = {}
    for tensor in _tensors(chunk):
        if not _has_memory(tensor):
            continue
        strides = tensor.stride()
        shape = [n if stride else 1 for n, stride in zip(tensor.shape, strides, strict=True)]
        region = tensor.detach().as_strided(shape, [stride or 1 for stride in strides])
        place = (region.data_ptr(), region.shape, region.stride(), region.dtype)
        found.setdefault(place, region)
    return list(found.values())


def _tensors(chunk: Chunk) -> Iterable[torch.Tensor]:
    yield from chunk.parameters
    yield from chunk.buffers
    for container in containers(chunk.module) if chunk.module is not None else ():
        for _, value in container.entries():
            values = value if isinstance(value, tuple) else (value,)
            yield from (v for v in values if isinstance(v, torch.Tensor))


def _has_memory(tensor: torch.Tensor) -> bool:
    """Not so: sparse tensors, and those that wrap others and have nothing of their own."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not tensor.is_quantized
        and not torch.nn.parameter.is_lazy(tensor)
        and tensor.numel() > 0
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
