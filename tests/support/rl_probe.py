"""A case of `run_cases`: cycles of reinforcement learning as verl, NeMo-RL and slime run them.

Each cycle computes log-probabilities in evaluation mode, those of a reference whose weights are
copied into the same parameters, and trains twice. Rows, documents and numbers of microbatches
change. The oracle is the same loop without graphs, in which the caller pads rows alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gathering import of_ranks
from groups_end_probe import make_anew
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.features.packing.bank import PackingOptions
from chunkgraph.megatron.receive import receiving_lengths
from chunkgraph.packing import PackedShape
from chunkgraph.trainer.model import zero_gradients
from chunkgraph.trainer.trained_model import TrainedModel

MOST_DOCUMENTS = 7


def documents_of(seed: int, most: int, replica: int) -> list[list[int]]:
    """Draw the lengths of the documents of each microbatch of a step."""
    count = random.Random(seed).randint(1, 2) * 2
    rng = random.Random(100 * replica + seed)
    packs = []
    for _ in range(count):
        lengths = [rng.randint(3, most // 3) for _ in range(rng.randint(1, 4))]
        while sum(lengths) > most:
            lengths.pop()
        packs.append(lengths)
    return packs


def microbatches(
    seed: int, packs: list[list[int]], buckets: Sequence[int], device: torch.device, *, pads: bool
) -> Iterator[dict[str, Any]]:
    """Yield the microbatches of a step; ``pads``: as a caller that pads rows itself."""
    generator = torch.Generator().manual_seed(seed)
    pads = pads and max(map(sum, packs)) <= buckets[-1]  # or none of the step
    for lengths in packs:
        num_rows = sum(lengths)
        tokens = torch.randint(1, 64, (1, num_rows), generator=generator).to(device)
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        longest = max(lengths)
        ids = tokens
        if pads:
            bucket = next(b for b in buckets if b >= num_rows)
            ids = torch.nn.functional.pad(tokens, (0, bucket - num_rows))
            ends = torch.cat([ends, torch.tensor([bucket], dtype=torch.int32)])
            longest = bucket + 1  # Megatron mistakes a table of as many rows as there are
        ends = ends.to(device)
        params = PackedSeqParams("thd", *[ends] * 4, longest, longest)
        nested = torch.nested.as_nested_tensor([*tokens[0].split(lengths)], layout=torch.jagged)
        yield {"ids": ids, "nested": nested, "tokens": tokens, "params": params}


def forward_step(data: Iterator[dict[str, Any]], chunk: Any) -> Any:
    """Compute logits of a microbatch; later stages get nested ids, as in verl."""
    batch, model = next(data), chunk
    while not hasattr(model, "pre_process"):
        model = model.module
    logits = chunk(
        input_ids=batch["ids"] if model.pre_process else batch["nested"],
        position_ids=None,
        attention_mask=None,
        packed_seq_params=batch["params"],
    )
    return logits, partial(policy_loss, batch["tokens"])


def policy_loss(tokens: torch.Tensor, logits: torch.Tensor) -> Any:
    """Return a loss and the log-probabilities; divides the logits in place."""
    logits = logits[:, : tokens.size(1)]
    logits.div_(0.9)
    labels = tokens.roll(-1, 1).unsqueeze(-1)
    log_probs = logits.float().log_softmax(-1).gather(-1, labels).squeeze(-1)
    return -log_probs.mean(), {"log_probs": log_probs.detach()}


class Loop:
    """One run of the cycles, eager or with graphs."""

    def __init__(self, config: Any, device: torch.device, case: dict[str, Any]) -> None:
        options = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
        self.model = TrainedModel(config, device, transformer_options=options)
        self.results: list[torch.Tensor] = []
        self.graphs: Any = None
        self.schedule: Callable[..., Any] = self.model.schedule
        self._case = case
        self._buckets = case.get("buckets", [24, 48])
        self._replica = parallel_state.get_data_parallel_rank()
        # Over gloo, Megatron's interleaved schedule hangs when stages exchange shapes.
        self._is_interleaved = len(self.model.chunks) > 1

    def exchange_no_shapes(self) -> None:
        """Tell stages the rows of each microbatch instead."""
        chunks = self.model.chunks
        chunks[0].config.variable_seq_lengths = False
        schedule = receiving_lengths(chunks, self.model.device, self.schedule)

        def run(**keywords: Any) -> Any:
            rows = [sum(lengths) for lengths in documents_of(*self._drawn)]
            buckets = [next(b for b in self._buckets if b >= n) for n in rows]
            return schedule(**{**keywords, "seq_length": self._buckets[-1]}, buckets=buckets)

        self.schedule = run

    def attach(self) -> None:
        """Train with graphs."""
        from chunkgraph.engine import CaptureOptions
        from chunkgraph.megatron import attach

        shape = PackedShape(MOST_DOCUMENTS + 1, self._buckets[-1])
        packing = PackingOptions(shape, buckets=self._buckets[:-1], seq_buckets=())
        options = CaptureOptions(**self._case.get("options", {}))
        self.graphs = attach(self.model.chunks, packing=packing, options=options)
        self.schedule = self.graphs.wrap_forward_backward(self.schedule)
        if "store" in self._case:
            self.optimizer_step = self.graphs.capture_optimizer(self.model.optimizer)

    def run_pass(self, seed: int, *, forward_only: bool, scale: int = 1) -> None:
        """Run one call of the schedule, with ``scale`` times the tokens."""
        most = self._buckets[-1] * scale
        self._drawn = seed, most, self._replica
        packs = documents_of(*self._drawn)
        pads = self.graphs is None
        chunks = self.model.chunks
        for chunk in chunks:
            chunk.train(not forward_only)
        # Some frameworks leave gradients enabled; such a pass is eager.
        with torch.set_grad_enabled(not forward_only or seed == 31):
            outputs = self.schedule(
                forward_step_func=forward_step,
                data_iterator=[
                    microbatches(seed, packs, self._buckets, self.model.device, pads=pads)
                    for _ in chunks
                ],
                model=chunks,
                num_microbatches=len(packs),
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
                **({} if pads else {"packings": packs}),
            )
        self.results += [output["log_probs"] for output in outputs]
        if self._case.get("moves") and not pads:
            self._move(with_gradients=forward_only)

    def _move(self, *, with_gradients: bool) -> None:
        """Give parameters, and perhaps gradients, other memory, as offloading does."""
        for chunk in self.model.chunks:
            for p in chunk.parameters():
                p.data = p.data.clone()
            for buffer in chunk.buffers if with_gradients else ():
                storage = buffer.grad_data.untyped_storage()
                size = storage.nbytes()
                storage.resize_(0)
                self._occupied = torch.empty(size, dtype=torch.uint8, device=self.model.device)
                storage.resize_(size)

    def cycle(self, number: int) -> None:
        """Run one cycle."""
        parameters = [p for chunk in self.model.chunks for p in chunk.parameters()]
        # Twice in a row, on one replica alone: no rank may capture or replay by itself.
        is_long = number in (2, 3) and not (self._is_interleaved or self._replica)
        self.run_pass(10 * number, forward_only=True, scale=1 + 3 * is_long)
        policy = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p.mul_(0.5)  # another model's weights
            self.run_pass(10 * number + 1, forward_only=True)
            for p, own in zip(parameters, policy, strict=True):
                p.copy_(own)
        for mini in (2, 3):
            zero_gradients(self.model.chunks, self.model.optimizer)
            # On one replica alone.
            is_long = number == 2 and mini == 3 and not (self._is_interleaved or self._replica)
            self.run_pass(10 * number + mini, forward_only=False, scale=1 + is_long)
            self.model.optimizer.step()


def fail(loop: Loop, folder: Path) -> None:
    """Train on other documents than those announced, on the first rank; it outlives its error."""
    loop.attach()
    loop.run_pass(2, forward_only=False)
    if dist.get_rank() == 0:
        drawn, own = microbatches, [*documents_of(3, 48, 0)[:-1], [3]]
        assert len(own) > 1
        globals()["microbatches"] = lambda seed, _, *more, **pads: drawn(seed, own, *more, **pads)
    try:
        loop.run_pass(3, forward_only=False)
    except ConfigError:
        while not (folder / "error_rank1.txt").exists():
            time.sleep(0.1)
        raise


def run(config: Any, device: torch.device, case: dict[str, Any]) -> dict[str, Any]:
    """Return whether both runs are equal, and what the graphs did, of every rank."""
    runs = []
    if case.get("may_end"):
        fail(Loop(config, device, case), Path(case["store"]))
    for has_graphs in (False, True):
        loop = Loop(config, device, case)
        if has_graphs:
            loop.attach()
        elif len(loop.model.chunks) > 1:
            loop.exchange_no_shapes()
        for number in range(case["num_cycles"]):
            loop.cycle(number)
            if "store" in case:
                sleeps = has_graphs and number != 1
                if sleeps:
                    loop.graphs.sleep()
                make_anew(config, Path(case["store"]) / f"{has_graphs} {number}")
                if sleeps:
                    loop.graphs.wake()
        state = [p.detach().clone() for c in loop.model.chunks for p in c.parameters()]
        runs.append((loop.results + state, loop))
        if has_graphs:
            steps, engine = loop.graphs.engine.forward_only, loop.graphs.engine
            found = {
                "scope": loop.graphs.scope.scope,
                "sessions": engine.counters.capture_sessions,
                "replayed": engine.counters.replayed_steps,
                "fallbacks": dict(engine.counters.fallbacks),
                "forward_sessions": steps.counters.capture_sessions,
                "forward_replayed": steps.counters.replayed_steps,
                "eager_calls": steps.num_eager_calls,
                "recaptures": len(engine.counters.recaptures),
                "in_place": loop.graphs.receiver.num_received_in_place,
            }
            if "store" in case:
                found["optimizer_captures"] = loop.optimizer_step.gradients.num_captures
        loop.model.close()
    (expected, _), (got, _) = runs
    found["different"] = [
        i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if not torch.equal(a, b)
    ]
    return {"ranks": of_ranks(found)}
