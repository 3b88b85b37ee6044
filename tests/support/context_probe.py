"""A case of `run_cases`: steps with a context-parallel size per microbatch, next to eager."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_sizes import ForcedSizes
from gathering import Gather, of_ranks
from torch import nn

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs, Host, StepMode
from chunkgraph.engine.agreement import Agree, refuse_differences
from chunkgraph.engine.bits import same_bits
from chunkgraph.errors import ConfigError, ReplayMismatchError
from chunkgraph.megatron.core.agreement import agree_by_maximum
from chunkgraph.megatron.feature import StepInputs, StepPlan
from chunkgraph.megatron.features.contexts.groups import ContextGroups, groups_put_back
from chunkgraph.megatron.features.packing.bank import PackedBank
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.steps import StepPlans
from chunkgraph.packing import ContextLimits, SmallestSizes, schedule_contexts

WIDTH, ROWS, NUM_CHUNKS = 6, 8, 2


class Mixing(nn.Module):
    """Mixes rows as attention does: queries of this rank, keys and values of the whole group.

    Args:
        fails_at: sizes whose forward reads a number on the host after its collectives, which no
            graph can hold.
    """

    def __init__(self, fails_at: Sequence[int] = ()) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("num_calls", torch.zeros(()))
        self.fails_at = tuple(fails_at)
        self.cp_group: Any = "its own"

    def forward(self, x: torch.Tensor, *, cp_group: Any, cp_size: int) -> torch.Tensor:
        self.cp_group = cp_group
        self.num_calls += 1
        query, *others = self.qkv(x).chunk(3, dim=-1)
        key, value = (Gather.apply(o, cp_group) if cp_group is not None else o for o in others)
        weights = (query @ key.t() / math.sqrt(WIDTH)).softmax(-1)
        y = x + self.dropout(self.out(weights @ value))
        if cp_size in self.fails_at:
            y = y * (1.0 if float(y.detach().sum()) < math.inf else 0.0)
        return y


class BankedGraphs(Host):
    """Chunk graphs of modules outside of Megatron, with the plans and wrappers of `attach`."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        num_slots: Sequence[int],
        banks: PackedBanks,
        *,
        options: CaptureOptions | None = None,
        agree: Agree | None = None,
    ) -> None:
        assert banks.groups is not None
        self._groups = banks.groups
        self._chunks = chunks
        self._plans = StepPlans(banks, banks.groups.rank, missing_graphs=self._missing_graphs)
        self.engine = ChunkGraphs(
            [Chunk.from_module(chunk, f"chunk {i}") for i, chunk in enumerate(chunks)],
            tuple(num_slots),
            options=options,
            agree=agree,
            host=self,
            takes_misfits=True,
            banks=self._plans.banks,
        )
        self.callables = self.engine.callables
        self.counters = self.engine.counters
        self.release = self.engine.release

    def _missing_graphs(self, keys: Sequence[Any]) -> str:
        return self.engine.misfit_of(keys)

    def capturing(self) -> AbstractContextManager[None]:
        return groups_put_back(self._chunks)

    verifying = capturing

    @contextmanager
    def step(
        self, banks: Sequence[PackedBank], *, forward_only: bool = False
    ) -> Iterator[StepMode]:
        count, plan = len(banks), StepPlan(banks=banks)
        if not forward_only:
            plan = self._plans.plan(StepInputs(contexts=banks), {"num_microbatches": count})
        with (
            self.engine.step(
                count,
                forward_only=forward_only,
                plan=plan,
            ) as mode,
            nullcontext() if mode is StepMode.REPLAY else groups_put_back(self._chunks),
        ):
            yield mode

    def announce(self, banks: Sequence[PackedBank]) -> None:
        misfit, digest = self._plans.announce(StepInputs(contexts=banks))
        self.engine.announce(StepPlan(misfit=misfit, digest=digest))


