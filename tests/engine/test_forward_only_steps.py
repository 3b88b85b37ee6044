"""Forward-only steps replay forward graphs of their own; the oracle is the same loop, eager."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from toys import add_to_main_grads

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend, RecorderBackend

WIDTH, ROWS = 8, 3
_MODES: dict[str, Callable[[], Any]] = {
    "t": nullcontext,  # a training step
    "e": torch.no_grad,  # log-probabilities of the training model, with dropout
    "v": torch.no_grad,  # validation, in evaluation mode
    "i": torch.inference_mode,
}


class Layers(nn.Module):
    """Two stages' worth of layers with dropout, and a buffer that forwards update."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.num_calls += 1
        return x + self.dropout(self.norm(self.first(x))) * scale


def loop(
    graphs: ChunkGraphs, steps: Iterable[tuple[str, int]], *, eager: bool
) -> list[torch.Tensor]:
    """Run steps of these kinds and counts; return losses, outputs and the state at the end."""
    modules: list[Any] = [chunk.module for chunk in graphs.chunks]
    parameters = [p for m in modules for p in m.parameters()]
    device = parameters[0].device
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    torch.manual_seed(2)
    results = []
    for kind, count in steps:
        is_training = kind == "t"
        for module in modules:
            module.train(kind != "v")
        with _MODES[kind](), graphs.step(count, forward_only=not is_training, eager=eager):
            outputs = []
            for _ in range(count):
                hidden = torch.randn(ROWS, WIDTH, device=device)
                for call in graphs.callables:
                    hidden = call(hidden)
                outputs.append(hidden)
                if is_training:
                    outputs[-1].square().mean().backward()
                else:
                    outputs[-1].div_(0.7)  # the caller owns what it gets
        results += [output.detach().clone() for output in outputs]
        if is_training:
            for p in parameters:
                p.grad = getattr(p, "main_grad", p.grad)
            optimizer.step()
            optimizer.zero_grad()
            for p in parameters:
                if hasattr(p, "main_grad"):
                    p.main_grad.zero_()
    return [*results, *(t.clone() for m in modules for t in m.state_dict().values())]


def new_graphs(backend: GraphBackend, *, main_grad: bool = False, **options: Any) -> ChunkGraphs:
    torch.manual_seed(1)
    modules = [Layers().to(backend.device) for _ in range(2)]
    if main_grad:
        for module in modules:
            add_to_main_grads(module)
    return ChunkGraphs(modules, 1, backend=backend, options=CaptureOptions(**options))


STEPS = [
    *[("e", 2), ("t", 2), ("e", 3), ("t", 3), ("v", 1), ("t", 1), ("i", 2), ("i", 4), ("v", 2)],
    *[("t", 2), ("t", 1), ("e", 1), ("v", 3), ("v", 1), ("t", 4)],
]


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("verify", ["none", "shadow", "poison"])
def test_steps_of_all_kinds_alternate(
    backend: GraphBackend, verify: str, *, main_grad: bool
) -> None:
    expected = loop(new_graphs(backend, main_grad=main_grad), STEPS, eager=True)
    graphs = new_graphs(backend, main_grad=main_grad, verify=verify)
    got = loop(graphs, STEPS, eager=False)
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))
    assert graphs.counters.fallbacks == {"forward only": 2, "capture warmup": 1}
    assert graphs.counters.replayed_steps == 5
    evaluated = graphs.forward_only.counters
    assert (evaluated.replayed_steps, evaluated.capture_sessions) == (7, 2)
    assert evaluated.replays == 2 * (3 + 2 + 4 + 2 + 1 + 3 + 1)
    assert graphs.forward_only.num_eager_calls == 0


@pytest.mark.parametrize("first", ["t", "e"])
def test_forwards_lie_in_a_pool_of_the_training_graphs(backend: GraphBackend, first: str) -> None:
    kinds = [("t", 1), ("t", 1), ("e", 1), ("e", 1), ("v", 1), ("v", 1)]
    graphs = new_graphs(backend)
    loop(graphs, kinds if first == "t" else kinds[2:] + kinds[:2], eager=False)
    training = {id(pool) for pool in graphs._captured.pools.pools}  # type: ignore[union-attr]
    kinds_of = graphs.forward_only._kinds.values()
    pools = [pool for engine in kinds_of for pool in engine._captured.pools.pools]  # type: ignore[union-attr]
    assert len(pools) == 2
    assert {id(pool) for pool in pools} <= training
    graphs.release()
    assert not graphs.forward_only._kinds


