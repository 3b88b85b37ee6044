"""Banks: slots with one variant for each length, in any mixture; banks that cannot be captured."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from thread_ranks import Agreeing, run_ranks
from torch import nn
from toys import Apply

from chunkgraph.engine import Banks, CaptureOptions, Chunk, ChunkGraphs, StepPlan
from chunkgraph.engine.capture.static_inputs import SlotStatics
from chunkgraph.engine.joint_capture import Lockstep, StoppedElsewhere
from chunkgraph.errors import CaptureError, ConfigError, ReplayMismatchError, SlotError
from chunkgraph.graphs import GraphBackend

WIDTH = 8
BANKS = (12, 6, 3)


class Rows(nn.Module):
    """Takes any number of rows; has dropout, a buffer, and large saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("num_rows", torch.zeros(()))

    def forward(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        self.num_rows += rows
        for layer in self.layers:
            x = x + self.dropout(torch.nn.functional.gelu(layer(x)))
        return x


def derive(_c: int, args: tuple[Any, ...], kwargs: dict[str, Any], of: Any, key: Any) -> Any:
    """Derive a call of another number of rows from one with ``of`` rows."""
    (x,) = args
    rows = torch.cat([x.detach()] * (key // of + 1))[:key].clone().requires_grad_(x.requires_grad)
    return (rows,), {**kwargs, "rows": key}


def modules(device: torch.device) -> list[Rows]:
    torch.manual_seed(3)
    return [Rows().to(device) for _ in range(2)]


def samples(backend: GraphBackend) -> dict[int, list[Any]]:
    """Return a sample of each bank for one chunk."""
    x = torch.ones(12, WIDTH, device=backend.device, requires_grad=True)
    return {key: [(derive(0, (x,), {}, 12, key)[0][0], key)] for key in BANKS}


Order = list[tuple[int, int]]
"""Pairs (chunk, microbatch): the first one is the forward, the second one the backward."""


def any_order(rng: random.Random, num: int, num_slots: int) -> Order:
    """Draw an order, the same for each chunk: forwards in order, backwards in any."""
    order: Order = []
    for c in range(2):
        left, flying = list(range(num)), []
        while left or flying:
            if left and len(flying) < num_slots and (not flying or rng.random() < 0.5):
                flying.append(left.pop(0))
                order.append((c, flying[-1]))
            else:
                order.append((c, flying.pop(rng.randrange(len(flying)))))
    return order


def run(
    calls: Any, chunks: list[Rows], lengths: list[int], order: Order, device: torch.device
) -> list[torch.Tensor]:
    """Return outputs, input gradients, gradients and buffers."""
    results: list[torch.Tensor] = []
    flying: dict[tuple[int, int], Any] = {}
    for place in order:
        c, m = place
        if place in flying:
            x, y = flying.pop(place)
            (y * y).sum().backward()
            results.append(x.grad.clone())
            continue
        x = torch.linspace(-1, 1 + m, lengths[m] * WIDTH, device=device).view(-1, WIDTH)
        x.requires_grad_()
        y = calls[c](x, rows=lengths[m])
        results.append(y.detach().clone())
        flying[place] = (x, y)
    for chunk in chunks:
        results += [p.grad.clone() for p in chunk.parameters()]
        results.append(chunk.num_rows.clone())
        for p in chunk.parameters():
            p.grad = None
    return results


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize(
    ("verify", "sleeps"),
    [("poison", False), ("shadow", False), ("none", False), ("none", True)],
)
def test_any_mixture_equals_eager(backend: GraphBackend, verify: Any, sleeps: bool) -> None:
    """Random steps have lengths, numbers of microbatches and orders other than the capture."""
    eager, mine = modules(backend.device), modules(backend.device)
    backend.can_sleep = sleeps
    graphs = ChunkGraphs(
        mine,
        [3, 3],
        backend=backend,
        options=CaptureOptions(verify=verify),
        banks=Banks(BANKS, derive),
    )
    rng = random.Random(1)
    for step in range(12):
        num = rng.randint(1, 6)
        lengths = [12] if step == 0 else [rng.choice(BANKS) for _ in range(num)]
        order = any_order(rng, len(lengths), 3)
        torch.manual_seed(step)
        expected = run(eager, eager, lengths, order, backend.device)
        torch.manual_seed(step)
        with graphs.step(len(lengths), plan=StepPlan(lengths)):
            results = run(graphs.callables, mine, lengths, order, backend.device)
        assert same(results, expected), step
        if sleeps:
            graphs.sleep()
            graphs.wake()
    assert graphs.counters.fallbacks == {"capture warmup": 1}
    assert (graphs.counters.capture_sessions, graphs.counters.captures) == (1, 2 * 3 * 3)
    assert set(graphs.counters.replays_of_bank) == set(BANKS)
    assert graphs.counters.replays_of_bank.total() == graphs.counters.replays


def test_variants_of_a_slot_lie_in_the_same_memory(backend: GraphBackend) -> None:
    """Three banks take hardly more memory than the largest alone."""

    width = 1 << (16 if backend.name != "recorder" else 10)

    def wide(module: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = (x * module.weight).tanh()
        return x.sum(-1)

    def captured(banks: tuple[int, ...]) -> Any:
        module = Apply(wide, weight=nn.Parameter(torch.ones(width))).to(backend.device)
        graphs = ChunkGraphs([module], [3], backend=backend, banks=Banks(banks))
        samples = {
            rows: [torch.ones(rows, width, device=backend.device, requires_grad=True)]
            for rows in banks
        }
        return graphs.capture(samples)

    alone, three = captured((64,)), captured((64, 32, 16))
    assert three.num_graphs == 3 * alone.num_graphs
    assert alone.held_bytes <= three.held_bytes <= alone.held_bytes * 1.01
    assert three.slot_bytes <= alone.slot_bytes * 1.1
    assert three.static_bytes == alone.static_bytes  # includes inputs and output gradients
    smallest_first = captured((16, 32, 64))  # as in such a capture: each takes new memory
    assert smallest_first.num_graphs == three.num_graphs


@pytest.fixture
def graphs(backend: GraphBackend) -> ChunkGraphs:
    """Make graphs of one chunk, which capture after they have seen all lengths."""
    return ChunkGraphs(modules(backend.device)[:1], [2], backend=backend, banks=Banks(BANKS))


def _forward(graphs: ChunkGraphs, rows: int) -> torch.Tensor:
    device = graphs.backend.device
    return graphs.callables[0](torch.ones(rows, WIDTH, device=device), rows=rows)


def _train(graphs: ChunkGraphs, *lengths: int) -> None:
    with graphs.step(len(lengths), plan=StepPlan(lengths)):
        for rows in lengths:
            _forward(graphs, rows).sum().backward()


def test_without_derived_samples_capture_waits_for_every_bank(graphs: ChunkGraphs) -> None:
    for lengths in ([12, 6], [6], [3]):
        _train(graphs, *lengths)
        assert graphs.counters.captures == 0
    _train(graphs, 6)
    assert graphs.counters.captures == 6
    assert graphs.counters.fallbacks == {"capture warmup": 3}
    graphs.release()
    _train(graphs, 6)
    assert graphs.counters.fallbacks["released"] == 1


def test_a_step_names_the_banks_of_its_microbatches(graphs: ChunkGraphs) -> None:
    for banks, message in (
        (None, r"without the banks of its microbatches; there are \[12, 6, 3\]"),
        ([12, 5], r"belong to the banks \[5\], but there are only"),
        ([12], r"has 2 microbatches, but 1 banks"),
    ):
        with pytest.raises(SlotError, match=message), graphs.step(2, plan=StepPlan(banks)):
            pass
    with graphs.step(2, forward_only=True), torch.no_grad():
        _forward(graphs, 5)
    with graphs.step(2, eager=True):
        _forward(graphs, 5).sum().backward()
    assert graphs.counters.fallbacks == {"forward only": 1, "requested": 1}


def test_a_call_of_another_length_than_announced_is_named(graphs: ChunkGraphs) -> None:
    for _ in range(2):
        _train(graphs, 12, 6, 3)
    with (
        pytest.raises(ReplayMismatchError, match=r"argument 0: captured \(6, 8\).*called \(3, 8\)"),
        graphs.step(1, plan=StepPlan([6])),
    ):
        _forward(graphs, 3)
    with (
        pytest.raises(SlotError, match="called for microbatch 1, but the step has only 1"),
        graphs.step(plan=StepPlan([6])),
    ):
        sum(_forward(graphs, 6).sum() for _ in range(2))


@pytest.mark.parametrize("bad", [12, 6])
def test_a_sample_that_a_chunk_refuses_fails_the_session(backend: GraphBackend, bad: int) -> None:
    """Both for a sample of a step and for a derived one."""
    module = modules(backend.device)[0]
    seen: list[int] = []

    def check(x: torch.Tensor, rows: int) -> None:
        seen.append(rows)
        assert x.shape[0] == rows
        if rows == bad:
            raise ConfigError(f"{rows} rows are refused")

    chunk = replace(Chunk.from_module(module, "chunk 0"), check_sample=check)
    graphs = ChunkGraphs([chunk], [2], backend=backend, banks=Banks(BANKS, derive))
    _train(graphs, 12)
    with (
        pytest.raises(ConfigError, match=f"{bad} rows are refused"),
        graphs.step(1, plan=StepPlan([12])),
    ):
        pass
    assert seen == list(BANKS)[: len(seen)]
    assert seen[-1] == bad


def test_static_memory_of_two_slots_is_proved_apart(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only variants of one slot may share static inputs; one memory for all slots is refused."""
    from chunkgraph.engine.capture import session
    from chunkgraph.errors import MemoryPlanError

    one_for_all = SlotStatics()
    monkeypatch.setattr(session, "SlotStatics", lambda _: one_for_all)
    graphs = ChunkGraphs(modules(backend.device)[:1], [2], backend=backend, banks=Banks(BANKS))
    with pytest.raises(MemoryPlanError, match=r"\(its inputs loaded\) overwrites"):
        graphs.capture(samples(backend))


# Banks that cannot be captured, and ranks that stop together.

HOST_READ = "(__float__ reads a tensor on the host|not permitted when stream is capturing)"


class Faulty(Rows):
    """Reads a number on the host in ``faulty`` banks, so that their capture fails."""

    faulty: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        y = super().forward(x, rows)
        if rows in self.faulty:
            float(y.detach().sum())
        return y


def with_faults(backend: GraphBackend, *faulty: int) -> tuple[Faulty, ChunkGraphs]:
    torch.manual_seed(5)
    module = Faulty().to(backend.device)
    module.faulty = faulty
    banks = Banks(BANKS, derive, drops_failed=True)
    graphs = ChunkGraphs([module], [3], backend=backend, banks=banks, takes_misfits=True)
    return module, graphs


def test_what_was_dropped_is_tried_again_after_a_release(backend: GraphBackend) -> None:
    """Its part that was captured does not disturb the other banks."""
    module, graphs = with_faults(backend, 12)

    def run_one(bank: int, call: Any = graphs.callables[0]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, bank * WIDTH, device=backend.device).view(-1, WIDTH)
        y = call(x.requires_grad_(), rows=bank)
        module.zero_grad()
        y.square().sum().backward()
        return [y.detach().clone(), *(p.grad.clone() for p in (x, *module.parameters()))]

    with graphs.step(1, plan=StepPlan([3], misfit="")):
        run_one(3)
    with (
        pytest.warns(UserWarning, match=rf"{HOST_READ}(.|\n)*go on without graphs of 12"),
        graphs.step(1, plan=StepPlan([12], misfit="")),
    ):
        run_one(12)
    assert graphs.misfit_of([3, 6]) == ""
    for bank in (3, 6):
        with graphs.step(1, plan=StepPlan([bank], misfit="")) as mode_of_step:
            results = run_one(bank)
        assert mode_of_step.value == "replay"
        assert same(results, run_one(bank, module))
    reason = graphs.misfit_of([3, 12])
    assert reason == "no graphs of 12: its capture failed"
    with graphs.step(1, plan=StepPlan([12], misfit=reason)):
        run_one(12)
    assert graphs.counters.missing_banks == {reason: 2}
    assert graphs.counters.fallbacks == {"capture warmup": 1, "no graphs of a bank": 2}
    graphs.release()
    module.faulty = ()
    for mode in ("eager", "replay"):
        with graphs.step(1, plan=StepPlan([12], misfit="")) as mode_of_step:
            run_one(12)
        assert mode_of_step.value == mode
    assert graphs.counters.captures == 6 + 9


def test_the_last_bank_fails_the_session(backend: GraphBackend) -> None:
    _, graphs = with_faults(backend, *BANKS)
    with (
        pytest.warns(UserWarning, match="All ranks go on without graphs of") as warnings,
        pytest.raises(CaptureError, match=HOST_READ),
    ):
        graphs.capture(samples(backend))
    assert len(warnings) == 2


@pytest.mark.parametrize("fails_at", [None, 0, 2, 5])
def test_ranks_with_different_numbers_of_graphs_end_together(fails_at: int | None) -> None:
    """Rank 1 fails after ``fails_at`` of its six graphs; the others have two and nine."""
    ranks = Agreeing(3)
    ended: dict[int, str] = {}

    def session(rank: int) -> None:
        lockstep = Lockstep(ranks.rank(rank))
        try:
            for number in range((2, 6, 9)[rank]):
                lockstep.begin("large" if number < 3 else "small")
                if rank == 1 and number == fails_at:
                    raise CaptureError
            lockstep.finish()
            ended[rank] = "done"
        except StoppedElsewhere:
            ended[rank] = "stopped"
        except CaptureError:
            lockstep.fail()
            ended[rank] = f"failed in {lockstep.bank}"

    run_ranks(3, session)
    if fails_at is None:
        assert ended == {0: "done", 1: "done", 2: "done"}
    else:
        bank = "large" if fails_at < 3 else "small"
        assert ended == {0: "stopped", 1: f"failed in {bank}", 2: "stopped"}
