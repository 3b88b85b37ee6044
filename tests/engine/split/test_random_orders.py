"""Random legal orders of forwards and halves over the chunks of a rank, against eager training."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from split_models import MODELS, WIDTH
from torch import nn
from toys import add_to_main_grads

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.engine.split import SPLIT, WeightBackwards
from chunkgraph.graphs import GraphBackend


@dataclass(frozen=True)
class Case:
    """A drawn case."""

    models: tuple[str, ...]
    wants_input_grads: tuple[bool, ...]
    are_split: tuple[bool, ...]
    num_slots: tuple[int, ...]
    counts: tuple[int, ...]
    seed: int
    shared_slots: bool
    verify: str
    main_grad: bool
    autocast: bool
    clears: bool


@st.composite
def cases(draw: Any) -> Case:
    num_chunks = draw(st.integers(1, 3))
    shared = draw(st.booleans())
    num_slots = [draw(st.integers(1, 3))] * num_chunks if shared else None

    def each(strategy: Any) -> tuple[Any, ...]:
        return tuple(draw(strategy) for _ in range(num_chunks))

    models = each(st.sampled_from(sorted(MODELS)))
    takes_grads = each(st.booleans())
    return Case(
        models=models,
        wants_input_grads=tuple(
            w or "reentrant" in m for w, m in zip(takes_grads, models, strict=True)
        ),
        are_split=each(st.sampled_from([True, True, False])),
        num_slots=tuple(num_slots or each(st.integers(1, 3))),
        counts=tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=2))),
        seed=draw(st.integers(0, 2**16)),
        shared_slots=shared,
        verify=draw(st.sampled_from(["none", "none", "poison", "shadow"])),
        main_grad=draw(st.booleans()),
        autocast=draw(st.booleans()),
        clears=draw(st.booleans()),
    )


Action = tuple[str, int, int]
"""``F``, ``I`` (all of a backward that is whole) or ``W``, a chunk, a microbatch."""


def random_order(case: Case, count: int, rng: random.Random) -> list[Action]:
    """Order the microbatches of all chunks as the slots allow."""
    chunks = range(len(case.models))
    done = [0] * len(case.models)
    forwarded: list[list[int]] = [[] for _ in chunks]
    halved: list[list[int]] = [[] for _ in chunks]
    order: list[Action] = []

    def num_used(c: int) -> int:
        of = chunks if case.shared_slots else (c,)
        return sum(len(forwarded[k]) + len(halved[k]) for k in of)

    while True:
        legal = [
            *[("F", c) for c in chunks if done[c] < count and num_used(c) < case.num_slots[c]],
            *[("I", c) for c in chunks if forwarded[c]],
            *[("W", c) for c in chunks if halved[c]],
        ]
        if not legal:
            return order
        action, c = rng.choice(legal)
        if action == "F":
            microbatch = done[c]
            done[c] += 1
            forwarded[c].append(microbatch)
        elif action == "I":
            microbatch = forwarded[c].pop(rng.randrange(len(forwarded[c])))
            if case.are_split[c]:
                halved[c].append(microbatch)
        else:
            microbatch = halved[c].pop(0)
        order.append((action, c, microbatch))


@dataclass
class Rank:
    """The chunks of a rank, trained eagerly or by graphs."""

    case: Case
    device: torch.device
    modules: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.case.models:
            torch.manual_seed(5)
            self.modules.append(MODELS[name]().to(self.device))
            if self.case.main_grad:
                add_to_main_grads(self.modules[-1])

    def parameters(self) -> list[nn.Parameter]:
        return [p for m in self.modules for p in m.parameters() if p.requires_grad]

    def train(
        self,
        order: list[Action],
        calls: list[Callable[..., torch.Tensor]],
        run_weight: Callable[[int], None],
    ) -> list[torch.Tensor]:
        results, inputs, outputs = [], {}, {}
        for action, c, microbatch in order:
            key = (c, microbatch)
            if action == "F":
                x = torch.randn(2, 5, WIDTH, device=self.device)
                inputs[key] = x.requires_grad_(self.case.wants_input_grads[c])
                with self.casting():
                    outputs[key] = calls[c](inputs[key])
                results.append(outputs[key].detach().clone())
            elif action == "I":
                y = outputs.pop(key)
                y.backward(torch.sin(y.detach() * 3))
                x = inputs.pop(key)
                results += [x.grad.clone()] if x.grad is not None else []
            else:
                run_weight(c)
        return results

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        if not self.case.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def gradients(self) -> list[torch.Tensor | None]:
        if self.case.main_grad:
            return [p.main_grad for p in self.parameters()]  # type: ignore[attr-defined]
        return [p.grad for p in self.parameters()]

    def update(self) -> None:
        """Update the parameters and clear the gradients, or keep adding to them."""
        with torch.no_grad():
            for p, gradient in zip(self.parameters(), self.gradients(), strict=True):
                if gradient is not None:
                    p.sub_(gradient, alpha=1e-3)
                    if self.case.clears:
                        gradient.zero_()
        for module in self.modules:
            if self.case.clears and not self.case.main_grad:
                module.zero_grad()


def nothing(_chunk: int) -> None:
    """Do nothing in the weight half: an eager backward is whole."""


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_any_legal_order_has_the_bits_of_eager_training(
    new_backend: Callable[[], GraphBackend], case: Case
) -> None:
    backend = new_backend()
    eager, split = Rank(case, backend.device), Rank(case, backend.device)
    graphs = ChunkGraphs(
        [
            Chunk.from_module(m, f"rank 0 chunk {c}", program=SPLIT if is_split else None)
            for c, (m, is_split) in enumerate(zip(split.modules, case.are_split, strict=True))
        ],
        case.num_slots,
        backend=backend,
        options=CaptureOptions(
            shared_slots=case.shared_slots,
            verify=case.verify,  # type: ignore[arg-type]
        ),
    )
    weights = WeightBackwards(graphs)
    for number, count in enumerate((1, *case.counts)):
        order = random_order(case, count, random.Random(case.seed + number))
        torch.manual_seed(number)
        expected = eager.train(order, list(eager.modules), nothing)
        torch.manual_seed(number)
        with graphs.step(count):
            results = split.train(order, list(graphs.callables), weights.run)
        assert len(results) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        for mine, theirs in zip(split.gradients(), eager.gradients(), strict=True):
            if theirs is None:
                assert mine is None
            else:
                assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
        eager.update()
        split.update()
    assert graphs.counters.fallbacks.total() == 1
    assert graphs.counters.captures == sum(case.num_slots)
    num_split = sum(case.are_split)
    assert graphs.counters.weight_replays == num_split * sum(case.counts)
