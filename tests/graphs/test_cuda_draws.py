"""The arithmetic of random offsets in CUDA graphs, with generators that imitate those of torch."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch

from chunkgraph.errors import CaptureError, IllegalOperationError, ReplayMismatchError
from chunkgraph.graphs import resumed_generators
from chunkgraph.graphs.captured_generator import DrawOffsets
from chunkgraph.graphs.cuda_draws import (
    CudaGenerator,
    GraphDraws,
    Sequences,
    measured_draws,
    saving_states,
)

Draw = tuple[int, int]  # seed and offset


class Sequence:
    """A sequence of random numbers, as torch's generators share them."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.offset = seed, 0


class Generator:
    """Imitates a CUDA generator: it points to a sequence."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence

    def graphsafe_get_state(self) -> Generator:
        return Generator(self.sequence)

    def graphsafe_set_state(self, state: Generator) -> None:
        self.sequence = state.sequence

    def initial_seed(self) -> int:
        return self.sequence.seed

    def manual_seed(self, seed: int) -> None:
        self.sequence.seed, self.sequence.offset = seed, 0

    def get_offset(self) -> int:
        return self.sequence.offset

    def set_offset(self, offset: int) -> None:
        self.sequence.offset = offset


class Device:
    """Imitates captures: a replay draws from where each sequence is, and moves it on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.default = Generator(Sequence(7))
        self.tracked = Generator(Sequence(8))
        self.sequences: Any = Sequences(torch.device("cuda", 0))
        self.is_capturing = False
        self.drawn: list[Draw] = []
        self._captured: list[tuple[Sequence, int]] = []
        self._inside: dict[Sequence, int] = {}
        monkeypatch.setattr(torch, "Generator", lambda _: Generator(Sequence()))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.empty(0))
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)

    @property
    def own(self) -> Any:
        return (self.default.graphsafe_get_state(), self.tracked)

    def draw(self, count: int, generator: Generator | None = None) -> None:
        sequence = (generator or self.default).sequence
        if self.is_capturing:
            inside = self._inside.get(sequence, 0)
            self._captured.append((sequence, inside))
            self._inside[sequence] = inside + count
        else:
            self.drawn.append((sequence.seed, sequence.offset))
            sequence.offset += count

    def measure(self, work: Callable[[], None]) -> DrawOffsets:
        """Run an eager pass, after which the sequences are as before."""
        before = [(g.sequence, g.sequence.offset) for g in (self.default, self.tracked)]
        with measured_draws(self.own, self.default) as offsets:  # type: ignore[arg-type]
            work()
        for sequence, offset in before:
            sequence.offset = offset
        self.drawn.clear()
        return offsets

    def capture(
        self,
        work: Callable[[], None],
        offsets: DrawOffsets | None = None,
        resumed: GraphDraws | None = None,
    ) -> tuple[GraphDraws, Callable[[], list[Draw]]]:
        """Return the draws of a graph, and a function that replays it and returns what it drew."""
        draws = GraphDraws("graph", self.own, offsets, self.sequences)
        if resumed is not None:
            resumed.prepare()
        default: Any = self.default
        generator = CudaGenerator("graph", draws, resumed, default)
        self._captured, self._inside = [], {}
        self.is_capturing = True
        try:
            with saving_states(generator):
                work()
            generator.finish()
        finally:
            self.is_capturing = False
        captured, inside = self._captured, self._inside

        def replay() -> list[Draw]:
            if resumed is not None:
                resumed.load()
            if draws.is_resumed:
                draws.begin_replay()
            drawn = [(s.seed, s.offset + offset) for s, offset in captured]
            for sequence, count in inside.items():
                sequence.offset += count
            if draws.is_resumed:
                draws.end_replay()
            return drawn

        return draws, replay


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


