"""What the engine works out of its arguments: backend, label, the form of a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.signature import Call, flatten_call
from chunkgraph.graphs import CUDABackend, GraphBackend, RecorderBackend

__all__ = ["as_function", "check_counts", "default_backend", "rank_label", "sample_call"]


def as_function(
    call: Callable[[int, tuple[Any, ...], dict[str, Any]], Any], c: int
) -> Callable[..., Any]:
    """``call`` of chunk ``c``, to be called like the chunk itself."""
    return lambda *args, **kwargs: call(c, args, kwargs)


def check_counts(num_chunks: int, num_slots: Sequence[int]) -> None:
    """Refuse slot counts that do not fit the chunks.

    Raises:
        ValueError: saying how.
    """
    if num_chunks != len(num_slots) or not num_chunks:
        raise ValueError(
            f"got {num_chunks} chunks and {len(num_slots)} slot counts; give one count for each "
            "chunk"
        )
    if min(num_slots) < 1:
        raise ValueError(f"every chunk needs at least one slot, got {list(num_slots)}")


def default_backend(chunks: Sequence[Chunk], *, memset_kernels: bool = True) -> GraphBackend:
    """CUDA graphs or the CPU recorder, by where the parameters are."""
    devices = {p.device for chunk in chunks for p in chunk.parameters}
    if len(devices) != 1:
        raise ValueError(
            f"the chunks' parameters are on {sorted(map(str, devices)) or 'no device'}; "
            "put all of them on one device or pass a backend"
        )
    device = devices.pop()
    if device.type == "cuda":
        return CUDABackend(device, memset_kernels=memset_kernels)
    return RecorderBackend()


def rank_label(chunks: Sequence[Chunk]) -> str:
    """The rank's part of the chunks' labels."""
    return chunks[0].label.split(" chunk")[0].rstrip(",")


def sample_call(sample: Any) -> Call:
    """A sample as a call: a tuple of arguments, a dict of keyword arguments, or one tensor."""
    if isinstance(sample, dict):
        return flatten_call((), sample).sampled()
    return flatten_call(sample if isinstance(sample, tuple) else (sample,), {}).sampled()
