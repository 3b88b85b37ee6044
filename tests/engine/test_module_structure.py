"""A module whose structure changed after the capture is refused by name, at any moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chunkgraph.engine import ChunkGraphs
from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.graphs import GraphBackend

WIDTH = 4


class Stack(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("shift", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) * self.scale


def captured(backend: GraphBackend, num_layers: int = 2) -> tuple[Stack, ChunkGraphs]:
    torch.manual_seed(1)
    module = Stack(num_layers).to(backend.device)
    graphs = ChunkGraphs([module], [2], backend=backend)
    graphs.capture([new_input(backend)])
    return module, graphs


def new_input(backend: GraphBackend) -> torch.Tensor:
    return torch.randn(3, WIDTH, device=backend.device, requires_grad=True)


def train(graphs: ChunkGraphs, backend: GraphBackend) -> None:
    with graphs.step(1):
        graphs.callables[0](new_input(backend)).sum().backward()


def new_layer(module: Stack) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH).to(module.scale.device)


def swap_layers(module: Stack) -> None:
    module.layers[0], module.layers[1] = module.layers[1], module.layers[0]


def transpose(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.t()


STRUCTURE: dict[str, tuple[Callable[[Stack], object], str]] = {
    "layer replaced": (
        lambda m: m.layers.__setitem__(1, new_layer(m)),
        r"layers\.1 was replaced by another module",
    ),
    "layer added": (lambda m: m.layers.append(new_layer(m)), r"layers\.2 was added"),
    "layer removed": (lambda m: m.layers.pop(1), r"layers\.1 was removed"),
    "layers swapped": (swap_layers, r"layers\.0 was replaced"),
    "layer None": (lambda m: setattr(m, "norm", None), r"norm was removed"),
    "buffer of another shape": (
        lambda m: setattr(m, "scale", m.scale.expand(WIDTH).clone()),
        r"scale was replaced by another tensor",
    ),
    "buffer None": (lambda m: setattr(m, "scale", None), r"scale was removed"),
    "buffer set": (
        lambda m: setattr(m, "shift", torch.ones_like(m.scale)),
        r"shift was replaced by another tensor",
    ),
    "buffer added": (lambda m: m.register_buffer("more", m.scale.clone()), r"more was added"),
    "parameter added": (
        lambda m: m.register_parameter("more", nn.Parameter(m.scale.clone())),
        r"more was added",
    ),
    "parameter None": (lambda m: setattr(m.layers[0], "bias", None), r"layers\.0\.bias was remov"),
    "transposed in place": (
        lambda m: transpose(m.layers[0].weight),
        r"layers\.0\.weight was moved .*or changed its layout",
    ),
}


@pytest.mark.parametrize(("change", "message"), STRUCTURE.values(), ids=STRUCTURE)
@pytest.mark.parametrize("when", ["before the step", "inside the step"])
def test_a_change_of_structure_is_refused_by_name(
    backend: GraphBackend, change: Callable[[Stack], object], message: str, when: str
) -> None:
    module, graphs = captured(backend)
    train(graphs, backend)
    replays = graphs.counters.replays
    if when == "before the step":
        change(module)

    def step() -> None:
        with graphs.step(1):
            graphs.callables[0](new_input(backend)).sum().backward()
            change(module)

    with pytest.raises(ReplayMismatchError, match=message):
        step()
    assert graphs.counters.replays == replays + (when == "inside the step")


def halved(module: Stack) -> Callable[[], object]:
    kept = [parameter.data for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5

    def undo() -> None:
        for parameter, data in zip(module.parameters(), kept, strict=True):
            parameter.data = data

    return undo


def frozen(module: Stack) -> Callable[[], object]:
    module.requires_grad_(False)
    return module.requires_grad_


def part_frozen(module: Stack) -> Callable[[], object]:
    module.layers[1].weight.requires_grad_(False)
    return module.layers[1].requires_grad_


def part_in_evaluation(module: Stack) -> Callable[[], object]:
    module.layers[1].eval()
    return module.layers[1].train


TEMPORARY: dict[str, tuple[Callable[[Stack], Callable[[], object]], str]] = {
    "other data": (halved, "was moved to other memory"),
    "frozen": (frozen, "is frozen now"),
    "part frozen": (part_frozen, r"layers\.1\.weight .* is frozen now"),
    "part in evaluation": (part_in_evaluation, r"layers\.1 of chunk 0 is called in eval\(\)"),
}


@pytest.mark.parametrize(("change", "message"), TEMPORARY.values(), ids=TEMPORARY)
def test_a_change_that_is_undone_before_the_step_ends_is_refused(
    backend: GraphBackend, change: Callable[[Stack], Callable[[], object]], message: str
) -> None:
    module, graphs = captured(backend)
    with pytest.raises(ReplayMismatchError, match=message):
        train_changed(graphs, backend, module, change)
    train(graphs, backend)


def train_changed(
    graphs: ChunkGraphs,
    backend: GraphBackend,
    module: Stack,
    change: Callable[[Stack], Callable[[], object]],
    num_microbatches: int = 1,
) -> None:
    """Run a step with a change between its microbatches; undo it at the end."""
    with graphs.step(1 + num_microbatches):
        graphs.callables[0](new_input(backend)).sum().backward()
        undo = change(module)
        try:
            for _ in range(num_microbatches):
                graphs.callables[0](new_input(backend)).sum().backward()
        finally:
            undo()


@pytest.mark.parametrize("change", [frozen, halved])
def test_of_a_large_module_a_change_of_all_is_seen_at_the_next_call(
    backend: GraphBackend, change: Callable[[Stack], Callable[[], object]]
) -> None:
    module, graphs = captured(backend, num_layers=20)
    with pytest.raises(ReplayMismatchError):
        train_changed(graphs, backend, module, change)


def middle_in_evaluation(module: Stack) -> Callable[[], object]:
    module.layers[7].eval()
    return module.layers[7].train


def test_of_a_large_module_every_layer_has_its_turn(backend: GraphBackend) -> None:
    module, graphs = captured(backend, num_layers=20)
    with pytest.raises(ReplayMismatchError, match=r"layers\.7"):
        train_changed(graphs, backend, module, middle_in_evaluation, num_microbatches=30)


def test_other_tensors_by_functional_call_are_refused(backend: GraphBackend) -> None:
    module, graphs = captured(backend)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return graphs.callables[0](x)

    caller = Caller()
    doubled = {name: p.detach() * 2 for name, p in caller.named_parameters()}
    with pytest.raises(ReplayMismatchError, match="was replaced by another"), graphs.step(1):
        torch.func.functional_call(caller, doubled, (new_input(backend),))


def test_hooks_for_saved_tensors_are_refused(backend: GraphBackend) -> None:
    _, graphs = captured(backend)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    mismatch = pytest.raises(ReplayMismatchError, match="inside saved_tensors_hooks")
    with mismatch, graphs.step(1), hooks:
        graphs.callables[0](new_input(backend))
    graphs.release()
    with pytest.raises(CaptureError, match="inside saved_tensors_hooks"), hooks:
        graphs.capture([new_input(backend)])


def test_hooks_that_give_back_what_they_get_are_none(backend: GraphBackend) -> None:
    _, graphs = captured(backend)
    with torch.autograd.graph.save_on_cpu(), graphs.step(1):
        graphs.callables[0](new_input(backend)).sum().backward()
    with graphs.step(1):
        checkpoint(graphs.callables[0], new_input(backend), use_reentrant=True).sum().backward()


@pytest.mark.parametrize("kind", ["an optimizer", "in place"])
def test_parameters_written_while_a_microbatch_is_in_flight_are_refused(
    backend: GraphBackend, kind: str
) -> None:
    module, graphs = captured(backend)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    message = "1 microbatches wait" if kind == "an optimizer" else "norm.weight was modified"

    def step() -> None:
        with graphs.step(1):
            y = graphs.callables[0](new_input(backend))
            if kind == "an optimizer":
                optimizer.step()
            else:
                module.norm.weight.detach().mul_(2)
            y.sum().backward()

    train(graphs, backend)
    with pytest.raises(ReplayMismatchError, match=message):
        step()
    optimizer.step()
    train(graphs, backend)


def test_an_optimizer_may_step_between_the_microbatches_of_a_step(backend: GraphBackend) -> None:
    def losses(*, replays: bool) -> list[torch.Tensor]:
        torch.manual_seed(2)
        module = Stack().to(backend.device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        graphs = ChunkGraphs([module], [1], backend=backend)
        if replays:
            graphs.capture([new_input(backend)])
        torch.manual_seed(3)
        values: list[torch.Tensor] = []
        with graphs.step(3):
            for _ in range(3):
                loss = graphs.callables[0](new_input(backend)).square().mean()
                loss.backward()
                values.append(loss.detach().clone())
                optimizer.step()
        assert graphs.counters.replays == 3 * replays
        return values

    assert all(map(torch.equal, losses(replays=False), losses(replays=True)))


def test_an_optimizer_of_other_parameters_may_step_at_any_time(backend: GraphBackend) -> None:
    _, graphs = captured(backend)
    other = nn.Linear(WIDTH, WIDTH).to(backend.device)
    with graphs.step(1):
        y = graphs.callables[0](new_input(backend))
        other(new_input(backend)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        y.sum().backward()


@pytest.mark.parametrize("is_whole", [True, False])
def test_modules_in_the_wrapper_of_torch_compile_are_equal_to_eager(
    backend: GraphBackend, *, is_whole: bool
) -> None:
    """It has no mode itself, but a property that asks its module."""
    wrapped = torch.compiler.disable  # the same wrapper, without a compiler

    def make() -> nn.Module:
        torch.manual_seed(1)
        first, second = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        if not is_whole:
            second = wrapped(second)
        both = nn.Sequential(first, second, nn.Dropout(0.5)).to(backend.device)
        return wrapped(both) if is_whole else both

    module, reference = make(), make()
    graphs = ChunkGraphs([module], [1], backend=backend)
    for seed in range(4):
        x = new_input(backend)
        torch.manual_seed(seed)
        with graphs.step(1):
            graphs.callables[0](x).sum().backward()
        torch.manual_seed(seed)
        reference(x.detach().requires_grad_()).sum().backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert graphs.counters.replays > 0
    part = module._orig_mod[1][1] if is_whole else module[1]
    part.eval()
    with pytest.raises(ReplayMismatchError, match=r"called in eval"), graphs.step(1):
        graphs.callables[0](new_input(backend)).sum().backward()
