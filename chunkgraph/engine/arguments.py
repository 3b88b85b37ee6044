"""Check and convert the arguments of the engine: chunks, options, slot counts, samples."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import index
from typing import Any

import torch
from torch import nn

from chunkgraph._text import shown
from chunkgraph.engine.chunk import CaptureOptions, Chunk
from chunkgraph.engine.program import program_of
from chunkgraph.engine.tree import Call, flatten_call
from chunkgraph.errors import ConfigError
from chunkgraph.graphs import CUDABackend, GraphBackend, RecorderBackend


def as_chunks(chunks: object) -> tuple[Chunk, ...]:
    """Return the chunks of a rank, from one or several modules or `Chunk` values.

    Raises:
        ConfigError: a value is neither a module nor a `Chunk`, or its program is none.
    """
    are_several = isinstance(chunks, (list, tuple, nn.ModuleList))
    values: Sequence[Any] = chunks if are_several else (chunks,)  # type: ignore[assignment]
    for i, value in enumerate(values):
        if not isinstance(value, (Chunk, nn.Module)):
            raise ConfigError(
                f"Chunk {i} is {shown(value)}. Pass an instance of nn.Module, or for a function "
                "Chunk(forward=function, parameters=(...), label='...')."
            )
        if isinstance(value, Chunk):
            program_of(value)
    return tuple(
        value if isinstance(value, Chunk) else Chunk.from_module(value, f"chunk {i}")
        for i, value in enumerate(values)
    )


def check_counts(num_chunks: int, num_slots: int | Iterable[int]) -> tuple[int, ...]:
    """Return the slot counts of all chunks; a single number applies to each.

    Raises:
        ConfigError: there are no chunks, not as many counts as chunks, or a count is below 1.
        TypeError: a value is not an integer.
    """
    if not num_chunks:
        raise ConfigError("There are no chunks. Pass at least one module.")
    values = num_slots if isinstance(num_slots, Iterable) else (num_slots,) * num_chunks
    counts = tuple(map(index, values))
    if len(counts) != num_chunks or min(counts) < 1:
        raise ConfigError(
            f"num_slots is {shown(num_slots)} for {num_chunks} chunks. Pass for each chunk the "
            "most microbatches it ever has in flight, or use ChunkGraphs.for_schedule, which "
            "computes it."
        )
    return counts


def default_backend(chunks: Sequence[Chunk], options: CaptureOptions) -> GraphBackend:
    """Return the backend of the parameters' device: CUDA graphs or the CPU recorder.

    Raises:
        ConfigError: the parameters are on several devices, or there is none, frozen ones included.
    """
    devices = {p.device for chunk in chunks for p in chunk.parameters}
    if not devices:
        modules = [chunk.module for chunk in chunks if chunk.module is not None]
        devices = {t.device for m in modules for t in (*m.parameters(), *m.buffers())}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices))) or "no device"
        raise ConfigError(
            f"{rank_label(chunks)}: the parameters are on {names}. Put all of them on one device, "
            "or pass ChunkGraphs a backend."
        )
    device, can_sleep = devices.pop(), options.can_sleep or options.has_pages
    if device.type == "cuda":
        return CUDABackend(device, memset_kernels=options.memset_kernels, can_sleep=can_sleep)
    return RecorderBackend(can_sleep=can_sleep)


def rank_label(chunks: Sequence[Chunk]) -> str:
    """Return the rank's part of the chunks' labels."""
    return chunks[0].label.split(" chunk")[0].rstrip(",")


def sample_calls(
    samples: Sequence[Any] | Mapping[Hashable, Sequence[Any]],
    keys: Sequence[Hashable],
    num_chunks: int,
) -> dict[Hashable, list[Call]]:
    """Return the calls of samples, by bank.

    Args:
        samples: for each chunk a tuple of arguments, a dict of keyword arguments, or one tensor;
            with several banks, a mapping by key.
        keys: keys of the banks.
        num_chunks: number of chunks of the rank.

    Raises:
        ConfigError: there is not one sample for each chunk.
    """
    by_bank = samples if isinstance(samples, Mapping) else {keys[0]: samples}
    for of_bank in by_bank.values():
        if isinstance(of_bank, torch.Tensor) or len(of_bank) != num_chunks:
            number = "one tensor" if isinstance(of_bank, torch.Tensor) else len(of_bank)
            raise ConfigError(
                f"capture() got {number} as samples of {num_chunks} chunks. Pass a list of one "
                "sample for each chunk."
            )
    return {key: [_sample_call(s) for s in by_bank[key]] for key in keys}


def _sample_call(sample: Any) -> Call:
    """Return the call of a sample; see `sample_calls`."""
    if isinstance(sample, dict):
        return flatten_call((), sample).sampled()
    return flatten_call(sample if isinstance(sample, tuple) else (sample,), {}).sampled()
