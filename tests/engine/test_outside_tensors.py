"""Values that a forward reads besides its arguments and parameters, and that callers replace."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.graphs import GraphBackend

WIDTH = 4


class Reader(nn.Module):
    """A module that reads tensors and settings from many places."""

    def __init__(self, elsewhere: dict[str, torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, device=device)
        self.softplus = nn.Softplus()
        self.temperature = 1.0
        self.is_scaled = True
        self.function: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.mask = torch.ones(WIDTH, device=device)
        self.masks = [torch.ones(WIDTH, device=device), torch.ones(WIDTH, device=device)]
        self.pair = (torch.ones(WIDTH, device=device), 1.0)
        self.config = SimpleNamespace(bias=torch.ones(WIDTH, device=device))
        self.unread = torch.ones(WIDTH, device=device)
        self.elsewhere = [partial(elsewhere.__getitem__, "bias")]  # its code is not Python's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.softplus(self.layer(x)) * self.mask * self.masks[0] * self.masks[1]
        x = x * self.pair[0] + self.config.bias + self.elsewhere[0]()
        return self.function(x * self.temperature if self.is_scaled else x)


def rows(device: torch.device) -> torch.Tensor:
    return torch.randn(2, WIDTH, device=device)


class Program:
    """A captured `Reader`."""

    def __init__(self, backend: GraphBackend, num_warmup_passes: int) -> None:
        device = backend.device
        self.device = device
        self.elsewhere = {"bias": torch.ones(WIDTH, device=device)}
        self.module = Reader(self.elsewhere, device)
        options = CaptureOptions(num_warmup_passes=num_warmup_passes)
        self.graphs = ChunkGraphs([self.module], [1], backend=backend, options=options)
        self.step()
        self.step()
        assert self.graphs.counters.replays

    def step(self) -> None:
        """Compare one step with eager training."""
        x = rows(self.device)
        with self.graphs.step(1):
            result = self.graphs.callables[0](x)
            result.sum().backward()
        assert torch.equal(result, self.module(x))


def new(value: torch.Tensor) -> torch.Tensor:
    return torch.full_like(value, 3.0)


TENSORS: dict[str, tuple[Callable[[Program], Any], str]] = {
    "attribute": (lambda p: setattr(p.module, "mask", new(p.module.mask)), "mask"),
    "list": (lambda p: p.module.masks.__setitem__(1, new(p.module.mask)), r"masks\[1\]"),
    "shorter list": (lambda p: p.module.masks.pop(), r"masks\[1\]"),
    "tuple": (lambda p: setattr(p.module, "pair", (new(p.module.mask), 1.0)), "pair"),
    "whole list": (lambda p: setattr(p.module, "masks", [new(t) for t in p.module.masks]), "masks"),
    "object": (lambda p: setattr(p.module.config, "bias", new(p.module.mask)), r"config\.bias"),
    "closure": (
        lambda p: p.elsewhere.update(bias=new(p.module.mask)),
        "1 tensors outside of the module",
    ),
}


@pytest.mark.parametrize("num_warmup_passes", [0, 2])
@pytest.mark.parametrize(("change", "name"), TENSORS.values(), ids=TENSORS)
def test_a_tensor_that_the_forward_reads_is_not_replaced(
    backend: GraphBackend, change: Callable[[Program], Any], name: str, num_warmup_passes: int
) -> None:
    program = Program(backend, num_warmup_passes)
    change(program)
    with pytest.raises(ReplayMismatchError, match=f"{name} was replaced or dropped after capture"):
        program.step()


def test_a_tensor_that_two_chunks_read_is_not_replaced(backend: GraphBackend) -> None:
    elsewhere = {"bias": torch.ones(WIDTH, device=backend.device)}
    modules = [Reader(elsewhere, backend.device) for _ in range(2)]
    graphs = ChunkGraphs(modules, [1, 1], backend=backend)
    graphs.capture([rows(backend.device), rows(backend.device)])
    elsewhere["bias"] = new(elsewhere["bias"])
    with (
        pytest.raises(ReplayMismatchError, match="1 tensors outside of the module"),
        graphs.step(1),
    ):
        graphs.callables[0](rows(backend.device))


@pytest.mark.parametrize("verify", ["none", "poison"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_collected_cycles_of_a_session_are_no_owners(
    backend: GraphBackend, kind: Callable[..., nn.Module], verify: str
) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def deeper(depth: int) -> torch.Tensor:  # refers to itself and to x
                return deeper(depth - 1) if depth else x

            return self.layer(deeper(2))[0]

    module = Recurrent().to(backend.device)
    options = CaptureOptions(verify=verify)  # type: ignore[arg-type]
    graphs = ChunkGraphs([module], [1], backend=backend, options=options)
    for _ in range(3):
        with graphs.step(1):
            graphs.callables[0](rows(backend.device)).sum().backward()
        gc.collect()
    assert graphs.counters.replays == 2


def test_sizes_that_a_forward_stores_may_differ_in_evaluation(backend: GraphBackend) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.num_rows = nn.Linear(WIDTH, WIDTH), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_rows = x.shape[0]
            return self.layer(x)

    module = Sized().to(backend.device)
    graphs = ChunkGraphs([module], [2], backend=backend)
    for _ in range(3):
        with graphs.step(1):
            graphs.callables[0](rows(backend.device)).sum().backward()
        with torch.no_grad():
            module(torch.ones(5, WIDTH, device=backend.device))
    assert graphs.counters.replays == 2


def test_tensors_that_the_forward_reads_may_change_in_place(backend: GraphBackend) -> None:
    program = Program(backend, 0)
    module = program.module
    for tensor in (module.mask, *module.masks, module.pair[0], program.elsewhere["bias"]):
        tensor.mul_(2)
        program.step()


def test_a_tensor_that_the_forward_does_not_read_may_be_replaced(backend: GraphBackend) -> None:
    program = Program(backend, 0)
    program.module.unread = new(program.module.unread)
    program.module.masks.append(new(program.module.unread))
    program.step()


def test_released_graphs_hold_no_tensor_of_the_module(backend: GraphBackend) -> None:
    program = Program(backend, 0)
    program.graphs.release()
    program.module.mask = new(program.module.mask)
    program.step()
    program.step()


SETTINGS: dict[str, tuple[Callable[[Reader], Any], str]] = {
    "number": (lambda m: setattr(m, "temperature", 2.0), r"temperature \(captured 1.0, now 2.0\)"),
    "flag": (lambda m: setattr(m, "is_scaled", False), r"is_scaled \(captured True, now False\)"),
    "function": (lambda m: setattr(m, "function", torch.sin), r"function \(captured <built-in"),
    "deleted": (lambda m: delattr(m, "temperature"), r"temperature \(captured 1.0, now 'nothing'"),
    "layer of torch": (lambda m: setattr(m.softplus, "beta", 2.0), r"softplus\.beta \(captured"),
    "class": (lambda m: setattr(m.softplus, "__class__", nn.Tanh), r"softplus \(captured Softplus"),
    "forward": (lambda m: setattr(m.softplus, "forward", torch.relu), r"softplus\.forward \(capt"),
}


@pytest.mark.parametrize(("change", "message"), SETTINGS.values(), ids=SETTINGS)
def test_a_changed_setting_of_a_layer_is_refused(
    backend: GraphBackend, change: Callable[[Reader], Any], message: str
) -> None:
    program = Program(backend, 0)
    change(program.module)
    with pytest.raises(ReplayMismatchError, match=message), program.graphs.step(1):
        program.graphs.callables[0](rows(program.device))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m[0], "scale", 3.0), r"0\.scale \(captured with the value of its class"),
        (lambda m: setattr(type(m[0]), "scale", 3.0), r"Scaled\.scale \(captured 2.0, now 3.0\)"),
        (lambda m: delattr(type(m[0]), "shift"), r"Scaled\.shift \(captured 0, now nothing\)"),
    ],
)
def test_a_changed_setting_of_a_layers_class_is_refused(
    backend: GraphBackend, change: Callable[[Any], Any], message: str
) -> None:
    class Scaled(nn.Linear):
        scale, shift, num_rows = 2.0, 0, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_rows = x.shape[0]
            return super().forward(x) * self.scale + self.shift

    module = nn.Sequential(Scaled(WIDTH, WIDTH)).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    for _ in range(3):
        with graphs.step(1):
            graphs.callables[0](rows(backend.device)).sum().backward()
    assert graphs.counters.replays == 2
    change(module)
    with pytest.raises(ReplayMismatchError, match=message), graphs.step(1):
        graphs.callables[0](rows(backend.device))


class Counter(nn.Module):
    """Count calls in memory outside of the module, and read the count."""

    def __init__(self, counts: list[torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.counts = [lambda: counts]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = self.counts[0]()
        counts[0][1:].add_(1)
        with torch.no_grad():
            counts[1].mul_(0.5).add_(x.mean(0))
        return self.layer(x) * counts[0][1] + counts[1]


@pytest.mark.parametrize("options", [{}, {"num_warmup_passes": 2}, {"verify": "shadow"}])
def test_tensors_elsewhere_that_the_forward_writes_are_as_in_eager(
    backend: GraphBackend, options: dict[str, Any]
) -> None:
    results = []
    for is_eager in (True, False):
        torch.manual_seed(3)
        device = backend.device
        counts = [torch.zeros(2, device=device), torch.zeros(WIDTH, device=device)]
        module = Counter(counts).to(device)
        graphs = ChunkGraphs([module], [1], backend=backend, options=CaptureOptions(**options))
        outputs = []
        for _ in range(4):
            with graphs.step(1, eager=is_eager):
                outputs.append(graphs.callables[0](rows(device)))
                outputs[-1].sum().backward()
        assert bool(graphs.counters.replays) is not is_eager
        results.append([*outputs, *counts])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_refused_step_writes_no_tensor_elsewhere(backend: GraphBackend) -> None:
    device = backend.device
    counts = [torch.zeros(2, device=device), torch.zeros(WIDTH, device=device)]
    module = nn.Sequential(Counter(counts), nn.Softplus()).to(device)
    options = CaptureOptions()
    graphs = ChunkGraphs([module], [1], backend=backend, options=options)
    for _ in range(2):
        with graphs.step(1):
            graphs.callables[0](rows(device)).sum().backward()
    before = [t.clone() for t in counts]
    module[1].beta = 2.0
    with pytest.raises(ReplayMismatchError, match="beta"), graphs.step(1):
        graphs.callables[0](rows(device))
    assert all(torch.equal(a, b) for a, b in zip(before, counts, strict=True))


class Drop(nn.Module):
    """Drop a layer by a number that Python or NumPy draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.draw() < 0.5 else x * 2


