"""Restore what eager passes and test replays of a chunk change: tensors, random state, modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import _disable_current_modes

from chunkgraph.engine.bits import has_memory, same_bits
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.module_tree import entries
from chunkgraph.errors import CaptureError
from chunkgraph.graphs.operators import OperatorMode, storages_written

_PARTS = ("_modules", "_parameters", "_buffers")


@dataclass(frozen=True)
class ChunkState:
    """A copy of the state that a pass of a chunk reads and may change.

    Attributes:
        tensors: tensors, each with a copy of its contents.
        random: random generators, each with its state.
    """

    tensors: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    random: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()

    @staticmethod
    def now(
        tensors: Iterable[torch.Tensor], generators: Iterable[torch.Generator] = ()
    ) -> ChunkState:
        """Copy the present state. Modes that record operators do not see it."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            copies = tuple((tensor, tensor.clone()) for tensor in tensors)
        return ChunkState(copies, tuple((g, g.get_state()) for g in generators))

    def restore(self) -> None:
        """Restore this state; autograd's version counters stay.

        Unchanged memory is not written, since it may be read-only. Waits for the device.
        """
        for tensor, value in self.tensors:
            if same_bits(tensor, value):
                continue
            with (
                torch.inference_mode(tensor.is_inference()),
                torch.no_grad(),
                versions([tensor]),
            ):
                tensor.copy_(value)
        for generator, value in self.random:
            generator.set_state(value)


@contextmanager
def restoring(
    tensors: Sequence[torch.Tensor],
    generators: Sequence[torch.Generator] = (),
    begin: ChunkState | None = None,
) -> Iterator[None]:
    """Restore tensors, their version counters and the generators on exit.

    Args:
        tensors: tensors that the block may write; see `writable`.
        generators: random generators that the block draws from.
        begin: the state that the block begins with; None for the present one.
    """
    state = ChunkState.now(tensors, generators)
    try:
        with versions(tensors):
            if begin is not None:
                begin.restore()
            yield
    finally:
        state.restore()


@contextmanager
def restoring_writes(chunk: Chunk) -> Iterator[list[torch.Tensor]]:
    """Restore, on exit, every tensor of the chunk that an eager pass in this block writes.

    Parameters are large, and a forward hardly writes them: their memory is copied just before the
    first operator that does.

    Yields:
        The memory of parameters that operators of the block write, filled on exit.
    """
    _, parameters = _regions(chunk)
    watch = _WriteWatch(parameters)
    written: list[torch.Tensor] = []
    try:
        with restoring(writable(chunk)), versions(parameters), watch:
            yield written
    finally:
        ChunkState(tuple(watch.saved)).restore()
        written.extend(region for region, _ in watch.saved)


def writable(chunk: Chunk, written: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """Return the memory that a pass of the chunk may write.

    That is all memory of its tensors except parameters, since kernels that torch does not know,
    among them those of ``torch.compile``, write unseen.

    Args:
        chunk: the chunk.
        written: memory of parameters that its passes write; see `restoring_writes`.
    """
    return [*_regions(chunk)[0], *written]


@contextmanager
def restoring_parts(chunk: Chunk, kinds: Sequence[str] = _PARTS) -> Iterator[None]:
    """Restore, on exit, the modules, parameters and buffers that are registered in the chunk's.

    Args:
        chunk: the chunk.
        kinds: the names under which a module registers the parts to restore.

    Raises:
        CaptureError: the forward replaced one of them.
    """
    named = chunk.module.named_modules() if chunk.module is not None else ()
    held = [(path, vars(module)[part]) for path, module in named for part in kinds]
    before = [dict(own) for _, own in held]
    replaced: list[str] = []
    try:
        yield
    finally:
        for (path, own), old in zip(held, before, strict=True):
            changed = [key for key in old if own.get(key) is not old[key]]
            replaced += [f"{path}.{k}".lstrip(".") for k in changed if k not in chunk.caches]
            own.update(old)
    if replaced:
        raise CaptureError(
            f"{chunk.label}: its forward replaces {', '.join(replaced)} by another tensor, so "
            "every replay would start from the value of the capture. Update it in place (add_, "
            "copy_), or keep it out of the chunk."
        )


def versions(tensors: Sequence[torch.Tensor]) -> _unsafe_preserve_version_counter:
    """Return autograd's version counters of the tensors; its ``__exit__`` restores them."""
    return _unsafe_preserve_version_counter(tuple(t for t in tensors if not t.is_inference()))


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
            self._regions.setdefault(region.untyped_storage().data_ptr(), []).append(region)

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        for tensor in storages_written(func, args, kwargs):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage().data_ptr()
                for region in self._regions.pop(storage, ()):
                    self.saved.append((region, region.clone()))
        return func(*args, **kwargs)


def _regions(chunk: Chunk) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the memory of the chunk's tensors, each once; that of parameters is the second list.

    Hides these operators from recording modes, since they are not part of a graph.
    """
    by_place: dict[tuple[object, ...], torch.Tensor] = {}
    of_parameters: set[int] = set()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        for tensor in tensors_kept(chunk):
            if not has_memory(tensor):
                continue
            if isinstance(tensor, nn.Parameter):
                of_parameters.add(tensor.untyped_storage().data_ptr())
            # Without repeats of expanded tensors.
            strides = tensor.stride()
            shape = [n if stride else 1 for n, stride in zip(tensor.shape, strides, strict=True)]
            region = tensor.detach().as_strided(shape, [stride or 1 for stride in strides])
            place = (region.data_ptr(), region.shape, region.stride(), region.dtype)
            by_place.setdefault(place, region)
        lists: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for region in by_place.values():
            lists[region.untyped_storage().data_ptr() in of_parameters].append(region)
    return lists


def tensors_kept(chunk: Chunk) -> Iterable[torch.Tensor]:
    """Yield the chunk's parameters and buffers, and what its modules keep, perhaps repeatedly."""
    yield from chunk.parameters
    yield from chunk.buffers
    for _, _, value, _ in entries(chunk.module) if chunk.module is not None else ():
        values = value if isinstance(value, tuple) else (value,)
        yield from (v for v in values if isinstance(v, torch.Tensor))
