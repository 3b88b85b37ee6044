"""Paged slots train to the bits of eager training, with any number of slots."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_schedules import legal_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thread_ranks import Agreeing, run_ranks
from torch import nn
from toys import Apply

from chunkgraph.engine import (
    Banks,
    CaptureOptions,
    Chunk,
    ChunkGraphs,
    RankSchedule,
    StepPlan,
    mark_constant,
)
from chunkgraph.engine.agreement import Maximum
from chunkgraph.engine.paging.replayer import PagedSlotMachine
from chunkgraph.engine.split import SPLIT, WeightBackwards
from chunkgraph.errors import CaptureError, ConfigError, SlotError, VerifyError
from chunkgraph.graphs import CUDABackend, GraphBackend, RecorderBackend
from chunkgraph.schedules import (
    Action,
    Op,
    Schedule,
    build_schedule,
    legal_counts,
    megatron_schedule,
)
from chunkgraph.schedules.shape import stage_of
from chunkgraph.slots import in_flight, least_slots, plan_schedule, plan_slots, split_actions


@pytest.fixture(params=["recorder", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> GraphBackend:
    make = RecorderBackend if request.param == "recorder" else CUDABackend
    return make(can_sleep=True)


def attach(
    pipeline: Any, backend: GraphBackend, schedules: Sequence[Schedule], max_slots: int
) -> None:
    """Give a pipeline graphs with at most some slots, for steps of these schedules."""
    by_count = {schedule.num_microbatches: schedule for schedule in schedules}
    first, num_ranks = schedules[0], pipeline.num_ranks
    for rank in range(num_ranks):
        stages = [stage_of(rank, c, num_ranks, first.placement) for c in range(pipeline.num_chunks)]
        program = SPLIT if first.splits_backward else None
        chunks = [
            Chunk.from_module(pipeline.stages[stage], f"rank {rank} chunk {c}", program=program)
            for c, stage in enumerate(stages)
        ]
        counts = (plan_schedule(schedule, rank).slots_per_chunk for schedule in schedules)
        graphs = ChunkGraphs(
            chunks,
            [*map(max, zip(*counts, strict=True))],
            backend=backend,
            options=CaptureOptions(max_slots=max_slots),
            schedule=RankSchedule(by_count.__getitem__, rank),
        )
        pipeline.graphs.append(graphs)
        own = WeightBackwards(graphs) if program else None
        for c, stage in enumerate(stages):
            pipeline.calls[stage] = graphs.callables[c]
            if own is not None:
                pipeline.weights[stage] = partial(own.run, c)


EVERY = [(4, 1, 2), (4, 1, 3), (4, 1, 4), (8, 1, 2), (8, 1, 5), (2, 2, 2), (4, 2, 3)]
MORE = [(8, 1, k) for k in (3, 4, 6, 7, 8)] + [(4, 2, k) for k in (2, 4, 5, 6, 7, 8)]


@pytest.mark.parametrize(
    ("num_ranks", "num_chunks", "max_slots"),
    [*EVERY, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_pipelines_with_fewer_slots(
    make_pipeline: Callable[..., Any],
    backend: GraphBackend,
    num_ranks: int,
    num_chunks: int,
    max_slots: int,
) -> None:
    counts = [num_ranks, 2 * num_ranks, num_ranks, 3 * num_ranks]
    schedules = [megatron_schedule(num_ranks, num_chunks, count) for count in counts]
    eager, graphed = (make_pipeline(num_ranks, num_chunks) for _ in range(2))
    attach(graphed, backend, schedules, max_slots)
    for number, schedule in enumerate(schedules):
        assert graphed.train([schedule], number).equals(eager.train([schedule], number))
        for graphs in graphed.graphs:
            graphs.sleep()
            graphs.wake()
    for rank, graphs in enumerate(graphed.graphs):
        full = plan_slots(num_ranks, num_chunks, rank=rank).slots_per_chunk
        assert graphs.report.num_slots == tuple(min(count, max_slots) for count in full)
        assert graphs.counters.fallbacks == {"capture warmup": 1}
        assert graphs.counters.replayed_steps == 3
        assert any(graphs._replayer._memory) is (max(full) > max_slots)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["recorder"], indirect=True)  # enough captures for a CPU alone
@given(legal_steps(), st.data())
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_steps_of_any_schedule_with_any_number_of_slots(
    make_pipeline: Callable[..., Any],
    backend: GraphBackend,
    step: tuple[str, dict[str, int], int],
    data: Any,
) -> None:
    name, sizes, count = step
    most = legal_counts(
        num_ranks=sizes["num_ranks"],
        num_chunks=sizes["num_chunks"],
        group_size=sizes.get("group_size"),
        schedule=name,
    ).up_to(count)
    counts = [count, data.draw(st.sampled_from(most))]
    schedules = [
        split_actions(build_schedule(name, num_microbatches=n, **sizes)) for n in (*counts, count)
    ]
    ranks = range(sizes["num_ranks"])
    least = max(max(least_slots(schedule, rank)) for schedule in schedules for rank in ranks)
    full = max(max(plan_schedule(schedules[0], rank).slots_per_chunk) for rank in ranks)
    pair = [make_pipeline(sizes["num_ranks"], sizes["num_chunks"]) for _ in range(2)]
    attach(
        pair[1],
        type(backend)(can_sleep=True),
        schedules,
        data.draw(st.integers(least, max(least, full))),
    )
    for number, schedule in enumerate(schedules):
        eager, graphed = (pipeline.train([schedule], number) for pipeline in pair)
        assert graphed.equals(eager)
    assert all(graphs.counters.replayed_steps == 2 for graphs in pair[1].graphs)


# -- one rank, any order -------------------------------------------------------------------------


class Layer(nn.Module):
    """Dropout, a buffer, a recomputed part, and a mask that all microbatches may share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        h = torch.utils.checkpoint.checkpoint(
            lambda y: nn.functional.gelu(self.up(y)), self.norm(x), use_reentrant=False
        )
        return x + self.dropout(self.down(h)) * mask.to(x.dtype)


