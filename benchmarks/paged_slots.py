"""What fewer slots cost one rank: its step, its memory, and what the planner simulates.

    python benchmarks/paged_slots.py > paged_slots.json

One GPU runs the actions of the first of 8 pipeline ranks (1F1B, 16 microbatches), and sends to and
receives from itself, so it waits for pages only. The chunk has 4 Transformer Engine layers of
Llama-3-8B's shape. Actions and pages are timed with 8 slots; later plans go by these times. With
`NVTE_ALLOW_NONDETERMINISTIC_ALGO=0` gradients must be equal to those with 8 slots to the last bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import nn
from torch.utils.checkpoint import checkpoint

from chunkgraph.engine import CaptureOptions, ChunkGraphs, RankSchedule
from chunkgraph.engine.paging.pages import page_of
from chunkgraph.schedules import CostModel, Op, Schedule, build_schedule, simulate
from chunkgraph.slots import PageClock, plan_pages

RANKS, COUNT = 8, 16
LAYERS, HIDDEN, FFN, HEADS, GROUPS, SEQUENCE = 4, 4096, 14336, 32, 8, 4096


class Layer(nn.Module):
    """One layer; its MLP may be recomputed in the backward."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        kind = {"params_dtype": torch.bfloat16, "bias": False, "normalization": "RMSNorm"}
        self.attention = te.MultiheadAttention(
            HIDDEN, HEADS, num_gqa_groups=GROUPS, attention_dropout=0.0,
            input_layernorm=True, fuse_qkv_params=True, attn_mask_type="causal", **kind,
        )  # fmt: skip
        self.mlp = te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **kind)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (sequence, 1, hidden)."""
        x = x + self.attention(x)
        if self.recomputes:
            return x + checkpoint(self.mlp, x, use_reentrant=True, preserve_rng_state=False)
        return x + self.mlp(x)


def first_rank(count: int) -> Schedule:
    """Return the actions of the first of several ranks, as those of a rank alone."""
    whole = build_schedule("1f1b", num_ranks=RANKS, num_microbatches=count)
    return Schedule("first rank", 1, 1, count, None, whole.actions[:1])


def ms_of(work: Callable[[], object]) -> float:
    """Return how long the device works, with nothing before or after."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


class Rank:
    """The rank with some number of slots; ``costs`` is what its plan goes by."""

    def __init__(self, num_slots: int, costs: CostModel, *, recomputes: bool) -> None:
        torch.manual_seed(0)
        layers = (Layer(recomputes=recomputes) for _ in range(LAYERS))
        self.module = nn.Sequential(*layers).cuda()
        shape = 2, SEQUENCE, 1, HIDDEN
        self.received, self.gradient = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        most = num_slots if num_slots < RANKS else None
        options = CaptureOptions(max_slots=most, can_sleep=True)  # in arenas with 8 slots, too
        schedule = RankSchedule(first_rank, 0, costs)
        self.graphs = ChunkGraphs(self.module, RANKS, options=options, schedule=schedule)

    def step(self) -> None:
        """Run one step."""
        self.module.zero_grad(set_to_none=False)
        flying: dict[int, Any] = {}
        self.times: dict[Op, list[Any]] = {Op.F: [], Op.B: []}
        with self.graphs.step(COUNT):
            for action in first_rank(COUNT).actions[0]:
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                marks[0].record()
                if action.op is Op.F:
                    y = self.graphs.callables[0](self.received.clone().requires_grad_())
                    flying[action.microbatch] = y, y.detach().clone()
                else:
                    flying.pop(action.microbatch)[0].backward(self.gradient.clone())
                marks[1].record()
                self.times[action.op].append(marks)

    def costs(self) -> CostModel:
        """Return the mean durations of the last step's actions, and those of a page alone."""
        forward_ms, backward_ms = (
            statistics.mean(a.elapsed_time(b) for a, b in times) for times in self.times.values()
        )
        parts = page_of(self.graphs._captured.slots[0][0])
        copier = self.graphs.backend.new_copier()
        memory = copier.host_memory(sum(part.numel() for part in parts))

        def copy(*, to_host: bool) -> None:
            copier.wait(copier.copy(parts, memory, [copier.mark()], to_host=to_host))

        works = partial(copy, to_host=True), partial(copy, to_host=False)
        *_, out_ms, in_ms = map(ms_of, works * 2)
        actions = {"forward_ms": forward_ms, "backward_ms": backward_ms}
        return CostModel(**actions, page_out_ms=out_ms, page_in_ms=in_ms)


def table(slots: list[int], num_steps: int, *, recomputes: bool) -> dict[str, Any]:
    """Measure every number of slots."""
    rows: list[dict[str, Any]] = []
    first: list[torch.Tensor] = []  # gradients with all slots
    costs = CostModel()
    for num_slots in [RANKS, *(n for n in slots if n != RANKS)]:
        rank = Rank(num_slots, costs, recomputes=recomputes)
        for _ in range(3):
            rank.step()
        step_ms = statistics.median(ms_of(rank.step) for _ in range(num_steps))
        costs = costs if rows else rank.costs()
        plan = plan_pages(first_rank(COUNT), 0, [num_slots], costs)
        simulated = simulate(first_rank(COUNT), costs, {0: PageClock(plan, costs)})
        report, gradients = rank.graphs.report, [p.grad for p in rank.module.parameters()]
        first = first or gradients
        slot_bytes = report.slot_bytes + report.static_bytes
        row = {"slots": report.num_slots[0], "step_ms": step_ms, "slot_bytes": slot_bytes}
        row |= {"pages": len(plan.pages), "simulated_ms": simulated.makespan_ms}
        rows.append(row | {"are_equal": all(map(torch.equal, gradients, first))})
        print(rows[-1], file=sys.stderr, flush=True)
        rank.graphs.release()
    return {"recomputes_mlp": recomputes, "costs": asdict(costs), "rows": rows}


def main() -> None:
    """Measure with and without recompute, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 7, 6, 4])
    parser.add_argument("--recompute", type=int, nargs="+", default=[0, 1], help="of MLPs: 0, 1")
    args = parser.parse_args()
    tables = [table(args.slots, args.steps, recomputes=bool(n)) for n in args.recompute]
    print(json.dumps({"device": torch.cuda.get_device_name(), "tables": tables}, indent=1))


if __name__ == "__main__":
    main()