class DropByGenerator(Drop):
    """Drop a layer by a number of the module's generator."""

    def __init__(self, generator: Any) -> None:
        super().__init__(lambda: 0.0)
        self.generator = generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.generator.random() < 0.5 else x * 2


@pytest.mark.parametrize("num_warmup_passes", [0, 2])
@pytest.mark.parametrize(
    ("draw", "state", "name"),
    [
        (random.random, random.getstate, "Python's `random`"),
        (np.random.random, lambda: np.random.get_state()[2], "`numpy.random`"),  # noqa: NPY002
    ],
)
def test_draws_of_python_and_numpy_in_a_forward_are_refused(
    backend: GraphBackend,
    draw: Callable[[], float],
    state: Callable[[], Any],
    name: str,
    num_warmup_passes: int,
) -> None:
    module = Drop(draw).to(backend.device)
    options = CaptureOptions(num_warmup_passes=num_warmup_passes)
    graphs = ChunkGraphs([module], [1], backend=backend, options=options)
    before = state()
    with pytest.raises(CaptureError, match=f"draws random numbers of {name}"):
        graphs.capture([(rows(backend.device),)])
    assert state() == before


@pytest.mark.parametrize(
    ("generator", "state"),
    [
        (random.Random(0), lambda g: g.getstate()),
        (np.random.default_rng(0), lambda g: g.bit_generator.state),
        (np.random.RandomState(0), lambda g: g.get_state()[2]),
    ],
    ids=["random", "numpy", "numpy legacy"],
)
@pytest.mark.parametrize("place", ["attribute", "method", "variable"])
def test_draws_of_other_generators_in_a_forward_are_refused(
    backend: GraphBackend, generator: Any, state: Callable[[Any], Any], place: str
) -> None:
    module = Drop(generator.random if place == "method" else lambda: 1 - generator.random())
    if place == "attribute":
        module = DropByGenerator(generator)
    module.to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    before = state(generator)
    with pytest.raises(CaptureError, match="draws random numbers of"):
        graphs.capture([(rows(backend.device),)])
    assert state(generator) == before


def test_draws_are_a_warning_where_another_thread_may_have_drawn(backend: GraphBackend) -> None:
    module = Drop(lambda: random.random() / 4).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with pytest.warns(UserWarning, match="draws random numbers of Python's"):
            graphs.capture([(rows(backend.device),)])
    finally:
        ended.set()
        thread.join()
