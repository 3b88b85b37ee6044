"""Callers change a captured module's tensors between captures and steps, as in eager training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from quantized_weight import Quantized, QuantizedWeight
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import all_equal, capture, train

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.graphs import GraphBackend

WIDTH = 8


class Loop:
    """A training loop over modules, eager or with chunk graphs.

    Args:
        modules: called one after the other.
        backend: backend of the graphs; None: eager.
    """

    def __init__(self, modules: Sequence[nn.Module], backend: GraphBackend | None) -> None:
        self.modules = list(modules)
        self.graphs: ChunkGraphs | None = None
        self.calls: Sequence[Callable[..., Any]] = self.modules
        if backend is not None:
            self.graphs = ChunkGraphs(self.modules, 2, backend=backend)
            self.calls = self.graphs.callables

    def step(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.graphs is None else self.graphs.step(2)

    def train(self, device: torch.device) -> list[torch.Tensor]:
        """Run one step of two microbatches with plain SGD; return its results."""
        results: list[torch.Tensor] = []
        with self.step():
            for _ in range(2):
                inputs = [torch.randn(3, WIDTH, device=device, requires_grad=True)]
                outputs: list[torch.Tensor] = []
                for call in self.calls:  # as stages of a pipeline, with a backward each
                    outputs.append(call(inputs[-1]))
                    inputs.append(outputs[-1].detach().clone().requires_grad_())
                inputs[-1].square().mean().backward()
                for x, y in reversed(list(zip(inputs[1:], outputs, strict=True))):
                    y.backward(x.grad)
                results += [x.detach().clone() for x in outputs]
                results += [x.grad for x in inputs if x.grad is not None]
        for parameter in (p for m in self.modules for p in m.parameters()):
            if parameter.grad is not None:
                results.append(parameter.grad.clone())
                parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
            results.append(parameter.detach().clone())
        return results


def train_both(backend: GraphBackend, make: Callable[[], list[nn.Module]]) -> None:
    """Run three steps of newly made modules, eagerly and with graphs, from one random state."""
    results = []
    for graphs in (None, backend):
        torch.manual_seed(5)
        loop = Loop([module.to(backend.device) for module in make()], graphs)
        results.append([t for _ in range(3) for t in loop.train(backend.device)])
    assert all_equal(*results)


def rows(backend: GraphBackend) -> torch.Tensor:
    return torch.randn(3, WIDTH, device=backend.device)


def layers(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)


def test_explicit_parameters_that_are_frozen_get_no_gradient(backend: GraphBackend) -> None:
    module = layers(backend.device)
    chunk = Chunk(module, tuple(module.parameters()), "stage", module)
    module[0].requires_grad_(False)
    train(capture(chunk, rows(backend), backend=backend), rows(backend))
    assert module[0].weight.grad is None
    assert module[2].weight.grad is not None


def test_explicit_parameters_that_miss_a_thawed_one_are_refused_by_name(
    backend: GraphBackend,
) -> None:
    module = layers(backend.device)
    module[0].bias.requires_grad_(False)
    trained = tuple(p for p in module.parameters() if p.requires_grad)
    graphs = ChunkGraphs([Chunk(module, trained, "stage", module, "body")], [1], backend=backend)
    module[0].bias.requires_grad_()
    with pytest.raises(CaptureError, match=r"stage: .*body\.0\.bias: \(8,\).*Chunk\.parameters"):
        graphs.capture([rows(backend)])


def test_parameters_frozen_after_they_were_promised_are_refused(backend: GraphBackend) -> None:
    class Marker:
        def accumulated(self, index: int) -> None: ...

        def replayed(self) -> None: ...

    module = layers(backend.device)
    chunk = Chunk(module, tuple(module.parameters()), "stage", module, new_marker=Marker)
    graphs = ChunkGraphs([chunk], [1], backend=backend)
    module[0].bias.requires_grad_(False)
    with pytest.raises(CaptureError, match=r"1 parameters \(0\.bias\) were frozen after"):
        graphs.capture([rows(backend)])


def test_a_parameter_without_a_shape_is_refused_by_name(backend: GraphBackend) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH))
    with pytest.raises(CaptureError, match=r"1\.weight has no shape yet"):
        capture(module, rows(backend), backend=backend)


def test_one_module_may_be_two_chunks(backend: GraphBackend) -> None:
    train_both(backend, lambda: [layers(backend.device)] * 2)


class Kept(nn.Module):
    """Uses its own parameter through another reference."""

    def __init__(
        self, kept: Callable[[Any], Any], weight_of: Callable[[Any], torch.Tensor]
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.kept, self.weight_of = kept(self.weight), weight_of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(h: torch.Tensor) -> torch.Tensor:
            return (h @ self.weight_of(self.kept)).tanh()

        return self.linear(checkpoint(inner, x, use_reentrant=True, preserve_rng_state=False))


@pytest.mark.parametrize(
    "way",
    [
        (lambda w: [w], lambda kept: kept[0]),
        (lambda w: (1, (w, 2)), lambda kept: kept[1][0]),
        (lambda w: {"w": [w]}, lambda kept: kept["w"][0]),
    ],
    ids=["list", "tuple", "dict"],
)
def test_parameters_in_containers_train(backend: GraphBackend, way: Any) -> None:
    def make() -> list[nn.Module]:
        modules.append(Kept(*way))
        return modules[-1:]

    modules: list[Kept] = []
    train_both(backend, make)
    assert all(m.weight_of(m.kept) is m.weight for m in modules)


def test_swapped_parameters_are_noticed_and_trained_after_a_release(backend: GraphBackend) -> None:
    results = []
    for of_graphs in (None, backend):
        torch.manual_seed(0)
        module = nn.Linear(WIDTH, WIDTH).to(backend.device)
        loop = Loop([module], of_graphs)
        torch.manual_seed(1)
        results.append([t for _ in range(2) for t in loop.train(backend.device)])
        if loop.graphs is not None:
            other = nn.Linear(WIDTH, WIDTH).to(backend.device)
            torch.utils.swap_tensors(module.weight, other.weight)
            with (
                pytest.raises(ReplayMismatchError, match="weight was moved to other memory"),
                loop.step(),
            ):
                pass
            torch.utils.swap_tensors(module.weight, other.weight)
            loop.graphs.release()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            module.double().float()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        torch.manual_seed(2)
        results[-1] += [t for _ in range(3) for t in loop.train(backend.device)]
    assert all_equal(*results)
    assert loop.graphs is not None
    assert loop.graphs.counters.capture_sessions == 2


# Parameters that have no memory themselves but hold tensors, as FP8 weights do.


def _train(forward: Any, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run microbatches two at a time; return the gradients of the inputs."""
    gradients = []
    for first in range(0, len(xs), 2):
        leaves = [x.clone().requires_grad_() for x in xs[first : first + 2]]
        for leaf, y in [(leaf, forward(leaf)) for leaf in leaves]:
            y.square().sum().backward()
            assert leaf.grad is not None
            gradients.append(leaf.grad)
    return gradients


def _values(model: Quantized) -> list[torch.Tensor]:
    return [
        p.dequantize() if isinstance(p, QuantizedWeight) else p.detach().clone()
        for p in model.parameters()
    ]


@pytest.mark.parametrize("verify", ["none", "poison", "shadow"])
def test_weights_that_are_written_in_place_are_equal_to_eager(
    backend: GraphBackend, verify: Any
) -> None:
    model, eager = (Quantized(backend.device) for _ in range(2))
    options = CaptureOptions(verify=verify, num_warmup_steps=1)
    graphs = ChunkGraphs([model], [2], backend=backend, options=options)
    for num_microbatches in (3, 2, 5, 1):
        xs = [torch.randn(4, model.width, device=backend.device) for _ in range(num_microbatches)]
        with graphs.step(num_microbatches):
            gradients = _train(graphs.callables[0], xs)
        assert all(map(torch.equal, gradients, _train(eager, xs)))
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        model.update()
        eager.update()
        assert all(map(torch.equal, _values(model), _values(eager)))
    assert graphs.counters.replays == 8