class Tabled(Layers):
    """Keeps a table from its second evaluation on, outside of modules."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self.kept, self.num_evaluations = [kept], 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.kept[0][-1] if self.kept[0] else torch.arange(WIDTH, device=x.device) * 0.1
        if not torch.is_grad_enabled():
            self.num_evaluations += 1
            if self.num_evaluations == 2 and not self.kept[0]:
                self.kept[0].append(table)
        return super().forward(x) + table


@pytest.mark.parametrize("can_sleep", [False, True])
def test_what_a_warmup_pass_leaves_outlives_training_steps(*, can_sleep: bool) -> None:
    """The pass runs in the slots' memory if that can sleep; training steps overwrite it."""
    steps = [(kind, 1) for kind in "ettetete"]
    results = []
    for eager in (True, False):
        torch.manual_seed(1)
        kept: list[torch.Tensor] = []
        backend = RecorderBackend(can_sleep=can_sleep)
        graphs = ChunkGraphs([Tabled(kept)], 1, backend=backend)
        results.append(loop(graphs, steps, eager=eager))
        assert len(kept) == 1
    assert all(map(torch.equal, *results))
    assert graphs.forward_only.counters.replayed_steps == 3


def evaluate(graphs: ChunkGraphs, *inputs: Any, **options: Any) -> list[torch.Tensor]:
    with torch.no_grad(), graphs.step(len(inputs), forward_only=True, **options):
        return [graphs.callables[0](x) for x in inputs]


def linear(**options: Any) -> tuple[nn.Module, ChunkGraphs]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    options = {"backend": RecorderBackend(), **options}
    return module, ChunkGraphs(Chunk.from_module(module, "it"), 1, **options)


def test_another_shape_is_eager_by_itself_and_warns_once() -> None:
    module, graphs = linear()
    whole, part = torch.randn(3, 4), torch.randn(2, 4)
    evaluate(graphs, whole)
    with pytest.warns(UserWarning, match=r"ran eagerly: it was called.*\n.*captured \(3, 4\)"):
        results = evaluate(graphs, whole, part, part, whole)
    with torch.no_grad():
        assert all(map(torch.equal, results, map(module, (whole, part, part, whole))))
    assert (graphs.forward_only.num_eager_calls, graphs.forward_only.counters.replays) == (2, 2)


def test_shape_keys_have_graphs_of_their_own() -> None:
    module, graphs = linear()
    for number in range(4):
        x = torch.randn(3 + number % 2, 4)
        (result,) = evaluate(graphs, x, shape_key=number % 2)
        assert torch.equal(result, module(x))
    counters = graphs.forward_only.counters
    assert (counters.capture_sessions, counters.replays) == (2, 2)


def test_shapes_that_never_come_again_are_not_captured() -> None:
    _, graphs = linear()
    for rows in range(1, 17):
        evaluate(graphs, torch.randn(rows, 4), shape_key=rows)
    with pytest.warns(UserWarning, match="more than 16 shapes"):
        evaluate(graphs, torch.randn(17, 4), shape_key=17)
    for rows in (18, 19):
        evaluate(graphs, torch.randn(rows, 4), shape_key=rows)
    assert graphs.counters.fallbacks == {"forward only": 19}
    assert len(graphs.forward_only._kinds) == 16


def test_steps_begin_in_inference_mode() -> None:
    model = nn.Linear(4, 4)
    graphs = ChunkGraphs(model, 1, backend=RecorderBackend())
    x = torch.ones(2, 4)
    for _ in range(3):
        with torch.inference_mode(), graphs.step(1, forward_only=True):
            assert torch.equal(graphs.callables[0](x), model(x))
    assert graphs.forward_only.counters.replays == 2


def test_calls_with_gradients_are_eager() -> None:
    module, graphs = linear()
    x = torch.randn(3, 4)
    evaluate(graphs, x)
    evaluate(graphs, x)
    with graphs.step(1, forward_only=True):
        graphs.callables[0](x).sum().backward()
    expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True))
    assert graphs.forward_only.counters.replays == 1


def test_gradient_memory_may_be_gone() -> None:
    module, graphs = linear()
    add_to_main_grads(module)
    for parameter in module.parameters():
        parameter.main_grad.untyped_storage().resize_(0)
    x = torch.randn(3, 4)
    evaluate(graphs, x)
    (result,) = evaluate(graphs, x)
    assert torch.equal(result, module(x))
    assert graphs.forward_only.counters.replays == 1


def test_a_changed_model_is_eager_by_name() -> None:
    module, graphs = linear()
    x = torch.randn(3, 4)
    for _ in range(2):
        evaluate(graphs, x)
    captured = module[0].weight.data
    module[0].weight.data = captured * 2
    (result,) = evaluate(graphs, x)
    assert torch.equal(result, module(x))
    module[0].weight.data = captured
    (result,) = evaluate(graphs, x)
    assert torch.equal(result, module(x))
    assert graphs.counters.fallbacks == {"forward only": 1, "model changed": 1}
    assert graphs.forward_only.counters.replays == 2


