"""What the engine works out of its arguments: backend, label, the form of a sample."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from chunkgraph._text import shown
from chunkgraph.engine.banks import Banks
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.options import CaptureOptions, is_whole
from chunkgraph.engine.signature import Call, flatten_call
from chunkgraph.engine.watch.cast_cache import watch_optimizers
from chunkgraph.errors import ConfigError
from chunkgraph.graphs import CUDABackend, GraphBackend, RecorderBackend

__all__ = [
    "as_banks",
    "as_chunks",
    "as_functions",
    "as_options",
    "check_counts",
    "check_shape_key",
    "default_backend",
    "describe",
    "rank_label",
    "refuse_earlier",
    "sample_calls",
]


_Call = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


def as_functions(call: _Call, chunks: Sequence[Chunk]) -> tuple[Callable[..., Any], ...]:
    """``call`` of each chunk, to be called like the chunk itself, with its signature and doc."""
    watch_optimizers()
    return tuple(_as_function(call, c, chunk) for c, chunk in enumerate(chunks))


def _as_function(call: _Call, c: int, chunk: Chunk) -> Callable[..., Any]:

    def captured(*args: Any, **kwargs: Any) -> Any:
        return call(c, args, kwargs)

    forward = chunk.forward
    if isinstance(forward, nn.Module):
        name, forward = type(forward).__name__, forward.forward
    else:
        name = getattr(forward, "__name__", type(forward).__name__)
    captured.__name__ = name
    captured.__qualname__ = f"{name} ({chunk.label})"
    captured.__module__ = getattr(forward, "__module__", None) or __name__
    captured.__doc__ = getattr(forward, "__doc__", None)
    captured.__wrapped__ = forward  # type: ignore[attr-defined]
    return captured


def as_chunks(given: object) -> tuple[Chunk, ...]:
    """The chunks of a rank: modules, or `Chunk` values; one of them need not be in a list.

    Raises:
        ConfigError: something else was given.
    """
    every: Iterable[object] = (given,)
    if isinstance(given, nn.ModuleList) or not (callable(given) or isinstance(given, str)):
        every = given if isinstance(given, Iterable) else every
    return tuple(_as_chunk(value, i) for i, value in enumerate(every))


def _as_chunk(value: object, i: int) -> Chunk:
    if isinstance(value, Chunk):
        module, label = value.module, value.label
    elif isinstance(value, nn.Module):
        module, label = value, f"chunk {i}"
    elif isinstance(value, type) and issubclass(value, nn.Module):
        raise ConfigError(
            f"Chunk {i} is the class {value.__name__}. Give a module: make one of it."
        )
    elif callable(value):
        raise ConfigError(
            f"Chunk {i} is a function ({shown(value)}), whose parameters are not known. Give "
            "Chunk(forward=function, parameters=(...), label='...'), or an nn.Module."
        )
    else:
        raise ConfigError(f"Chunk {i} is {shown(value)}. Give an nn.Module or a Chunk.")
    for path, part in module.named_modules() if module is not None else ():
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigError(
                f"{label}: {path or 'it'} is a ScriptModule, whose parameters cannot be replaced "
                "for a capture. Give the module that torch.jit.script was called with."
            )
    return value if isinstance(value, Chunk) else Chunk.from_module(module, label)  # type: ignore[arg-type]


def as_options(given: object) -> CaptureOptions:
    """The options given, or the defaults.

    Raises:
        ConfigError: something else was given.
    """
    if given is None:
        return CaptureOptions()
    if not isinstance(given, CaptureOptions):
        raise ConfigError(
            f"options is {shown(given)}; give CaptureOptions(...), such as "
            "CaptureOptions(verify='shadow')."
        )
    return given


def as_banks(banks: object) -> Banks:
    """Return the banks given; by default one.

    Raises:
        ConfigError: something else was given.
    """
    if banks is None:
        return Banks()
    if not isinstance(banks, Banks):
        raise ConfigError(f"banks is {shown(banks)}; give Banks(keys=...).")
    return banks


_SUCCESSORS = {
    "capture_scope": "host=Host(), with its method capturing()",
    "preserve": "host=Host(), with its method preserving()",
    "verify_scope": "host=Host(), with its method verifying()",
    "is_told_of_misfits": "takes_misfits=",
    "derive_sample": "banks=Banks(keys, derive=...)",
    "drops_failed_banks": "banks=Banks(keys, drops_failed=...)",
}
"""What replaces keywords of earlier releases of `ChunkGraphs`."""


def refuse_earlier(keywords: Iterable[str]) -> None:
    """Refuse keywords that `ChunkGraphs` does not take, and name what replaces them.

    Raises:
        ConfigError: there is one.
    """
    for name in keywords:
        successor = _SUCCESSORS.get(name)
        instead = f" Give it {successor}." if successor else ""
        raise ConfigError(f"ChunkGraphs takes no {name}=....{instead}")


def check_counts(num_chunks: int, num_slots: object) -> tuple[int, ...]:
    """The slot counts of all chunks; a single number is that of each.

    Raises:
        ConfigError: they are no counts, or do not fit the chunks.
    """
    if not num_chunks:
        raise ConfigError("There are no chunks. Give at least one module.")
    how = (
        "Give for each chunk the most microbatches it ever has in flight, or use "
        "ChunkGraphs.for_schedule, which works that out"
    )
    given = (num_slots,) * num_chunks if is_whole(num_slots) else num_slots
    if isinstance(given, (str, torch.Tensor)) or not isinstance(given, Iterable):
        raise ConfigError(f"num_slots is {shown(num_slots)}, not whole numbers. {how}.")
    counts = tuple(given)
    if len(counts) != num_chunks:
        raise ConfigError(f"There are {num_chunks} chunks, but {len(counts)} slot counts. {how}.")
    for i, count in enumerate(counts):
        if not is_whole(count) or count < 1:
            raise ConfigError(
                f"num_slots[{i}] is {shown(count)}; it must be a whole number, 1 or greater. {how}."
            )
    return tuple(int(count) for count in counts)


def describe(chunks: Sequence[Chunk], num_slots: Sequence[int], state: str) -> str:
    """What a rank's graphs are, in one line."""
    every = ", ".join(
        f"{chunk.label} with {count} slot{'s' * (count > 1)}"
        for chunk, count in zip(chunks, num_slots, strict=True)
    )
    return f"<ChunkGraphs of {every}; {state}>"