def order_of(rng: random.Random, num: int, num_slots: int) -> list[tuple[int, int]]:
    """Draw an order of (chunk, microbatch): first its forward, then its backward, in any order."""
    order: list[tuple[int, int]] = []
    left = {c: list(range(num)) for c in range(NUM_CHUNKS)}
    flying: list[tuple[int, int]] = []
    while flying or any(left.values()):
        c = rng.randrange(NUM_CHUNKS)
        in_flight = sum(chunk == c for chunk, _ in flying)
        if left[c] and in_flight < num_slots and rng.random() < 0.6:
            flying.append((c, left[c].pop(0)))
            order.append(flying[-1])
        elif flying:
            order.append(flying.pop(rng.randrange(len(flying))))
    return order


def run_step(
    calls: Any, chunks: Sequence[Mixing], keys: Any, order: Any, step: int
) -> list[torch.Tensor]:
    """Run a step and update the parameters; return outputs, gradients and buffers."""
    results: list[torch.Tensor] = []
    flying: dict[tuple[int, int], Any] = {}
    for c, m in order:
        if (c, m) in flying:
            x, y = flying.pop((c, m))
            (y * y).sum().backward()
            results.append(x.grad.clone())
            continue
        generator = torch.Generator().manual_seed(1000 * step + 10 * m + dist.get_rank())
        x = torch.randn(keys[m].num_tokens, WIDTH, generator=generator).requires_grad_()
        y = calls[c](x, cp_group=keys[m].group, cp_size=keys[m].size)
        results.append(y.detach().clone())
        flying[c, m] = (x, y)
    for chunk in chunks:
        results.append(chunk.num_calls.clone())
        for parameter in chunk.parameters():
            results.append(parameter.grad.clone())
            dist.all_reduce(parameter.grad)
            parameter.data.sub_(1e-3 * parameter.grad)
            parameter.grad = None
    return results


def new_chunks(fails_at: Sequence[int] = ()) -> list[Mixing]:
    torch.manual_seed(3)
    return [Mixing(fails_at) for _ in range(NUM_CHUNKS)]


