"""A whole pipeline in one process, run by any schedule, with eager chunks or graphs."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from toys import add_to_main_grads

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.graphs import CUDABackend, GraphBackend, RecorderBackend
from chunkgraph.schedules import Op, Schedule

WIDTH, ROWS = 8, 3


class Stage(nn.Module):
    """Dropout, normalisation, a buffer updated in place and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.num_calls += 1
        h = self.dropout(torch.nn.functional.gelu(self.first(self.norm(x))))
        return x + self.first(h) * scale


@dataclass
class Run:
    """The results of a training run, compared bit for bit."""

    losses: list[torch.Tensor] = field(default_factory=list)
    input_grads: list[torch.Tensor] = field(default_factory=list)
    state: list[torch.Tensor] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.losses, *self.input_grads, *self.state]

    def equals(self, other: Run) -> bool:
        mine, theirs = self.tensors(), other.tensors()
        return len(mine) == len(theirs) and all(
            torch.equal(a.view(torch.int32), b.view(torch.int32))
            for a, b in zip(mine, theirs, strict=True)
        )


class Pipeline:
    """``num_ranks * num_chunks`` stages of one model, all in this process."""

    def __init__(
        self, num_ranks: int, num_chunks: int, device: torch.device, *, main_grad: bool
    ) -> None:
        torch.manual_seed(11)
        self.num_ranks, self.num_chunks, self.device = num_ranks, num_chunks, device
        self.stages = [Stage().to(device) for _ in range(num_ranks * num_chunks)]
        self.parameters = [p for stage in self.stages for p in stage.parameters()]
        self.main_grad = main_grad
        if main_grad:
            for stage in self.stages:
                add_to_main_grads(stage)
        self.graphs: list[ChunkGraphs] = []
        self.calls: list[Callable[..., Any]] = list(self.stages)
        self.weights: list[Callable[[], object]] = [lambda: None for _ in self.stages]

    def attach(
        self,
        num_slots: Sequence[Sequence[int]],
        backend: GraphBackend,
        num_together: Sequence[int | None] | None = None,
        **options: Any,
    ) -> None:
        for rank in range(self.num_ranks):
            chunks = [self.stages[c * self.num_ranks + rank] for c in range(self.num_chunks)]
            graphs = ChunkGraphs(
                chunks,
                num_slots[rank],
                num_together=num_together[rank] if num_together else None,
                backend=backend,
                options=CaptureOptions(**options),
            )
            self.graphs.append(graphs)
            for c, call in enumerate(graphs.callables):
                self.calls[c * self.num_ranks + rank] = call

    @contextmanager
    def step(self, **arguments: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for graphs in self.graphs:
                stack.enter_context(graphs.step(**arguments))
            yield

    def train(self, schedules: Sequence[Schedule], seed: int, **arguments: Any) -> Run:
        """One optimizer step a schedule; ranks advance in a random but repeatable order."""
        run, order = Run(), random.Random(seed)
        torch.manual_seed(seed)
        optimizer = torch.optim.AdamW(self.parameters, lr=1e-2)
        for schedule in schedules:
            optimizer.zero_grad(set_to_none=True)
            if self.main_grad:
                for p in self.parameters:
                    p.main_grad.zero_()
            with self.step(num_microbatches=schedule.num_microbatches, **arguments):
                self.run_schedule(schedule, order, run)
            if self.main_grad:
                for p in self.parameters:
                    p.grad = p.main_grad
            optimizer.step()
        run.state = [p.detach().clone() for p in self.parameters]
        run.state += [stage.num_calls.clone() for stage in self.stages]
        return run

    def run_schedule(self, schedule: Schedule, order: random.Random, run: Run) -> None:
        last = schedule.num_stages - 1
        todo = [list(schedule.compute_actions(r)) for r in range(schedule.num_ranks)]
        inputs: dict[tuple[int, int], torch.Tensor] = {}
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        received: dict[tuple[int, int], torch.Tensor] = {}
        while any(todo):
            ready = [
                r
                for r, actions in enumerate(todo)
                if actions and _is_ready(actions[0], last, inputs, received)
            ]
            action = todo[order.choice(ready)].pop(0)
            key, stage = (action.stage, action.microbatch), action.stage
            if action.op is Op.W:
                self.weights[stage]()
                continue
            if action.op is Op.F:
                if stage == 0:
                    inputs[key] = torch.randn(ROWS, WIDTH, device=self.device).requires_grad_()
                x = inputs[key]
                y = self.calls[stage](x)
                outputs[key] = y
                if stage < last:
                    inputs[stage + 1, action.microbatch] = y.detach().clone().requires_grad_()
                else:
                    received[key] = torch.ones((), device=self.device)
                continue
            y = outputs.pop(key)
            if stage == last:
                loss = (y * y).mean()
                loss.backward()
                run.losses.append(loss.detach().clone())
            else:
                y.backward(received.pop(key))
            x = inputs.pop(key)
            run.input_grads.append(x.grad.clone())
            if stage > 0:
                received[stage - 1, action.microbatch] = x.grad.clone()


def _is_ready(action: Any, last: int, inputs: dict[Any, Any], received: dict[Any, Any]) -> bool:
    key = (action.stage, action.microbatch)
    if action.op is Op.F:
        return action.stage == 0 or key in inputs
    return action.op is Op.W or key in received


@pytest.fixture
def make_pipeline(backend: GraphBackend) -> Callable[..., Pipeline]:
    def make(num_ranks: int, num_chunks: int = 1, *, main_grad: bool = False) -> Pipeline:
        return Pipeline(num_ranks, num_chunks, backend.device, main_grad=main_grad)

    return make


@pytest.fixture
def new_backend(backend: GraphBackend) -> Callable[[], GraphBackend]:
    """Make backends of the parametrised kind, one for each pipeline of a property test."""
    return RecorderBackend if backend.name == "recorder" else CUDABackend


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable Python's garbage collector.

    Threads that stand for ranks need this. torch holds the lock of its default generator while it
    makes a tensor of the state. A collection that begins there may free tensors, and torch then
    lets other threads run; one of them that waits for that lock never gives control back.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
