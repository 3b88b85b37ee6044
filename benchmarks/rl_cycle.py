"""A cycle of reinforcement learning with and without graphs, which sleep between cycles.

    torchrun benchmarks/rl_cycle.py > rl_cycle.jsonl
    torchrun benchmarks/rl_cycle.py train.deterministic=true --rows 2048

A cycle computes log-probabilities of 2 to 12 packs and a reference's, and trains twice. Eager packs
have 90% of the rows or more, graphs pad them. With deterministic kernels both pad them, all results
are compared, and another process fills 60 GB in each sleep.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from paged_slots import ms_of

from chunkgraph.engine import CaptureOptions
from chunkgraph.megatron import attach
from chunkgraph.megatron.features.packing.bank import PackingOptions
from chunkgraph.packing import PackedShape
from chunkgraph.settings import load_config
from chunkgraph.trainer.model import build_model, build_optimizer, zero_gradients
from chunkgraph.trainer.setup import seed_everything, training_process

CONFIG = Path(__file__).parents[1] / "configs" / "bench" / "rl_cycle.yaml"
FILL = """import torch; torch.full((60_000, 10**6), 171, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize(); torch.cuda.empty_cache()"""
SEQUENCES = 12  # at most so many have deterministic kernels in 2048 rows


def packs_of(cycle: int, rows: int) -> list[list[int]]:
    """Draw the lengths of each pack's documents."""
    rng, least, packs = random.Random(cycle), rows * 9 // 10, []
    for _ in range(rng.randint(2, 12)):
        cuts = sorted(rng.sample(range(1, least), rng.randint(3, SEQUENCES - 3)))
        packs.append(torch.tensor([0, *cuts, rng.randint(least, rows)]).diff().tolist())
    return packs


class Loop:
    """The policy, its optimizer and the reference model, with or without graphs."""

    def __init__(self, config: Any, device: torch.device, *, uses_graphs: bool) -> None:
        self.rows, self.device, self.results = config.model.seq_length, device, []
        self.graphs, self.pads = [], config.train.deterministic and not uses_graphs
        seed_everything(1, device)
        policy = build_model(config, device)
        self.optimizer = build_optimizer(config, policy)
        reference = build_model(config, device, prepare=lambda chunk: chunk.requires_grad_(False))
        self.models, self.schedules = (policy, reference), [get_forward_backward_func()] * 2
        policy[0].config.variable_seq_lengths = reference[0].config.variable_seq_lengths = True
        if uses_graphs:
            options: Any = {"options": CaptureOptions(can_sleep=True)}
            options["packing"] = PackingOptions(PackedShape(SEQUENCES, self.rows), seq_buckets=())
            self.graphs = [own := attach(policy, **options)]
            self.graphs.append(attach(reference, **options, shares_memory_with=own))
            self.schedules = [g.wrap_forward_backward(self.schedules[0]) for g in self.graphs]

    def inputs(self, packs: list[list[int]]) -> Iterator[dict[str, Any]]:
        """Yield the arguments of the model for each pack."""
        generator = torch.Generator().manual_seed(sum(packs[0]))
        for lengths in packs:
            rows, ends, longest = sum(lengths), [0, *lengths], max(lengths)
            ids = torch.randint(256, (1, rows), generator=generator).to(self.device)
            both = torch.stack([ids, ids.roll(-1, 1)])
            if self.pads:
                both = torch.nn.functional.pad(both, (0, self.rows - rows))
                ends, longest = [*ends, self.rows - rows], self.rows + 1
            offsets = torch.tensor(ends, device=self.device).cumsum(0).to(torch.int32)
            params = PackedSeqParams("thd", *[offsets] * 4, longest, longest)
            others = {"position_ids": None, "attention_mask": None, "packed_seq_params": params}
            yield {"input_ids": both[0], "labels": both[1], **others}

    def call(self, which: int, packs: list[list[int]], old: Any = None) -> list[torch.Tensor]:
        """Call a model's schedule; return log-probabilities. ``old``: train, from these."""
        numbers, trains = iter(range(len(packs))), old is not None

        def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            i = next(numbers)
            log_probs, loss = -losses[:, : sum(packs[i])].float(), losses.sum()
            if trains:
                ratios = [(log_probs - old_ones[i]).exp() for old_ones in old]
                loss = (0.1 * ratios[1] - ratios[0].clamp(0.8, 1.2)).mean()
            return loss, log_probs.detach()

        def forward_step(data: Iterator[dict[str, Any]], chunk: Any) -> Any:
            return chunk(**next(data)), loss_of

        more: Any = {"model": self.models[which], "forward_step_func": forward_step}
        more["model"][0].train(trains)
        more |= {"num_microbatches": len(packs), "seq_length": 1, "micro_batch_size": 1}
        more |= {"data_iterator": iter(self.batches), "forward_only": not trains}
        more |= {"packings": packs} if self.graphs else {}
        with torch.set_grad_enabled(trains):
            return self.schedules[which](**more)

    def cycle(self, number: int) -> None:
        """Run a cycle; keep all log-probabilities."""
        packs = packs_of(number, self.rows)
        self.batches = [*self.inputs(packs)]
        old = self.call(0, packs), self.call(1, packs)
        for _ in range(2):
            zero_gradients(self.models[0], self.optimizer)
            self.results += self.call(0, packs, old)
            self.optimizer.step()
        self.results += [*old[0], *old[1]]


def used_mib() -> float:
    """Return the memory of the device that is in use."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def measure(loop: Loop, other: Any, num_cycles: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Run cycles with a sleep after each; return what was measured, and all results."""
    found: dict[str, Any] = {"cycle_ms": [], "sleep_ms": [], "wake_ms": [], "peak_mib": []}
    for number in range(num_cycles):
        torch.cuda.reset_peak_memory_stats()
        found["cycle_ms"].append(ms_of(partial(loop.cycle, number)))
        found["sleep_ms"].append(ms_of(lambda: [g.sleep() for g in loop.graphs]))
        found["asleep_mib"] = used_mib()
        if other and loop.graphs:
            other.apply(exec, (FILL,))
        found["wake_ms"].append(ms_of(lambda: [g.wake() for g in loop.graphs]))
        found["peak_mib"].append(torch.cuda.max_memory_reserved() / 2**20)
    found["counts"] = [str((g.counters, g.engine.forward_only.counters)) for g in loop.graphs]
    for graphs in reversed(loop.graphs):
        graphs.detach()
    return found, [t.detach().cpu() for t in (*loop.results, *loop.models[0][0].parameters())]


def main() -> None:
    """Measure every number of rows, and print the measurements and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("settings", nargs="*", default=[], help="section.key=value")
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--cycles", type=int, default=10, help="from the fourth on they count")
    args = parser.parse_args()
    config = load_config(CONFIG, args.settings)
    other = get_context("spawn").Pool(1) if config.train.deterministic else None
    with training_process(config) as device:
        for rows in args.rows:
            own, pairs = config.replace(model={"seq_length": rows}), []
            for uses_graphs in (False, True):
                used_mib()  # frees the loop before
                pairs.append(
                    measure(Loop(own, device, uses_graphs=uses_graphs), other, args.cycles)
                )
            (eager, expected), (graphs, results) = pairs
            same = [torch.equal(a, b) for a, b in zip(expected, results, strict=True)]
            found = {"rows": rows, "tensors": len(same), "different": same.count(False)}
            found["time_of_eager"] = sum(graphs["cycle_ms"][3:]) / sum(eager["cycle_ms"][3:])
            found["peak_of_eager"] = max(graphs["peak_mib"]) / max(eager["peak_mib"])
            found["awake_of_eager"] = max(graphs["peak_mib"][3:]) / max(eager["peak_mib"])
            found["asleep_more_mib"] = graphs["asleep_mib"] - eager["asleep_mib"]
            print(json.dumps({**found, "eager": eager, "graphs": graphs}), flush=True)


if __name__ == "__main__":
    main()
