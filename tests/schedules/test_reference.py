"""Orders equal those of Megatron-core's functions and of torch's pipelining."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from types import SimpleNamespace

import pytest

from chunkgraph.errors import TopologyError
from chunkgraph.schedules import Action, Op, build_schedule, legal_counts, megatron_schedule


@pytest.fixture(scope="module")
def schedules():
    """Megatron-core's schedules; newer versions import triton, which torch for the CPU lacks."""
    from chunkgraph.megatron.cpu.host import TritonStubFinder

    undo = TritonStubFinder.install()
    try:
        yield importlib.import_module("megatron.core.pipeline_parallel.schedules")
    finally:
        undo()


def megatron_order(schedules, num_ranks, num_chunks, count, group_size, rank):
    """Return forwards and backwards in the order of Megatron's schedule functions."""
    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: num_ranks, rank=lambda: rank),
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
    )
    total, _, num_warmup, num_remaining = schedules.get_pp_rank_microbatches(
        count, num_chunks, group_size, p2p_communicator=communicator
    )
    table = schedules.get_schedule_table(count, num_chunks, group_size)
    assert len(table) == total
    # A backward takes the oldest forward of its chunk (Megatron pops the front of a list).
    waiting = {chunk: [] for chunk in range(num_chunks)}
    order = []

    def forward(k):
        microbatch, chunk = table[k]
        waiting[chunk].append(microbatch)
        order.append(Action(Op.F, chunk * num_ranks + rank, microbatch))

    def backward(k):
        chunk = num_chunks - 1 - table[k][1]
        order.append(Action(Op.B, chunk * num_ranks + rank, waiting[chunk].pop(0)))

    for k in range(num_warmup):
        forward(k)
    for k in range(num_remaining):
        forward(k + num_warmup)
        backward(k)
    for k in range(num_remaining, total):
        backward(k)
    return tuple(order)


@pytest.mark.megatron
@pytest.mark.every_release
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("num_chunks", [2, 3, 4])
def test_interleaved_is_megatrons_order(schedules, num_ranks, num_chunks):
    for group_size in (num_ranks, num_ranks + 1, 2 * num_ranks):
        counts = legal_counts(
            num_ranks=num_ranks, num_chunks=num_chunks, group_size=group_size
        ).up_to(3 * group_size)
        assert any(count % group_size for count in counts) == (group_size > num_ranks)
        for count in counts:
            built = megatron_schedule(num_ranks, num_chunks, count, group_size)
            for rank in range(num_ranks):
                assert built.actions[rank] == megatron_order(
                    schedules, num_ranks, num_chunks, count, group_size, rank
                )


@pytest.mark.megatron
@pytest.mark.every_release
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_1f1b_is_megatrons_order(schedules, num_ranks):
    for count in range(1, 3 * num_ranks + 1):
        built = megatron_schedule(num_ranks, 1, count)
        for rank in range(num_ranks):
            assert built.actions[rank] == megatron_order(
                schedules, num_ranks, 1, count, num_ranks, rank
            )


class _PassedTheChecks(Exception):  # noqa: N818  (no error: the sign of success)
    pass


@pytest.mark.megatron
@pytest.mark.every_release
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_same_counts_are_refused_as_by_megatron(schedules, num_ranks, monkeypatch):
    torch = pytest.importorskip("torch")

    def stop(*args, **kwargs):
        raise _PassedTheChecks

    # Megatron's schedule does this first, after it has checked the counts.
    monkeypatch.setattr(schedules, "get_pp_rank_microbatches", stop)
    monkeypatch.setattr(schedules, "get_model_type", lambda model: None)
    # Before that it creates one tensor on the GPU.
    no_gpu = SimpleNamespace(nn=torch.nn, int=torch.int, zeros=lambda *args, **kwargs: None)
    monkeypatch.setattr(schedules, "torch", no_gpu)
    pipeline = SimpleNamespace(size=lambda: num_ranks, rank=lambda: 0)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(tp=alone, cp=alone, pp=pipeline, embd=None, pos_embd=None, dp_cp=alone)

    def megatron_accepts(count, group_size):
        # Settings that are not listed are off.
        config = defaultdict(
            lambda: None, hidden_size=8, microbatch_group_size_per_vp_stage=group_size
        )
        config_object = type("Config", (), {"__getattr__": lambda self, name: config[name]})()
        monkeypatch.setattr(schedules, "get_model_config", lambda model: config_object)
        try:
            schedules.forward_backward_pipelining_with_interleaving(
                forward_step_func=None,
                data_iterator=[None, None],
                model=[torch.nn.Identity(), torch.nn.Identity()],
                num_microbatches=count,
                seq_length=8,
                micro_batch_size=1,
                p2p_communicator=SimpleNamespace(pp_group=pipeline, config=config_object),
                pg_collection=groups,
            )
        except _PassedTheChecks:
            return True
        except (ValueError, RuntimeError) as error:
            if re.search("should range in|remainder of M", str(error)):
                return False
            raise
        raise AssertionError("Megatron's schedule returned")

    def we_accept(count, group_size):
        try:
            megatron_schedule(num_ranks, 2, count, group_size)
        except TopologyError:
            return False
        return True

    verdicts = set()
    for group_size in range(num_ranks - 1, 2 * num_ranks + 2):
        for count in range(1, 4 * group_size):
            accepted = megatron_accepts(count, group_size)
            assert we_accept(count, group_size) == accepted, (count, group_size)
            verdicts.add(accepted)
    assert verdicts == {True, False}