def run(_config: Any, _device: Any, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the case; return the results of every rank."""
    if case.get("is_megatron"):
        return groups_of_megatron()
    rank, worlds = dist.get_rank(), case.get("worlds", [[0, 1, 2, 3]])
    (stage,) = (s for s, world in enumerate(worlds) if rank in world)
    num_slots = [2, 1][stage]
    limits = ContextLimits(
        world_size=len(worlds[0]),
        max_tokens_per_rank=ROWS,
        max_packed_seqs=4,
    )
    groups = ContextGroups.create(worlds, limits.group_sizes)
    banks = PackedBanks.of_limits(limits, groups)
    captured = case.get("captured", limits.group_sizes)
    banks.keys = tuple(key for key in banks.keys if key.size in captured)
    eager, mine = new_chunks(), new_chunks(case["fails_at"] if rank == case["fails_on"] else ())
    if rank == case.get("hooked_on"):
        mine[0].out.weight.register_hook(lambda grad: grad)  # refused before any graph
    agree = agree_by_maximum()
    if case.get("other_limits_on") == rank:
        limits = replace(limits, max_packed_seqs=5)
        banks = PackedBanks.of_limits(limits, groups)
    if "other_limits_on" in case:
        with pytest.raises(ConfigError, match=r"max_packed_seqs=5.* on rank 2,") as error:
            refuse_differences(agree, rank, {"packing": banks})
        return gathered({"refused": str(error.value)}, groups, agree)
    graphs = BankedGraphs(
        mine,
        [num_slots] * NUM_CHUNKS,
        banks,
        options=CaptureOptions(**case.get("options", {})),
        agree=agree,
    )
    results: dict[str, Any] = {"equal": [], "modes": [], "sizes": [], "digests": [], "warnings": []}

    def planned(step: int) -> Any:
        is_other = stage == case.get("other_plan_on") and step == case.get("other_plan_in")
        rng = random.Random(step + 50 * is_other)
        if step % 2:
            sizes = list(case.get("sizes", limits.group_sizes))
            rng.shuffle(sizes)
            lengths = [rng.randint(1, 6) for _ in range(case.get("num_documents", 8))]
            schedule = schedule_contexts(lengths, limits, ForcedSizes(tuple(sizes), 2))
        else:
            most = max(case.get("sizes", limits.group_sizes)) * ROWS
            lengths = [
                rng.randint(1, most // (1 + i % 4)) for i in range(case.get("num_documents", 6))
            ]
            schedule = schedule_contexts(lengths, limits, SmallestSizes())
        return schedule.digest, banks.of_schedule(schedule, lengths)

    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for step in range(case["num_steps"]):
            digest, keys = planned(step)
            if step == case.get("other_plan_in"):
                with pytest.raises(ConfigError, match="different plans for this step") as error:
                    graphs.step(keys).__enter__()
                graphs.release()
                return gathered({"refused": str(error.value)}, groups, agree)
            order = order_of(random.Random(100 + step), len(keys), num_slots)
            torch.manual_seed(step)
            expected = run_step(eager, eager, keys, order, step)
            torch.manual_seed(step)
            with graphs.step(keys) as mode:
                if case.get("announces") and (rank + step) % 3 and step + 1 < case["num_steps"]:
                    graphs.announce(planned(step + 1)[1])
                result = run_step(graphs.callables, mine, keys, order, step)
            results["equal"].append(same(result, expected))
            results["modes"].append(mode.value)
            results["sizes"].append([key.size for key in keys])
            results["digests"].append(digest)
    results["warnings"] = [str(w.message) for w in records]
    counters = graphs.counters
    results["put_back"] = [chunk.cp_group for chunk in mine]
    results["fallbacks"] = dict(counters.fallbacks)
    results["missing"] = dict(counters.missing_banks)
    results["replays"] = {str(k): n for k, n in counters.replays_of_bank.items()}
    results["sessions"] = counters.capture_sessions
    report = graphs.engine.report
    results["num_slots"] = report.num_slots if report else None
    results["num_graphs"] = report.num_graphs if report else 0
    if case.get("changes_groups"):
        results["refusals"] = refusals(graphs, banks, limits)
    graphs.release()
    return gathered(results, groups, agree)


def gathered(results: dict[str, Any], groups: ContextGroups, agree: Any) -> list[dict[str, Any]]:
    """End a case; return the results of all ranks."""
    agree and agree.close()
    groups.close()
    return of_ranks(results)


def groups_of_megatron() -> list[dict[str, Any]]:
    """Return each rank's group for a microbatch of size 2, and the group of its routers."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2)
    without = ContextGroups.of_data_parallel([1, 2])
    groups = ContextGroups.of_data_parallel([1, 2], has_experts=True)
    shared = groups.of(2)
    results = {
        "shared": dist.get_process_group_ranks(shared),
        "counted": dist.get_process_group_ranks(groups.of_routers(shared)),
        "without": without.for_routers,
    }
    groups.close()
    return of_ranks(results)


def refusals(graphs: BankedGraphs, banks: PackedBanks, limits: ContextLimits) -> list[str]:
    """Return the errors of a microbatch with another group than its graphs, announced and not."""
    others = ContextGroups.create([list(range(dist.get_world_size()))], limits.group_sizes)
    (key,) = (k for k in banks.keys if k.size == 4)
    (other,) = (k for k in PackedBanks.of_limits(limits, others).keys if k.size == 4)
    messages = []
    for announced in (other, key):
        try:
            with graphs.step([announced]):
                x = torch.ones(ROWS, WIDTH, requires_grad=True)
                graphs.callables[0](x, cp_group=other.group, cp_size=4)
        except ReplayMismatchError as error:
            messages.append(str(error))
    others.close()
    return messages


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
