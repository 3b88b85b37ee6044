"""Callers change a captured module's tensors between captures and steps, as in eager training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import GraphBackend

WIDTH = 8


class Loop:
    """A training loop over modules, eager or with chunk graphs.

    Args:
        modules: called one after the other.
        backend: backend of the graphs; None: eager.
    """

    def __init__(
        self, modules: Sequence[nn.Module], backend: GraphBackend | None, **options: Any
    ) -> None:
        self.modules = list(modules)
        self.graphs: ChunkGraphs | None = None
        self.calls: Sequence[Callable[..., Any]] = self.modules
        if backend is not None:
            self.graphs = ChunkGraphs(
                self.modules,
                [2] * len(self.modules),
                backend=backend,
                options=CaptureOptions(**options),
            )
            self.calls = self.graphs.callables

    @contextmanager
    def step(self) -> Iterator[None]:
        if self.graphs is None:
            yield
            return
        with self.graphs.step(2):
            yield

    def train(self, device: torch.device, *, forgets: bool = True) -> list[torch.Tensor]:
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
            if forgets:
                parameter.grad = None
            results.append(parameter.detach().clone())
        return results

    def capture_again(self) -> None:
        if self.graphs is not None:
            self.graphs.release()


def same(eager: Sequence[torch.Tensor], graphs: Sequence[torch.Tensor]) -> bool:
    return len(eager) == len(graphs) and all(map(torch.equal, eager, graphs))


def both(
    backend: GraphBackend, program: Callable[[GraphBackend | None], list[torch.Tensor]]
) -> None:
    """Run a program eagerly and with graphs, from one random state."""
    torch.manual_seed(5)
    eager = program(None)
    torch.manual_seed(5)
    assert same(eager, program(backend))


def layers(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)


def replace_layer(module: nn.Sequential) -> None:
    module[0] = nn.Linear(WIDTH, WIDTH).to(module[2].weight.device)


def replace_parameter(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.randn_like(module[0].weight))


def replace_buffer(module: nn.Sequential) -> None:
    module.register_buffer("scale", torch.ones(3, device=module[0].weight.device))


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "frozen": lambda m: m[0].requires_grad_(False),
    "one frozen": lambda m: m[0].weight.requires_grad_(False),
    "thawed": lambda m: m[2].bias.requires_grad_(),
    "parameter replaced": replace_parameter,
    "layer replaced": replace_layer,
    "layer added": lambda m: m.append(nn.Linear(WIDTH, WIDTH).to(m[0].weight.device)),
    "layer removed": lambda m: m.pop(-1),
    "buffer added": replace_buffer,
    "in other memory": lambda m: setattr(m[0].weight, "data", m[0].weight.data.clone()),
    "evaluation of a part": lambda m: m[1].eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("when", ["before the capture", "after the capture"])
def test_a_changed_model_is_captured_as_it_is(
    backend: GraphBackend, change: Callable[[nn.Sequential], object], when: str
) -> None:
    def program(graphs: GraphBackend | None) -> list[torch.Tensor]:
        module = layers(backend.device)
        module[2].bias.requires_grad_(False)
        loop = Loop([module], graphs)
        results: list[torch.Tensor] = []
        if when == "after the capture":
            results += loop.train(backend.device) + loop.train(backend.device)
        change(module)
        if when == "after the capture":
            loop.capture_again()
        for _ in range(3):
            results += loop.train(backend.device)
        return results

    both(backend, program)


def test_explicit_parameters_that_are_frozen_get_no_gradient(backend: GraphBackend) -> None:
    module = layers(backend.device)
    chunk = Chunk(module, tuple(module.parameters()), "stage", module)
    module[0].requires_grad_(False)
    graphs = ChunkGraphs([chunk], [1], backend=backend)
    graphs.capture([torch.randn(3, WIDTH, device=backend.device)])
    with graphs.step(1):
        graphs.callables[0](torch.randn(3, WIDTH, device=backend.device)).sum().backward()
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
        graphs.capture([torch.randn(3, WIDTH, device=backend.device)])


def test_parameters_frozen_after_they_were_promised_are_refused(backend: GraphBackend) -> None:
    class Marker:
        def accumulated(self, index: int) -> None: ...

        def replayed(self) -> None: ...

    module = layers(backend.device)
    chunk = Chunk(module, tuple(module.parameters()), "stage", module, new_marker=Marker)
    graphs = ChunkGraphs([chunk], [1], backend=backend)
    module[0].bias.requires_grad_(False)
    with pytest.raises(CaptureError, match=r"1 parameters \(0\.bias\) were frozen after"):
        graphs.capture([torch.randn(3, WIDTH, device=backend.device)])


def test_a_parameter_without_a_shape_is_refused_by_name(backend: GraphBackend) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH)).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    with pytest.raises(CaptureError, match=r"1\.weight has no shape yet"):
        graphs.capture([torch.randn(3, WIDTH, device=backend.device)])


class Shared(nn.Module):
    """Calls a layer that it holds in one of several ways."""

    def __init__(self, layer: nn.Module, way: str) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.layer: Any = layer if way == "registered" else None
        self.kept: Any = {
            "registered": None,
            "list": [layer],
            "dict": {"layers": ({"first": layer},)},
            "object": Holder(layer),
        }[way]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer is not None:
            layer = self.layer
        elif isinstance(self.kept, dict):
            layer = self.kept["layers"][0]["first"]
        else:
            layer = self.kept[0] if isinstance(self.kept, list) else self.kept.layer
        return self.own(layer(x).tanh())


class Holder:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


@pytest.mark.parametrize("way", ["registered", "list", "dict", "object"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_chunks_may_share_a_layer(backend: GraphBackend, way: str, recomputes: bool) -> None:
    def program(graphs: GraphBackend | None) -> list[torch.Tensor]:
        layer = nn.Linear(WIDTH, WIDTH)
        first: nn.Module = nn.Sequential(layer, nn.Tanh())
        second: nn.Module = Shared(layer, way)
        second.register_module("tied", layer)
        if recomputes:
            first, second = Recomputed(first), Recomputed(second)
        loop = Loop([first.to(backend.device), second.to(backend.device)], graphs)
        return [t for _ in range(3) for t in loop.train(backend.device)]

    both(backend, program)


class Recomputed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.module, x, use_reentrant=True, preserve_rng_state=False)


def test_one_module_may_be_two_chunks(backend: GraphBackend) -> None:
    def program(graphs: GraphBackend | None) -> list[torch.Tensor]:
        module = layers(backend.device)
        loop = Loop([module, module], graphs)
        return [t for _ in range(3) for t in loop.train(backend.device)]

    both(backend, program)


class Kept(nn.Module):
    """Uses its own parameter through another reference."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.kept: Any = {
            "list": [self.weight],
            "tuple": (1, (self.weight, 2)),
            "dict": {"w": [self.weight]},
        }[way]

    def weights(self) -> torch.Tensor:
        if isinstance(self.kept, dict):
            return self.kept["w"][0]
        return self.kept[0] if isinstance(self.kept, list) else self.kept[1][0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(h: torch.Tensor) -> torch.Tensor:
            return (h @ self.weights()).tanh()

        return self.linear(checkpoint(inner, x, use_reentrant=True, preserve_rng_state=False))


@pytest.mark.parametrize("way", ["list", "tuple", "dict"])
def test_parameters_in_containers_train(backend: GraphBackend, way: str) -> None:
    def program(graphs: GraphBackend | None) -> list[torch.Tensor]:
        module = Kept(way)
        weight = module.weight
        module = module.to(backend.device)
        assert module.weight is weight
        loop = Loop([module], graphs)
        results = [t for _ in range(3) for t in loop.train(backend.device)]
        assert module.weights() is weight
        return results

    both(backend, program)
