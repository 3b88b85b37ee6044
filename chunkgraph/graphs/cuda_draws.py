"""Draw the random numbers of a CUDA graph again in another graph.

A graph draws from the sequences that its generators have at a replay, and moves them on as far as
its capture did. Within a capture, torch shows no offsets, and sets none. So the graph that draws
again uses further generators, one for each saved state and sequence: before its replay, each is set
to the offset at which the first graph saved the state, which is where that graph's last replay
began plus what an eager pass drew until then. This happens on the host; for each of these
generators that a graph draws from, torch writes seed and offset to the device before a replay.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.graphs.captured_generator import CapturedGenerator, DrawOffsets, SavedState
from chunkgraph.graphs.random_state import patched

__all__ = [
    "CudaGenerator",
    "GraphDraws",
    "Sequences",
    "measured_draws",
    "resumed_generators",
    "saving_states",
]


class Sequences:
    """The further generators of a device, which all graphs share: replays happen one by one.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generators: dict[tuple[int, int], torch.Generator] = {}

    def at(self, save: int, number: int) -> torch.Generator:
        """Return the generator that replaces generator ``number`` after a save of its graph."""
        key = (save, number)
        if key not in self._generators:
            self._generators[key] = torch.Generator(self._device)
        return self._generators[key]


class GraphDraws:
    """The sequences that one graph draws from, and the states that it saves.

    Args:
        label: Name of the graph in errors.
        generators: The device's default generator and the declared ones.
        offsets: Measured in an eager pass over the same work; None if there was none.
        sequences: Generators for the graphs that resume the saved states.
    """

    def __init__(
        self,
        label: str,
        generators: Sequence[torch.Generator],
        offsets: DrawOffsets | None,
        sequences: Sequences,
    ) -> None:
        self.is_captured = False
        self._label = label
        self._generators = tuple(generators)
        self._offsets = offsets
        self._sequences = sequences
        self._is_checked = False
        # Where the last replay began: seed and offset of each generator.
        self._starts: list[tuple[int, int]] = []
        # A generator that draws again, the number of its sequence, and the offset of the save.
        self._resumed: list[tuple[torch.Generator, int, int]] = []

    def finish(self, num_saves: int) -> None:
        """End the capture.

        Raises:
            CaptureError: The eager pass saved the random state at other times.
        """
        self.is_captured = True
        if self._offsets is None or not self.draws_numbers:
            return
        num_measured = len(self._offsets.at_saves)
        if num_measured != num_saves:
            raise CaptureError(
                f"{self._label} saves the random state {num_saves} times, but its eager pass did "
                f"{num_measured} times, so a recomputation could not repeat the random numbers. "
                "Use as many checkpoints in every call."
            )

    def prepare(self) -> list[torch.Generator]:
        """Return the generators that draw again from saved states, for a graph's registration."""
        if self._offsets is not None and not self._resumed:
            for save, at_save in enumerate(self._offsets.at_saves):
                self._resumed += [
                    (self._sequences.at(save, number), sequence, offset)
                    for number, (sequence, offset) in enumerate(at_save or ())
                    if self._offsets.at_end[sequence] > offset
                ]
        return [generator for generator, _, _ in self._resumed]

    def generators_at(self, save: int) -> tuple[torch.Generator, ...] | None:
        """Return the generators that draw again from a save, in the order of the graph's own.

        Those that draw nothing after the save are the graph's own. None if the offsets are unknown.
        """
        if not self.draws_numbers:
            return self._generators
        if self._offsets is None:
            return None
        at_end = self._offsets.at_end
        at_save = self._offsets.at_saves[save]
        if at_save is None:
            return None
        return tuple(
            self._sequences.at(save, number)
            if at_end[sequence] > offset
            else self._generators[sequence]
            for number, (sequence, offset) in enumerate(at_save)
        )

    @property
    def draws_numbers(self) -> bool:
        """Return whether the eager pass drew random numbers; True if there was none."""
        return self._offsets is None or any(self._offsets.at_end)

    @property
    def is_resumed(self) -> bool:
        """Return whether another graph draws again from saved states."""
        return bool(self._resumed)

    def begin_replay(self) -> None:
        """Note where a replay begins."""
        self._starts = [(g.initial_seed(), g.get_offset()) for g in self._generators]

    def end_replay(self) -> None:
        """Compare the draws of the first replay with those of the eager pass.

        Raises:
            ReplayMismatchError: They differ.
        """
        if self._is_checked:
            return
        assert self._offsets is not None
        starts = [offset for _, offset in self._starts]
        drawn = _differences(_offsets_of(self._generators), starts)
        if drawn != self._offsets.at_end:
            raise ReplayMismatchError(
                f"{self._label} drew {drawn} random numbers from its generators, but the eager "
                f"pass before its capture drew {self._offsets.at_end}, so a recomputation would "
                "draw other masks. Draw as many in every call, or recompute nothing."
            )
        self._is_checked = True

    def load(self) -> None:
        """Set the generators that draw again from saved states, as of the last replay."""
        for generator, sequence, offset in self._resumed:
            seed, start = self._starts[sequence]
            if generator.initial_seed() != seed:
                generator.manual_seed(seed)
            generator.set_offset(start + offset)