class Reading(nn.Linear):
    """A layer that reads a value on the host, but only in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if self.training else float(x.sum()))


def test_what_no_graph_can_hold_warns_and_stays_eager() -> None:
    module = Reading(4, 4).eval()
    graphs = ChunkGraphs(Chunk.from_module(module, "it"), 1, backend=RecorderBackend())
    x = torch.randn(3, 4)
    evaluate(graphs, x)
    with pytest.warns(UserWarning, match="continues eagerly"):
        (result,) = evaluate(graphs, x)
    assert torch.equal(result, module(x))
    evaluate(graphs, x)
    assert graphs.counters.fallbacks == {"forward only": 1, "capture failed": 2}
    module.train()
    for _ in range(2):
        with graphs.step(1):
            graphs.callables[0](x).sum().backward()
    assert graphs.counters.replays == 1


def test_a_function_with_parameters_stays_eager() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    chunk = Chunk(lambda x: x @ weight, (weight,), "it")
    graphs = ChunkGraphs(chunk, 1, backend=RecorderBackend())
    for _ in range(3):
        evaluate(graphs, torch.randn(3, 4))
    assert graphs.counters.fallbacks == {"forward only": 3}


class Offloading:
    """Frees the memory of parameters and gradients between passes, as frameworks do."""

    def __init__(self, graphs: ChunkGraphs, *, by_storage: bool) -> None:
        self.parameters = [p for c in graphs.chunks for p in c.module.parameters()]  # type: ignore[union-attr]
        self.by_storage = by_storage
        self._occupied: list[torch.Tensor] = []

    def move(self) -> None:
        tensors = [t for p in self.parameters for t in (p, getattr(p, "main_grad", None))]
        for tensor in (t for t in tensors if t is not None):
            kept = tensor.detach().clone()
            if not self.by_storage:
                self._occupied.append(tensor.detach())
                tensor.data = kept
                continue
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            self._occupied.append(torch.empty(size, dtype=torch.uint8, device=tensor.device))
            storage.resize_(size)
            tensor.data.copy_(kept)


@pytest.mark.parametrize("by_storage", [False, True])
def test_moved_memory_is_captured_again_at_once(backend: GraphBackend, by_storage: bool) -> None:
    cycles = [[("e", 2), ("t", 2), ("t", 1)], [("e", 1), ("t", 3)], [("t", 1), ("e", 2), ("v", 1)]]

    def run(graphs: ChunkGraphs, *, eager: bool) -> list[torch.Tensor]:
        offloading, results = Offloading(graphs, by_storage=by_storage), []
        for steps in [*cycles, *cycles]:
            results += loop(graphs, steps, eager=eager)
            offloading.move()
        return results

    expected = run(new_graphs(backend), eager=True)
    graphs = new_graphs(backend, on_moved_memory="recapture")
    got = run(graphs, eager=False)
    assert all(map(torch.equal, got, expected))
    assert graphs.counters.fallbacks == {"forward only": 2, "capture warmup": 1}
    assert len(graphs.counters.recaptures) == graphs.counters.capture_sessions - 1 == 5
    assert len(graphs.forward_only.counters.recaptures) == 4  # the first capture comes later


def test_other_changes_keep_their_error(backend: GraphBackend) -> None:
    graphs = new_graphs(backend, on_moved_memory="recapture")
    loop(graphs, [("t", 1), ("t", 1)], eager=False)
    graphs.chunks[0].module.dropout.p = 0.1  # type: ignore[union-attr]
    with pytest.raises(ReplayMismatchError, match=r"0\.3 at the capt"):
        loop(graphs, [("t", 1)], eager=False)


def test_dropped_graphs_are_captured_again_without_warmup(backend: GraphBackend) -> None:
    steps = [("e", 1), ("t", 2), ("t", 1), ("e", 2)]
    expected = loop(new_graphs(backend), steps + steps, eager=True)
    graphs = new_graphs(backend)
    torch.manual_seed(1)

    def dropping(kind: str, count: int) -> tuple[str, int]:
        if (kind, count) == ("t", 1):
            graphs.drop()
        return kind, count

    got = loop(graphs, (dropping(*step) for step in steps + steps), eager=False)
    assert all(map(torch.equal, got, expected))
    assert graphs.counters.fallbacks == {"forward only": 1, "capture warmup": 1}
    assert len(graphs.counters.recaptures) == 1


@pytest.mark.parametrize("moves", [False, True])
def test_graphs_of_all_kinds_sleep_between_all_steps(moves: bool) -> None:
    """They share a pool; if memory moves meanwhile, inputs for the next capture survive."""
    backend = RecorderBackend(can_sleep=True)
    expected = loop(new_graphs(backend), STEPS, eager=True)
    graphs = new_graphs(backend, on_moved_memory="recapture" if moves else "refuse")
    offloading = Offloading(graphs, by_storage=False)

    def napping() -> Iterable[tuple[str, int]]:
        for number, step in enumerate(STEPS):
            graphs.sleep()
            graphs.wake()
            if moves and number % 3 == 2:
                offloading.move()
            yield step

    got = loop(graphs, napping(), eager=False)
    assert all(map(torch.equal, got, expected))
    assert graphs.counters.fallbacks == {"forward only": 2, "capture warmup": 1}
    assert bool(graphs.counters.recaptures) is moves
    graphs.sleep()
    graphs.drop()  # as its process groups end; unless inputs were kept, warmup begins again
    graphs.forward_only.drop()
    assert not graphs.is_asleep
    assert graphs.report is None
    loop(graphs, [("t", 1)], eager=False)
    assert graphs.counters.fallbacks["released"] == int(not moves)