def check_shape_key(key: object) -> None:
    """Refuse a shape key that is not equal to itself, so that no step would ever fit.

    Raises:
        ConfigError: it holds a NaN, or has no hash.
    """
    try:
        hash(key)
    except TypeError:
        raise ConfigError(
            f"shape_key is {shown(key)}, which has no hash. Give numbers, strings or a tuple."
        ) from None
    parts = key if isinstance(key, tuple) else (key,)
    if any(isinstance(part, float) and part != part for part in parts):
        raise ConfigError(
            f"shape_key is {shown(key)}. A NaN is never equal to the key of another step, so that "
            "every step would run eagerly. Give what fixes the input shapes."
        )


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


def sample_calls(
    samples: Sequence[Any] | Mapping[Hashable, Sequence[Any]],
    keys: Sequence[Hashable],
    num_chunks: int,
) -> dict[Hashable, list[Call]]:
    """The calls that samples stand for, by bank.

    Args:
        samples: for each chunk a tuple of arguments, a dict of keyword arguments, or one tensor;
            with several banks, by key.
        keys: of the banks.
        num_chunks: of the rank.
    """
    by_bank = samples if isinstance(samples, Mapping) else {keys[0]: samples}
    if by_bank.keys() != set(keys):
        raise ValueError(f"got samples of banks {list(by_bank)}, not {list(keys)}")
    for of_bank in by_bank.values():
        if isinstance(of_bank, torch.Tensor) or len(of_bank) != num_chunks:
            number = "one tensor" if isinstance(of_bank, torch.Tensor) else len(of_bank)
            raise ValueError(
                f"got {number} samples for {num_chunks} chunks; give a list of one each"
            )
    return {key: [_sample_call(s) for s in by_bank[key]] for key in keys}


def _sample_call(sample: Any) -> Call:
    """A sample as a call: a tuple of arguments, a dict of keyword arguments, or one tensor."""
    if isinstance(sample, dict):
        return flatten_call((), sample).sampled()
    return flatten_call(sample if isinstance(sample, tuple) else (sample,), {}).sampled()