class CudaGenerator(CapturedGenerator):
    """Switch the device's default generator between sequences in a capture.

    Args:
        label: Name of the graph in errors.
        draws: The graph's sequences.
        resumed: Those of the graph whose states it resumes.
        default: The device's default generator.
    """

    def __init__(
        self,
        label: str,
        draws: GraphDraws,
        resumed: GraphDraws | None,
        default: torch.Generator,
    ) -> None:
        super().__init__(label, draws)
        self._draws = draws
        self._earlier = resumed
        self._default = default
        self._begin = default.graphsafe_get_state()

    def save(self, saved: SavedState, /) -> None:
        """See `CapturedGenerator`."""
        saved.value = self._default.graphsafe_get_state()

    def switch_to(self, saved: SavedState, /) -> bool:
        """See `CapturedGenerator`."""
        if saved.owner is self._draws:
            self._default.graphsafe_set_state(saved.value)
            return True
        if saved.owner is not self._earlier:
            return False
        assert isinstance(saved.owner, GraphDraws)
        generators = saved.owner.generators_at(saved.index)
        if generators is None:
            return False
        self._default.graphsafe_set_state(generators[0])
        return True

    def finish(self) -> None:
        """See `CapturedGenerator`."""
        super().finish()
        self._draws.finish(self.num_saves)

    def put_back(self) -> None:
        """Give the default generator the sequence that it had when the capture began."""
        self._default.graphsafe_set_state(self._begin)


def resumed_generators(state: torch.Tensor) -> tuple[torch.Generator, ...] | None:
    """Return the generators that draw again from a state, in the graph that resumes it.

    Args:
        state: A result of `torch.cuda.get_rng_state` in a capture.

    Returns:
        The default generator and the declared ones, in this order; None in the capture that saved
        the state.

    Raises:
        CaptureError: The offsets at which the state was saved are unknown.
    """
    saved = SavedState.of(state)
    assert saved is not None
    assert isinstance(saved.owner, GraphDraws)
    # Only a checkpoint in another one sets a state that a recomputation saved.
    is_nested = saved.resumed is not None and saved.resumed.owner.draws_numbers
    if not (saved.owner.is_captured or is_nested):
        return None
    generators = None if is_nested else saved.owner.generators_at(saved.index)
    if generators is None:
        raise CaptureError(
            "A recomputation cannot repeat its random numbers, since no eager pass measured them. "
            "Use num_warmup_passes of 1 or more, and no nested checkpoints."
        )
    return generators


@contextmanager
def saving_states(generator: CudaGenerator) -> Iterator[None]:
    """Make `torch.cuda.get_rng_state` and ``set_rng_state`` use ``generator`` in a capture.

    Recomputation calls them in the backward, which runs in a thread of autograd.
    """

    def saving(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not torch.cuda.is_current_stream_capturing():
                return original(*args, **kwargs)
            # An empty state: code outside of the capture cannot set it.
            with _disable_current_modes():
                return generator.marked(torch.empty(0, dtype=torch.uint8))

        return get_rng_state

    def restoring(original: Callable[..., None]) -> Callable[..., None]:
        def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if not torch.cuda.is_current_stream_capturing():
                return original(new_state, *args, **kwargs)
            return generator.accept(new_state)

        return set_rng_state

    with (
        patched(torch.cuda, "get_rng_state", saving),
        patched(torch.cuda, "set_rng_state", restoring),
    ):
        try:
            yield
        finally:
            generator.put_back()


@contextmanager
def measured_draws(
    generators: Sequence[torch.Generator], default: torch.Generator
) -> Iterator[DrawOffsets]:
    """Measure where an eager pass saves random states.

    Args:
        generators: The sequence that the default generator has now, and the declared generators.
        default: The device's default generator.
    """
    measured, starts, thread = DrawOffsets(), _offsets_of(generators), threading.get_ident()

    def noting(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
            # A first call of compiled code compiles it, which saves the state too.
            is_compiler = sys._getframe(1).f_globals["__name__"].startswith("torch._dynamo")
            if threading.get_ident() == thread and not is_compiler:
                own = tuple(enumerate(_differences(_offsets_of(generators), starts)))
                current = _number_of(default, generators)
                measured.at_saves.append(None if current is None else (own[current], *own[1:]))
            return original(*args, **kwargs)

        return get_rng_state

    with patched(torch.cuda, "get_rng_state", noting):
        yield measured
    measured.at_end = _differences(_offsets_of(generators), starts)


def _number_of(default: torch.Generator, generators: Sequence[torch.Generator]) -> int | None:
    """Return the number of the sequence that the default generator has now; None if it is none.

    Generators with the same sequence are different objects, but have one offset.
    """
    offset, before = default.get_offset(), _offsets_of(generators)
    default.set_offset(offset + 4)
    try:
        after = _offsets_of(generators)
    finally:
        default.set_offset(offset)
    moved = map(operator.ne, before, after)
    return next((number for number, is_moved in enumerate(moved) if is_moved), None)


def _offsets_of(generators: Sequence[torch.Generator]) -> list[int]:
    return [generator.get_offset() for generator in generators]


def _differences(offsets: Sequence[int], starts: Sequence[int]) -> tuple[int, ...]:
    return tuple(offset - start for offset, start in zip(offsets, starts, strict=True))
