"""What a step checks before its first launch, and what programs may do (docs/contract.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from toys import Apply, Operators, capture, counting, train

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.graphs import GraphBackend

WIDTH = 4


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("shift", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.dropout(self.norm(x))) * self.scale


class Loop:
    """Steps of one microbatch."""

    def __init__(self, module: nn.Module, backend: GraphBackend, **options: Any) -> None:
        self.device = backend.device
        self.module: Any = module.to(self.device)
        self.graphs = ChunkGraphs([module], [2], backend=backend, options=CaptureOptions(**options))

    def rows(self) -> torch.Tensor:
        return torch.randn(3, WIDTH, device=self.device, requires_grad=True)

    def step(self, **arguments: Any) -> torch.Tensor:
        x = self.rows()
        with self.graphs.step(1, **arguments):
            y: torch.Tensor = self.graphs.callables[0](x)
            y.sum().backward()
        return y

    def capture(self) -> Any:
        """Capture, replay one step, and return the module."""
        self.graphs.capture([self.rows()])
        with counting(self.graphs.counters, replays=1):
            self.step()
        return self.module


@pytest.fixture
def loop(backend: GraphBackend) -> Loop:
    torch.manual_seed(1)
    return Loop(Stack(), backend)


def new_layer(module: Stack) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH).to(module.scale.device)


def replace_parameter(module: Stack) -> None:
    module.head.weight = nn.Parameter(module.head.weight.detach().clone(), requires_grad=False)


def swap_layers(module: Stack) -> None:
    module.layers[0], module.layers[1] = module.layers[1], module.layers[0]


def set_data(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Stack], None]:
    def change_weight(module: Stack) -> None:
        weight = module.layers[0].weight
        weight.data = change(weight.data)

    return change_weight


CHANGES: dict[str, tuple[Callable[[Stack], object], str]] = {
    "layer replaced": (
        lambda m: m.layers.__setitem__(1, new_layer(m)),
        r"layers\.1 was replaced by another module",
    ),
    "layer added": (lambda m: m.layers.append(new_layer(m)), r"layers\.2 was added"),
    "layers swapped": (swap_layers, r"layers\.0 was replaced"),
    "parameter replaced": (replace_parameter, r"head\.weight was replaced by another tensor"),
    "parameter added": (
        lambda m: m.register_parameter("more", nn.Parameter(m.scale.clone())),
        "more was added",
    ),
    "buffer replaced": (lambda m: setattr(m, "scale", m.scale + 1), "scale was replaced by anoth"),
    "buffer set": (lambda m: setattr(m, "shift", m.scale.clone()), "shift was added"),
    "moved": (set_data(torch.clone), r"layers\.0\.weight was moved to other memory"),
    "transposed": (
        set_data(torch.t),
        r"layers\.0\.weight\.stride\(\) was \(4, 1\) at the capture, and is \(1, 4\) now",
    ),
    "frozen": (
        lambda m: m.norm.bias.requires_grad_(False),
        r"norm\.bias\.requires_grad was True at the capture, and is False now",
    ),
    "evaluation": (nn.Module.eval, r"the chunk\.training was True at the capture, and is False"),
    "probability": (lambda m: setattr(m.dropout, "p", 0.5), r"dropout\.p was 0\.0 .* is 0\.5 now"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_refused_by_name(
    loop: Loop, change: Callable[[Stack], object], message: str
) -> None:
    module = loop.capture()
    change(module)
    with (
        counting(loop.graphs.counters, replays=0),
        pytest.raises(ReplayMismatchError, match=f"chunk 0: {message}") as error,
    ):
        loop.step()
    assert "release the graphs and capture again" in str(error.value)
    assert "step(eager=True)" in str(error.value)


def test_modules_in_the_wrapper_of_torch_compile_have_a_mode(backend: GraphBackend) -> None:
    """The wrapper has none itself, but a property that asks its module."""
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    wrapped = torch.compiler.disable(inner)  # the same wrapper, without a compiler
    loop = Loop(nn.Sequential(nn.Linear(WIDTH, WIDTH), wrapped), backend)
    loop.capture()
    inner[1].eval()
    with pytest.raises(ReplayMismatchError, match=r"1\.training was True"):
        loop.step()


def test_a_declared_cache_may_grow_in_an_eager_step(backend: GraphBackend) -> None:
    """Replacing another buffer is refused."""
    module = Stack().to(backend.device)
    module.register_buffer("table", torch.ones(2, device=backend.device))
    chunk = replace(Chunk.from_module(module, "stage"), caches=("table",))
    x = torch.ones(3, WIDTH, device=backend.device)
    graphs = capture(chunk, x, backend=backend)
    module.table = torch.ones(4, device=backend.device)
    with counting(graphs.counters, replays=1):
        train(graphs, x)
    module.scale = torch.ones(1, device=backend.device)
    with pytest.raises(ReplayMismatchError, match="scale was replaced by another tensor"):
        train(graphs, x)


def test_a_forward_that_replaces_a_buffer_is_refused(backend: GraphBackend) -> None:
    """Every replay would continue from the captured value."""

    class Counting(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale = self.scale + 1
            return super().forward(x)

    loop = Loop(Counting(), backend)
    buffer = loop.module.scale
    # Where two eager passes run, they already differ.
    with pytest.raises(CaptureError, match=r"its forward replaces scale|a tensor that it replaces"):
        loop.capture()
    assert loop.module.scale is buffer
    assert buffer.item() == 1


# -- hooks -----------------------------------------------------------------------------------------

_all_modules = nn.modules.module
HOOKS: dict[str, tuple[Callable[[Stack, Callable[..., None]], Any], str]] = {
    "forward": (lambda m, h: m.norm.register_forward_hook(h), "norm"),
    "forward pre": (lambda m, h: m.norm.register_forward_pre_hook(h), "norm"),
    "backward": (lambda m, h: m.norm.register_full_backward_hook(h), "norm"),
    "all forward": (lambda _, h: _all_modules.register_module_forward_hook(h), "all modules"),
    "gradient": (lambda m, h: m.norm.weight.register_hook(h), r"the gradient of norm\.weight"),
    "accumulated": (
        lambda m, h: m.norm.weight.register_post_accumulate_grad_hook(h),
        r"the gradient of norm\.weight",
    ),
}


@contextmanager
def hooked(loop: Loop, kind: str) -> Iterator[None]:
    handle = HOOKS[kind][0](loop.module, lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_is_refused_at_the_capture_and_before_the_next_replay(loop: Loop, kind: str) -> None:
    where = f"there is a hook on {HOOKS[kind][1]} .*a replay calls no hooks"
    with hooked(loop, kind), pytest.raises(CaptureError, match=where):
        loop.capture()
    loop.capture()
    with hooked(loop, kind), pytest.raises(ReplayMismatchError, match=where):
        loop.step()
    with counting(loop.graphs.counters, replays=1):
        loop.step()


@pytest.mark.parametrize("kind", ["forward", "gradient"])
def test_a_hook_that_is_removed_before_the_step_ends_is_refused(loop: Loop, kind: str) -> None:
    loop.capture()

    def step() -> None:
        with loop.graphs.step(2):
            loop.graphs.callables[0](loop.rows()).sum().backward()
            with hooked(loop, kind):
                loop.graphs.callables[0](loop.rows()).sum().backward()

    with pytest.raises(ReplayMismatchError, match=f"hook on {HOOKS[kind][1]}"):
        step()


def test_hooks_of_libraries_are_accepted(loop: Loop) -> None:
    def hook(*_: object) -> None:
        pass

    hook.__module__ = "transformer_engine.pytorch.module.base"
    loop.module.norm.register_forward_hook(hook)
    loop.capture()
    loop.module.dropout.register_forward_pre_hook(hook)
    with counting(loop.graphs.counters, replays=1):
        loop.step()


def test_torchs_data_parallelism_is_refused(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type is enough, so this needs no process group."""
    wrapper = type("Wrapper", (Apply,), {})
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", wrapper)
    loop = Loop(wrapper(lambda m, x: m.module(x), module=Stack()), backend)
    with pytest.raises(CaptureError, match=r"torch DistributedDataParallel.*does not see"):
        loop.capture()