def torch_order(name, num_ranks, count, num_chunks=None):
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = visualizer.get_schedule_ops(name, num_ranks, count, num_chunks)
    # Besides bubbles (None), torch also lists operations on parameters and gradients.
    is_ours = re.compile(r"\d+[FB]\d+").fullmatch
    return tuple(
        tuple(Action.parse(str(action)) for action in row if is_ours(str(action))) for row in rows
    )


@pytest.mark.parametrize(("num_ranks", "count"), [(2, 2), (2, 5), (4, 4), (4, 9), (8, 16)])
def test_single_chunk_schedules_are_torchs_order(num_ranks, count):
    built = build_schedule("gpipe", num_ranks=num_ranks, num_microbatches=count)
    assert built.actions == torch_order("GPipe", num_ranks, count)
    built = build_schedule("1f1b", num_ranks=num_ranks, num_microbatches=count)
    # torch's table (not its run) numbers the last rank's forwards from 1, so it is left out here.
    assert built.actions[:-1] == torch_order("1F1B", num_ranks, count)[:-1]


def torch_class_order(name, num_ranks, num_chunks, count):
    """Return the whole table of one of torch's split schedules, without processes."""
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [
        SimpleNamespace(
            num_stages=num_ranks * num_chunks,
            group_size=num_ranks,
            group_rank=0,
            stage_index=chunk,
            submod=None,
            stage_index_to_group_rank={},
        )
        for chunk in range(num_chunks)
    ]
    schedule = getattr(torch_schedules, name)(stages, n_microbatches=count)
    # torch joins an overlapped forward and backward in one action, but runs them in turn.
    return tuple(
        tuple(
            Action.parse(str(action))
            for entry in schedule.pipeline_order[rank]
            if entry is not None
            for action in (entry.sub_actions or (entry,))
        )
        for rank in range(num_ranks)
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("name", "torch_name"),
    [("zb-v", "ScheduleZBVZeroBubble"), ("dualpipe-v", "ScheduleDualPipeV")],
)
def test_v_schedules_are_torchs_order(name, torch_name, num_ranks):
    for count in legal_counts(num_ranks=num_ranks, num_chunks=2, schedule=name).up_to(
        4 * num_ranks + 1
    ):
        built = build_schedule(name, num_ranks=num_ranks, num_chunks=2, num_microbatches=count)
        assert built.actions == torch_class_order(torch_name, num_ranks, 2, count)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
def test_interleaved_zero_bubble_is_torchs_order(num_ranks, num_chunks):
    name = "zb-h1" if num_chunks == 1 else "interleaved-zb"
    group_sizes = set()
    for count in range(num_ranks, 4 * num_ranks + 2):
        # torch cuts a step into equal groups, as many as fit, and refuses other counts. Here and
        # in Megatron the user chooses the size of a group, and the last one may be smaller.
        num_groups = count // num_ranks
        if count % num_groups:
            continue
        group_sizes.add(count // num_groups)
        built = build_schedule(
            name,
            num_ranks=num_ranks,
            num_chunks=num_chunks,
            num_microbatches=count,
            group_size=count // num_groups,
        )
        assert built.actions == torch_class_order(
            "ScheduleInterleavedZeroBubble", num_ranks, num_chunks, count
        )
    assert len(group_sizes) > 1
