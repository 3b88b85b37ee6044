"""Measure the host time of the captured part of a chunk, without waiting for the device.

The times come from separate steps, since the hooks themselves cost time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from chunkgraph.engine import ChunkGraphs

__all__ = ["HostTimes", "host_times"]

_BLOCK_ATTRIBUTES = ("layers", "set_input_tensor", "input_tensor", "pre_process")


@dataclass
class HostTimes:
    """Host times, in microseconds, one for each call.

    Attributes:
        forward: Times of the forward of the transformer block (or the captured part). With graphs
            this is the whole replaying call, including the launch.
        backward: Times of its backward. With graphs this is the replaying call, otherwise the time
            from the block's output gradient to its input gradient.
        forward_launch: Times to launch the forward graph, a part of ``forward``; only with graphs.
        backward_launch: Times to launch the backward graph, a part of ``backward``.
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    forward_launch: list[float] = field(default_factory=list)
    backward_launch: list[float] = field(default_factory=list)

    @property
    def num_calls(self) -> tuple[int, ...]:
        """Return the number of times of each kind so far."""
        return tuple(map(len, self._all()))

    def forget(self, num_calls: Sequence[int]) -> None:
        """Keep only the first ``num_calls`` times of each kind (see `num_calls`)."""
        for times, number in zip(self._all(), num_calls, strict=True):
            del times[number:]

    def _all(self) -> tuple[list[float], ...]:
        return self.forward, self.backward, self.forward_launch, self.backward_launch

    def medians(self) -> dict[str, float | None]:
        """Return the medians by key of the result document; None for a missing time."""
        forward, backward = _median(self.forward), _median(self.backward)
        return {
            "host_us_forward": forward,
            "host_us_backward": backward,
            "host_us_forward_without_launch": _median_difference(self.forward, self.forward_launch),
            "host_us_backward_without_launch": _median_difference(
                self.backward, self.backward_launch
            ),
        }


@contextmanager
def host_times(chunks: Sequence[nn.Module], engine: ChunkGraphs | None) -> Iterator[HostTimes]:
    """Measure every call inside the ``with`` block.

    Args:
        chunks: The model chunks of this rank.
        engine: The chunk graphs that are attached to them, if any.
    """
    times = HostTimes()
    with ExitStack() as stack:
        for chunk in chunks:
            part = captured_part(chunk)
            if engine is None:
                for handle in _time_block(part, times):
                    stack.callback(handle.remove)
            else:
                stack.callback(_time_diverted(part, times))
        if engine is not None:
            stack.callback(_time_replays(engine, times))
        yield times


def captured_part(chunk: nn.Module) -> nn.Module:
    """Return the transformer block, or the module around it whose forward is replaced."""
    for module in chunk.modules():
        is_block = all(hasattr(module, name) for name in _BLOCK_ATTRIBUTES)
        if is_block or "forward" in module.__dict__:
            return module
    return chunk


def _time_diverted(part: Any, times: HostTimes) -> Callable[[], None]:
    """Time the forward that `attach` set on the part; return the undo function.

    This uses no hooks, whose own time would count.
    """
    forward = part.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = forward(*args, **kwargs)
        times.forward.append((time.perf_counter() - started) * 1e6)
        return result

    part.forward = timed

    def undo() -> None:
        part.forward = forward

    return undo


def _time_block(block: nn.Module, times: HostTimes) -> list[Any]:
    started: list[float] = []

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if not getattr(module, "pre_process", True):
            hidden = module.input_tensor
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(end_backward)
        started.append(time.perf_counter())

    def after(_module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        times.forward.append((time.perf_counter() - started.pop()) * 1e6)
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(begin_backward)

    # Backwards of one rank do not overlap, so one start time is enough.
    backward_started: list[float] = []

    def begin_backward(_grad: torch.Tensor) -> None:
        backward_started[:] = [time.perf_counter()]

    def end_backward(_grad: torch.Tensor) -> None:
        if backward_started:
            times.backward.append((time.perf_counter() - backward_started.pop()) * 1e6)

    return [
        block.register_forward_pre_hook(before, with_kwargs=True),
        block.register_forward_hook(after, with_kwargs=True),
    ]


class _TimedGraph:
    """Wrap a graph and time its launches."""

    def __init__(self, graph: Any, launches: list[float]) -> None:
        self._graph = graph
        self._launches = launches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def replay(self) -> None:
        started = time.perf_counter()
        self._graph.replay()
        self._launches.append((time.perf_counter() - started) * 1e6)


def _time_replays(engine: Any, times: HostTimes) -> Callable[[], None]:
    """Time backward replays and all launches; return the undo function."""
    captured = getattr(engine, "_captured", None)
    if captured is None:
        return lambda: None
    slots = [slot for slots in captured.slots for slot in slots]
    graphs = [(slot, slot.forward_graph, slot.backward_graph) for slot in slots]
    replayer = engine._replayer
    replay_backward = replayer.replay_backward

    def timed(*args: Any) -> None:
        started = time.perf_counter()
        replay_backward(*args)
        times.backward.append((time.perf_counter() - started) * 1e6)

    for slot, forward, backward in graphs:
        slot.forward_graph = _TimedGraph(forward, times.forward_launch)
        if backward is not None:
            slot.backward_graph = _TimedGraph(backward, times.backward_launch)
    replayer.replay_backward = timed

    def undo() -> None:
        del replayer.replay_backward
        for slot, forward, backward in graphs:
            slot.forward_graph, slot.backward_graph = forward, backward

    return undo


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _median_difference(whole: Sequence[float], part: Sequence[float]) -> float | None:
    """Return the median over calls of whole minus part; None if a call has no part."""
    if not part or len(whole) != len(part):
        return None
    return statistics.median(a - b for a, b in zip(whole, part, strict=True))