# -- contexts --------------------------------------------------------------------------------------


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


CONTEXTS: dict[str, tuple[Callable[[], Any], str]] = {
    "anomaly": (torch.autograd.detect_anomaly, "anomaly detection"),
    "dispatch": (Operators, "Operators"),
    "function": (Function, "Function"),
    "saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        "saved_tensors_hooks",
    ),
    "forward mode": (torch.autograd.forward_ad.dual_level, "forward-mode autograd"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("place", ["step", "call"])
@pytest.mark.parametrize(("context", "name"), CONTEXTS.values(), ids=CONTEXTS)
def test_a_context_that_replays_would_ignore_is_refused(
    loop: Loop, context: Callable[[], Any], name: str, place: str
) -> None:
    with context(), pytest.raises(CaptureError, match=f"chunk 0 is called under.* {name}"):
        loop.capture()
    loop.capture()

    def step() -> None:
        if place == "step":
            with context():
                loop.step()
            return
        with loop.graphs.step(1), context():
            loop.graphs.callables[0](loop.rows())

    with (
        counting(loop.graphs.counters, replays=0),
        pytest.raises(ReplayMismatchError, match=rf"{name}.*step\(eager=True\)"),
    ):
        step()
    with counting(loop.graphs.counters, replays=1):
        loop.step()
    if name != "forward-mode autograd":
        with context():
            loop.step(eager=True)


def test_contexts_of_torch_that_change_no_result_are_accepted(loop: Loop) -> None:
    loop.capture()
    with counting(loop.graphs.counters, replays=3):
        with torch.autograd.graph.save_on_cpu():
            loop.step()
        with torch.device(loop.device):
            loop.step()
        with loop.graphs.step(1):
            call = loop.graphs.callables[0]
            checkpoint(call, loop.rows(), use_reentrant=True).sum().backward()


# -- what is nobody's business ---------------------------------------------------------------------


class Free(nn.Module):
    note: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.global_step, self.calls, self.history = 0, 0, []
        self.cache: dict[int, torch.Tensor] = {}
        self.unread: Any = torch.ones(2)
        self.last_mean: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if x.shape[1] not in self.cache:
            self.cache[x.shape[1]] = torch.full_like(x[0], 2.0)
        y = self.layer(x) * TABLE["read"] * self.cache[x.shape[1]]
        self.last_mean = y.mean().detach()
        return y


TABLE: dict[str, float] = {"read": 1.0}


def test_what_no_forward_reads_may_change(backend: GraphBackend) -> None:
    loop = Loop(Free(), backend)
    for i in range(4):
        x = loop.rows()
        with loop.graphs.step(1):
            y = loop.graphs.callables[0](x)
            y.sum().backward()
        assert torch.equal(y, loop.module(x))
        Free.note = loop.module.global_step = i
        loop.module.history.append(float(i))
        loop.module.unread = torch.zeros(3)
        loop.module.eval().train()
        TABLE["unread"] = float(i)
    assert loop.graphs.counters.replays == 3


def test_parameters_without_a_module_are_told_apart() -> None:
    first, second = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    chunk = Chunk(lambda x: x @ first @ second, (first, second), "chunk 0")
    graphs = ChunkGraphs(chunk, 1)
    graphs.capture([torch.ones(2, 4)])
    first.data = first.data.clone()
    with pytest.raises(ReplayMismatchError, match=r"parameter 0 of shape \(4, 4\)"), graphs.step(1):
        pass