def drawn_schedule(draw: Any, count: int, *, is_split: bool) -> Schedule:
    """Draw forwards in order and backwards in any order; weight halves in that of the first."""
    actions: list[Action] = []
    num_forwards, alive, waiting = 0, [], []
    while num_forwards < count or alive or waiting:
        kinds = (["F"] if num_forwards < count else []) + (["B"] if alive else [])
        kind = draw(st.sampled_from(kinds + (["W"] if waiting else [])))
        if kind == "F":
            actions.append(Action(Op.F, 0, num_forwards))
            alive.append(num_forwards)
            num_forwards += 1
        elif kind == "B":
            microbatch = alive.pop(draw(st.integers(0, len(alive) - 1)))
            actions.append(Action(Op.I if is_split else Op.B, 0, microbatch))
            waiting += [microbatch] * is_split
        else:
            actions.append(Action(Op.W, 0, waiting.pop(0)))
    return Schedule("drawn", 1, 1, count, None, (tuple(actions),))


def run_step(
    schedule: Schedule,
    call: Callable[..., Any],
    weights: Callable[[], None],
    seed: int,
    rows: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Run the actions; microbatches have numbers of rows, and share one of two masks."""
    torch.manual_seed(seed)
    masks = [mark_constant(torch.rand(8) < 0.5) for _ in range(2)]
    order = random.Random(seed)
    seen: list[torch.Tensor] = []
    alive: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for action in schedule.actions[0]:
        if action.op is Op.F:
            x = torch.randn(rows[action.microbatch] if rows else 3, 8).requires_grad_()
            alive[action.microbatch] = x, call(x, order.choice(masks))
        elif action.op is Op.W:
            weights()
        else:
            x, y = alive.pop(action.microbatch)
            y.square().sum().backward()
            seen += [y.detach().clone(), x.grad.clone()]
    return seen


def cut(_c: int, args: tuple[Any, ...], kwargs: dict[str, Any], _of: int, rows: int) -> Any:
    """Derive a call with half or twice the rows."""
    x = torch.cat([args[0].detach()] * 2)[:rows].clone()
    return (x.requires_grad_(), *args[1:]), kwargs


@given(st.data(), st.booleans())
@settings(max_examples=10, deadline=None)
def test_any_schedule_of_one_rank(data: st.DataObject, is_split: bool) -> None:
    schedules = {
        count: drawn_schedule(data.draw, count, is_split=is_split)
        for count in data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=3, unique=True))
    }
    torch.manual_seed(0)
    eager, module = Layer(), Layer()
    module.load_state_dict(eager.state_dict())
    most = max(
        in_flight(s.actions[0], num_ranks=1, num_chunks=1).together for s in schedules.values()
    )
    least = max(least_slots(s, 0)[0] for s in schedules.values())
    chunk = Chunk.from_module(module, "chunk 0", program=SPLIT if is_split else None)
    graphs = ChunkGraphs(
        chunk,
        most,
        options=CaptureOptions(
            max_slots=data.draw(st.integers(least, max(least, most))),
            verify=data.draw(st.sampled_from(["none", "shadow", "poison"])),
        ),
        backend=RecorderBackend(),
        schedule=RankSchedule(schedules.__getitem__, 0),
        banks=Banks((4, 2), cut),
    )
    own = WeightBackwards(graphs)
    for seed, count in enumerate([*schedules, *schedules]):
        rows = data.draw(st.lists(st.sampled_from((4, 2)), min_size=count, max_size=count))
        expected = run_step(schedules[count], eager, lambda: None, seed, rows)
        with graphs.step(count, plan=StepPlan(rows)):
            got = run_step(schedules[count], graphs.callables[0], lambda: own.run(0), seed, rows)
        assert all(map(torch.equal, got, expected))
        pairs = zip(module.parameters(), eager.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
        assert torch.equal(module.num_calls, eager.num_calls)
    assert graphs.counters.replayed_steps == 2 * len(schedules) - 1


@pytest.mark.parametrize("max_slots", [2, 3])
def test_a_page_that_comes_back_brings_its_constant_inputs(max_slots: int) -> None:
    def first_of_four(count: int) -> Schedule:
        actions = megatron_schedule(4, 1, count).compute_actions(0)
        return Schedule("first of four", 1, 1, count, None, (actions,))

    torch.manual_seed(0)
    eager, module = Layer(), Layer()
    module.load_state_dict(eager.state_dict())
    options = CaptureOptions(max_slots=max_slots)
    schedule = RankSchedule(first_of_four, 0)
    graphs = ChunkGraphs(module, 4, options=options, backend=RecorderBackend(), schedule=schedule)
    for seed in range(4):
        expected = run_step(first_of_four(12), eager, lambda: None, seed)
        with graphs.step(12):
            got = run_step(first_of_four(12), graphs.callables[0], lambda: None, seed)
        assert all(map(torch.equal, got, expected))


def fill_and_drain(count: int) -> Schedule:
    """Return all forwards, then all backwards, of one rank."""
    ops = [(op, m) for op in (Op.F, Op.B) for m in range(count)]
    return Schedule("all", 1, 1, count, None, (tuple(Action(op, 0, m) for op, m in ops),))


def captured(module: nn.Module, backend: GraphBackend, num_slots: int = 4, **options: Any) -> Any:
    module.to(backend.device)
    graphs = ChunkGraphs(
        module,
        num_slots,
        options=CaptureOptions(**{"max_slots": 2, **options}),
        backend=backend,
        schedule=RankSchedule(fill_and_drain, 0),
    )
    graphs.capture([torch.randn(3, 8, device=backend.device, requires_grad=True)])
    return graphs


def all_then_all(call: Callable[..., Any], device: torch.device, count: int = 4) -> list[Any]:
    torch.manual_seed(5)
    inputs = [torch.randn(3, 8, device=device, requires_grad=True) for _ in range(count)]
    outputs = [call(x) for x in inputs]
    for y in outputs:
        y.square().sum().backward()
    return [t for x, y in zip(inputs, outputs, strict=True) for t in (x.grad, y.detach())]


def check_all_slots(module: nn.Module, backend: GraphBackend, reason: str) -> None:
    """Check that a chunk that cannot be paged gets all its slots, and equals eager."""
    expected = all_then_all(module.to(backend.device), backend.device)
    with pytest.warns(UserWarning, match=rf"(?s)chunk 0 is not paged.*{reason}"):
        graphs = captured(module, backend)
    assert graphs.report.num_slots == (4,)
    with graphs.step(4):
        got = all_then_all(graphs.callables[0], backend.device)
    assert all(map(torch.equal, got, expected))


def test_a_backward_that_reads_memory_of_its_own_slot_is_not_paged(backend: GraphBackend) -> None:
    """Each capture keeps its values in a tensor outside of the graphs' memory."""
    stores = [torch.zeros(3, 8, device=backend.device) for _ in range(64)]
    numbers = itertools.count()

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.store = stores[next(numbers) % len(stores)]
            ctx.store.copy_(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2 * ctx.store

    module = Apply(lambda own, x: Keep.apply(own.linear(x)), linear=nn.Linear(8, 8))
    check_all_slots(module, backend, "all 4 slots.*another slot")


def test_slots_that_keep_memory_at_different_offsets_are_not_paged(backend: GraphBackend) -> None:
    numbers = itertools.count()

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*(x * 2 for _ in range(next(numbers) % 3)))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    module = Apply(lambda own, x: Keep.apply(own.linear(x)).exp(), linear=nn.Linear(8, 8))
    check_all_slots(module, backend, "keep memory at different offsets")


def test_the_slot_that_is_saved_first_is_taken_first() -> None:
    machine = PagedSlotMachine([3], "rank 0")
    machine.begin_step()
    assert [machine.acquire_forward(0) for _ in range(3)] == [0, 1, 2]
    for slot in (2, 0):
        machine.page_out(0, slot)
        machine.saved[0, slot] = None
    machine.begin_backward(0, 1)
    machine.release(0, 1)
    assert machine.page_in(0, 2)[0] == 1
    assert machine.acquire_forward(0) == 2
    del machine.saved[0, 2]
    assert machine.page_in(0, 0)[0] == 0


def test_a_backward_that_leaves_its_gradient_where_the_forward_saved_is_not_paged(
    backend: GraphBackend,
) -> None:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.kept = x.exp()
            return ctx.kept.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return ctx.__dict__.pop("kept").mul_(grad)

    module = Apply(lambda own, x: own.linear(Exp.apply(x)), linear=nn.Linear(8, 8))
    check_all_slots(module, backend, "gradients where the forward saved")


def test_a_loop_in_another_order_than_its_schedule_is_refused(backend: GraphBackend) -> None:
    module = nn.Linear(8, 8)
    graphs = captured(module, backend)
    xs = [torch.randn(3, 8, device=backend.device, requires_grad=True) for _ in range(4)]
    with (
        pytest.raises(
            SlotError, match=r"backward of microbatch 0.*has the forward of microbatch 1"
        ),
        graphs.step(4),
    ):
        graphs.callables[0](xs[0]).sum().backward()
    expected = all_then_all(nn.Linear(8, 8).to(backend.device), backend.device)
    module.zero_grad()
    with graphs.step(4):
        got = all_then_all(graphs.callables[0], backend.device)
    assert len(got) == len(expected)
    graphs = captured(nn.Linear(8, 8), backend, max_slots=4)  # enough for any order
    with graphs.step(4):
        for x in xs:
            graphs.callables[0](x).sum().backward()


def test_a_step_that_fails_leaves_nothing_behind(backend: GraphBackend) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    graphs = captured(module, backend)
    expected = all_then_all(module, backend.device)
    for num_done in range(1, 4):

        def fail() -> None:
            for _ in range(num_done):  # noqa: B023
                graphs.callables[0](torch.randn(3, 8, device=backend.device, requires_grad=True))
            raise KeyError

        with pytest.raises(KeyError), graphs.step(4):
            fail()
        module.zero_grad()
        with graphs.step(4):
            got = all_then_all(graphs.callables[0], backend.device)
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("mode", ["shadow", "poison"])
def test_verify_modes_find_a_page_that_is_lost(
    backend: GraphBackend, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    graphs = captured(module, backend, verify=mode)
    with graphs.step(4):
        all_then_all(graphs.callables[0], backend.device)
    copier = graphs._replayer._copier
    copy = copier.copy

    def lose(parts: Any, memory: Any, after: Any, *, to_host: bool) -> Any:
        mark = copy(parts, memory, after, to_host=to_host)
        if not to_host:
            copier.wait(mark)
            for part in parts[:-1]:  # not its input
                part.fill_(0xFF)
        return mark

    monkeypatch.setattr(copier, "copy", lose)
    with pytest.raises(VerifyError, match="replayed backward of microbatch 0"), graphs.step(4):
        all_then_all(graphs.callables[0], backend.device)


def test_what_a_limit_of_memory_means(backend: GraphBackend) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    inputs = torch.randn(512, 64, device=backend.device, requires_grad=True)

    def counts(size: str | int) -> Any:
        module.to(backend.device)
        graphs = ChunkGraphs(
            module,
            4,
            options=CaptureOptions(max_slot_memory=size),
            backend=backend,
            schedule=RankSchedule(fill_and_drain, 0),
        )
        with graphs.step(4):  # of a schedule that needs two slots
            for _ in range(4):
                graphs.callables[0](inputs).sum().backward()
        graphs.capture([inputs])
        return graphs.report.num_slots

    with pytest.raises(CaptureError, match=r"too little.*at least \[2\]"):
        counts(1)
    assert counts("1GiB") == (4,)
    assert counts("1MiB") == (2,)  # of 384 KiB each, or 512 KiB in blocks


def test_a_chunk_that_trains_nothing_needs_one_slot(backend: GraphBackend) -> None:
    module = nn.Linear(8, 8, device=backend.device).requires_grad_(False)
    options, schedule = CaptureOptions(max_slot_memory="1MiB"), RankSchedule(fill_and_drain, 0)
    graphs = ChunkGraphs(module, 4, options=options, backend=backend, schedule=schedule)
    for _ in range(2):
        x = torch.randn(3, 8, device=backend.device)
        with graphs.step(4):
            assert all(torch.equal(graphs.callables[0](x), module(x)) for _ in range(4))
    assert graphs.report.num_slots == (1,)


def zero_bubble_steps(rank: int, path: str) -> None:
    """Capture for one microbatch; write what a step of more raises, and whether it ends."""
    timeout = timedelta(seconds=60)
    store = dist.FileStore(f"{path}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    width = (8, 128)[rank]
    x = torch.randn(512, width, requires_grad=True)
    module = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    chunk = Chunk.from_module(module, f"rank {rank} chunk 0", program=SPLIT)
    graphs = ChunkGraphs.for_schedule(
        "zb-h1",
        chunk,
        rank=rank,
        num_ranks=2,
        options=CaptureOptions(max_slot_memory="1.2MiB"),
        agree=Maximum(dist.new_group(backend="gloo", timeout=timeout)),
    )
    own = WeightBackwards(graphs)

    def step(count: int) -> None:
        with graphs.step(count):
            dist.all_reduce(torch.ones(1))  # as of a pipeline
            for action in split_actions(
                build_schedule("zb-h1", num_ranks=2, num_chunks=1, num_microbatches=count)
            ).compute_actions(rank):
                if action.op is Op.F:
                    alive[action.microbatch] = graphs.callables[0](x)
                elif action.op is Op.I:
                    alive.pop(action.microbatch).sum().backward()
                else:
                    own.run(0)

    alive: dict[int, Any] = {}
    step(1)
    step(1)
    report = [str(graphs.report.num_slots)]
    for count in (4, 1):
        try:
            step(count)
            report.append("replayed")
        except Exception as error:  # noqa: BLE001
            report.append(f"{type(error).__name__}: {error}")
    Path(f"{path}/{rank}").write_text("\n".join(report))


def test_slots_too_few_on_one_rank_for_a_later_step_are_an_error_on_all(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    ranks = [context.Process(target=zero_bubble_steps, args=(r, str(tmp_path))) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        process.kill()
    first, second = ((tmp_path / f"{rank}").read_text().splitlines() for rank in range(2))
    assert (first[0], second[0]) == ("(2,)", "(1,)")
    for lines in (first, second):
        assert lines[1].startswith("ConfigError: ")
        assert "rank 1" in lines[1]
        assert "[1] slots" in lines[1]
        assert "at least [2]" in lines[1]
        assert lines[2:] == ["replayed"]


def test_a_limit_on_some_ranks_is_an_error_on_all() -> None:
    ranks, errors = Agreeing(2), dict[int, str]()

    def rank(number: int) -> None:
        graphs = ChunkGraphs.for_schedule(
            "1f1b",
            Chunk.from_module(nn.Linear(8, 8), f"rank {number} chunk 0"),
            rank=number,
            num_ranks=2,
            options=CaptureOptions(max_slots=2 if number else None),
            backend=RecorderBackend(can_sleep=True),
            agree=ranks.rank(number),
        )
        with pytest.raises(CaptureError) as raised:
            graphs.capture([torch.randn(3, 8, requires_grad=True)])
        errors[number] = str(raised.value)

    run_ranks(2, rank)
    assert errors[0].startswith("rank 0 has no limit of slots, unlike other ranks")
    assert errors[1].startswith("rank 1 limits its slots, unlike other ranks")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"max_slots": 0}, "max_slots is 0"),
        ({"max_slot_memory": "lots"}, "write it as 20GiB"),
        ({"max_slot_memory": 0}, "max_slot_memory is 0"),
        ({"max_slots": 2, "max_slot_memory": "1GB"}, "cannot be combined"),
        ({"max_slots": 2, "shared_slots": True}, "combined with shared_slots"),
    ],
)
def test_wrong_options(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        ChunkGraphs(nn.Linear(8, 8), 4, options=CaptureOptions(**options))


def test_a_schedule_is_needed_and_its_slots() -> None:
    with pytest.raises(ConfigError, match="needs the schedule"):
        ChunkGraphs(nn.Linear(8, 8), 2, options=CaptureOptions(max_slots=1))
    graphs = ChunkGraphs.for_schedule(
        "1f1b", nn.Linear(8, 8), rank=0, num_ranks=4, options=CaptureOptions(max_slots=1)
    )
    with pytest.raises(ConfigError, match=r"need at least \[2\]"), graphs.step(8):
        pass
    with pytest.raises(ConfigError, match="number of microbatches"), graphs.step():
        pass
    with graphs.step(forward_only=True):
        pass


@pytest.mark.parametrize(
    ("build", "rank", "part"),
    [
        (partial(megatron_schedule, 2, 1), 2, "^Rank 2 .* for ranks 0 to 1"),  # of the job
        (partial(megatron_schedule, 2, 1), -1, "^Rank -1 "),
        (partial(megatron_schedule, 2, 2), 0, "has 1 chunk .* of 2 chunks"),
        (lambda _: fill_and_drain(2), 0, "step of 4 microbatches.* and 2 microbatches"),
    ],
)
def test_the_schedule_of_another_rank_or_step(build: Any, rank: int, part: str) -> None:
    options, schedule = CaptureOptions(max_slots=2), RankSchedule(build, rank)
    graphs = ChunkGraphs(nn.Linear(8, 8), 4, options=options, schedule=schedule)
    with pytest.raises(ConfigError, match=part), graphs.step(4):
        pass


def test_ranges_of_profilers_name_the_microbatch(backend: GraphBackend) -> None:
    from chunkgraph.engine import ReplayRanges

    names: list[str] = []

    class Names(ReplayRanges):
        def before(self, action: Any, slot: Any, tensors: object) -> None:
            super().before(action, slot, tensors)
            names.append(self.name(action, slot.chunk, self.microbatch(slot)))

    graphs = captured(nn.Linear(8, 8), backend)
    graphs.observe(Names(["c"]))
    with graphs.step(4):
        all_then_all(graphs.callables[0], backend.device)
    kinds = ("forward", "backward")
    assert names == [f"c {kind} microbatch {m}" for kind in kinds for m in range(4)]