class Checkpoints:
    """Two checkpoints that draw from both generators, and draws around them."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.states: list[torch.Tensor] = []
        self.last = 12

    def forward(self) -> None:
        self.states = []
        self.device.draw(4)
        for count in (8, self.last):
            self.states.append(torch.cuda.get_rng_state())
            self.run(count, self.device.tracked)
            self.device.draw(16)

    def run(self, count: int, tracked: Generator) -> None:
        self.device.draw(count)
        self.device.draw(20, tracked)
        self.device.draw(4)

    def backward(self) -> None:
        for count, state in reversed(list(zip((8, self.last), self.states, strict=True))):
            outer = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(state)
            generators: Any = resumed_generators(state)
            self.run(count, generators[1])
            torch.cuda.set_rng_state(outer)
            assert resumed_generators(outer) is None


def test_each_slot_draws_its_masks_again(device: Device) -> None:
    """Two slots, several microbatches in flight, and a new seed between the steps."""
    chunk = Checkpoints(device)
    offsets = device.measure(chunk.forward)
    slots = []
    for _ in range(2):
        draws, forward = device.capture(chunk.forward, offsets)
        slots.append((forward, device.capture(chunk.backward, resumed=draws)[1]))
    for seed in (7, 2**63 + 5):
        device.default.manual_seed(seed)
        flying = [(forward(), backward) for forward, backward in slots]
        ends = (device.default.get_offset(), device.tracked.get_offset())
        for drawn, backward in flying:
            # Forward: 1 draw, then in each checkpoint 3 and outside 1.
            assert backward() == [*drawn[5:8], *drawn[1:4]]
        assert (device.default.get_offset(), device.tracked.get_offset()) == ends
        first, second = (drawn for drawn, _ in flying)
        assert not set(first) & set(second)


def test_the_capture_leaves_the_default_generator(device: Device) -> None:
    sequence = device.default.sequence
    chunk = Checkpoints(device)
    draws, _ = device.capture(chunk.forward, device.measure(chunk.forward))
    with pytest.raises(IllegalOperationError):
        device.capture(lambda: torch.cuda.set_rng_state(chunk.states[0]), resumed=draws)
    assert device.default.sequence is sequence


def test_without_a_measurement_nothing_is_drawn_again(device: Device) -> None:
    chunk = Checkpoints(device)
    draws, _ = device.capture(chunk.forward)
    with pytest.raises(CaptureError, match="num_warmup_passes"):
        device.capture(chunk.backward, resumed=draws)


def test_states_that_a_compilation_saves_do_not_count(device: Device) -> None:
    """Dynamo saves the state when it compiles a function, which the eager pass calls first."""
    chunk = Checkpoints(device)
    names = {"__name__": "torch._dynamo.convert_frame", "torch": torch}

    def save() -> torch.Tensor:
        return torch.cuda.get_rng_state()

    compile_function = FunctionType(save.__code__, names)

    def first_forward() -> None:
        compile_function()
        chunk.forward()

    assert device.measure(first_forward) == device.measure(chunk.forward)


def test_a_graph_without_draws_needs_no_further_generators(device: Device) -> None:
    def forward() -> None:
        states.append(torch.cuda.get_rng_state())

    states: list[torch.Tensor] = []
    draws, _ = device.capture(forward, device.measure(forward))
    assert draws.prepare() == []
    assert not draws.is_resumed
    assert resumed_generators(states[-1]) == draws.generators_at(0)


def test_a_graph_that_draws_other_numbers_than_its_eager_pass_fails(device: Device) -> None:
    chunk = Checkpoints(device)
    offsets = device.measure(chunk.forward)
    chunk.last = 24
    draws, forward = device.capture(chunk.forward, offsets)
    device.capture(chunk.backward, resumed=draws)
    with pytest.raises(ReplayMismatchError, match="other masks"):
        forward()


def test_a_graph_that_saves_at_other_times_fails(device: Device) -> None:
    def once() -> None:
        torch.cuda.get_rng_state()
        device.draw(4)

    with pytest.raises(CaptureError, match="2 times"):
        device.capture(Checkpoints(device).forward, device.measure(once))


def test_a_state_that_is_saved_while_the_default_generator_is_switched(device: Device) -> None:
    """Megatron's block does so with sequence parallelism."""

    def forward() -> None:
        own = device.default.graphsafe_get_state()
        device.draw(4)
        device.default.graphsafe_set_state(device.tracked)
        device.draw(8)
        states.append(torch.cuda.get_rng_state())
        device.draw(4)
        device.default.graphsafe_set_state(own)

    def backward() -> None:
        outer = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(states[-1])
        device.draw(4)
        torch.cuda.set_rng_state(outer)

    states: list[torch.Tensor] = []
    draws, replay = device.capture(forward, device.measure(forward))
    _, replay_backward = device.capture(backward, resumed=draws)
    for _ in range(2):
        drawn = replay()
        assert replay_backward() == drawn[2:]


def test_a_state_of_an_unknown_generator_is_not_drawn_from(device: Device) -> None:
    def forward() -> None:
        own = device.default.graphsafe_get_state()
        device.default.graphsafe_set_state(Generator(Sequence(8)))
        states.append(torch.cuda.get_rng_state())
        device.default.graphsafe_set_state(own)
        device.draw(4)

    states: list[torch.Tensor] = []
    draws, _ = device.capture(forward, device.measure(forward))
    with pytest.raises(CaptureError, match="no eager pass"):
        resumed_generators(states[-1])
    assert draws.generators_at(0) is None
