"""Changes of a captured module that its graphs would miss are refused by name."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import Chunk, ChunkGraphs
from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.graphs import GraphBackend


class Scaled(nn.Module):
    def __init__(self, *, replaces_buffer: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("num_calls", torch.ones(()))
        self.replaces_buffer = replaces_buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.replaces_buffer:
            self.num_calls = self.num_calls + 1
        return self.head(self.linear(x)) * self.num_calls


def new_input(backend: GraphBackend) -> torch.Tensor:
    return torch.randn(3, 4, device=backend.device, requires_grad=True)


def train(graphs: ChunkGraphs, backend: GraphBackend) -> None:
    with graphs.step(1):
        graphs.callables[0](new_input(backend)).sum().backward()


def replace_parameter(module: Scaled) -> None:
    module.linear.weight = nn.Parameter(module.linear.weight.detach().clone())


def move(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


def replace_buffer(module: Scaled) -> None:
    module.num_calls = module.num_calls + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_parameter, r"linear\.weight was replaced"),
        (replace_buffer, r"num_calls was replaced"),
        (lambda m: move(m.num_calls), r"num_calls was moved to other memory"),
        (lambda m: move(m.head.weight), r"head\.weight was moved to other memory"),
        (lambda m: m.linear.bias.requires_grad_(False), r"linear\.bias trained .* is frozen now"),
        (lambda m: m.head.weight.requires_grad_(), r"head\.weight was frozen .* trains now"),
    ],
    ids=["parameter", "buffer", "moved buffer", "moved parameter", "frozen", "thawed"],
)
def test_a_change_is_refused_until_the_next_capture(
    backend: GraphBackend, change: Callable[[Scaled], object], message: str
) -> None:
    module = Scaled().to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    train(graphs, backend)
    train(graphs, backend)
    change(module)
    with pytest.raises(ReplayMismatchError, match=message):
        train(graphs, backend)
    graphs.release()


def test_changes_in_another_dict_of_a_module_are_refused(backend: GraphBackend) -> None:
    module = Scaled().to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([new_input(backend)])
    module.linear._parameters = dict(module.linear._parameters)
    with graphs.counters.expect(replays=1):
        train(graphs, backend)
    replace_parameter(module)
    with pytest.raises(ReplayMismatchError, match=r"linear\.weight was replaced"):
        train(graphs, backend)


def test_a_hook_that_is_added_to_a_layer_inside_a_step_is_refused(backend: GraphBackend) -> None:
    module = Scaled().to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([new_input(backend)])

    def train_hooked() -> None:
        with graphs.step(1):
            module.linear.register_forward_hook(lambda *_: None)
            graphs.callables[0](new_input(backend)).sum().backward()

    with pytest.raises(ReplayMismatchError, match="hook was added to linear"):
        train_hooked()


def test_a_hook_that_torch_did_not_register_is_refused(backend: GraphBackend) -> None:
    module = Scaled().to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([new_input(backend)])
    train(graphs, backend)
    module.linear._forward_hooks[10**9] = lambda *_: None
    with pytest.raises(ReplayMismatchError, match="hook was added to linear"):
        train(graphs, backend)


def test_a_hook_that_is_removed_or_replaced_after_the_capture_is_refused(
    backend: GraphBackend,
) -> None:
    module = Scaled().to(backend.device)
    handle = module.linear.register_forward_hook(lambda _module, _args, output: output * 2)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([new_input(backend)])
    train(graphs, backend)
    hooks = module.linear._forward_hooks
    doubles, hooks[handle.id] = hooks[handle.id], lambda _module, _args, output: output * 3
    with pytest.raises(ReplayMismatchError, match="hook was added to linear"):
        train(graphs, backend)
    hooks[handle.id] = doubles
    train(graphs, backend)
    handle.remove()
    with pytest.raises(ReplayMismatchError, match="hook was removed from linear"):
        train(graphs, backend)
    graphs.release()
    train(graphs, backend)


def test_other_attributes_of_a_layer_are_refused(backend: GraphBackend) -> None:
    module = Scaled().to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([new_input(backend)])
    train(graphs, backend)
    module.linear.__dict__ = copy.deepcopy(vars(module.linear))
    with pytest.raises(ReplayMismatchError, match="__dict__ of linear was replaced"):
        train(graphs, backend)


def test_other_dicts_with_the_same_tensors_are_accepted(backend: GraphBackend) -> None:
    module = Scaled().to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([new_input(backend)])
    train(graphs, backend)
    module.linear._parameters = dict(module.linear._parameters)
    train(graphs, backend)
    module.linear._parameters["weight"] = nn.Parameter(module.linear.weight.detach().clone())
    with pytest.raises(ReplayMismatchError, match=r"linear\.weight was replaced"):
        train(graphs, backend)


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
    ],
)
def test_a_hook_on_all_modules_is_refused(
    backend: GraphBackend, register: Callable[[Callable[..., None]], Any]
) -> None:
    module = Scaled().to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([new_input(backend)])
    train(graphs, backend)
    handle = register(lambda *_: None)
    try:
        with pytest.raises(ReplayMismatchError, match="hook was added to all modules"):
            train(graphs, backend)
    finally:
        handle.remove()
    train(graphs, backend)


@pytest.mark.parametrize("part", ["", "linear"])
def test_another_mode_than_in_the_capture_is_refused(backend: GraphBackend, part: str) -> None:
    module = Scaled().to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([new_input(backend)])
    module.get_submodule(part).eval()
    with pytest.raises(ReplayMismatchError, match=rf"{part}.*in eval\(\), .*captured in train\(\)"):
        train(graphs, backend)
    module.train()
    with graphs.counters.expect(replays=1):
        train(graphs, backend)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_no_replay_would_call_are_refused(backend: GraphBackend, kind: str) -> None:
    module = Scaled().to(backend.device)
    handle = getattr(module.linear.weight, kind)(lambda _: None)
    graphs = ChunkGraphs([module], [1], backend=backend)
    with pytest.raises(CaptureError, match=r"hooks wait for .* 1 parameters \(linear\.weight\)"):
        graphs.capture([new_input(backend)])
    handle.remove()
    graphs.capture([new_input(backend)])


def test_torchs_data_parallelism_is_refused(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type is enough, so this needs no process group."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Wrapper)
    wrapped = Wrapper(Scaled().to(backend.device))
    graphs = ChunkGraphs([wrapped], [1], backend=backend)
    with pytest.raises(CaptureError, match="would never reduce them"):
        graphs.capture([new_input(backend)])


def test_a_declared_cache_may_grow_in_an_eager_step(backend: GraphBackend) -> None:
    module = Scaled().to(backend.device)
    chunk = replace(Chunk.from_module(module, "stage"), caches=("num_calls",))
    graphs = ChunkGraphs([chunk], [1], backend=backend)
    graphs.capture([new_input(backend)])
    module.num_calls = torch.ones(4, device=backend.device)
    with graphs.counters.expect(replays=1):
        train(graphs, backend)


def test_a_forward_that_replaces_a_buffer_is_refused(backend: GraphBackend) -> None:
    """Every replay would continue from the captured value."""
    module = Scaled(replaces_buffer=True).to(backend.device)
    buffer = module.num_calls
    graphs = ChunkGraphs([module], [2], backend=backend)
    with pytest.raises(CaptureError, match="its forward replaces num_calls"):
        graphs.capture([new_input(backend)])
    assert module.num_calls is buffer
    assert buffer.item() == 1


class Helper:
    """A plain object that holds a parameter of its module and a function of it."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight


def test_parameters_in_plain_objects_of_a_module_train(backend: GraphBackend) -> None:
    class Delegating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.helper = Helper(self.weight)
            short_lived = Helper(self.weight)
            self.gone = weakref.proxy(short_lived)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.helper.weight

    module = Delegating().to(backend.device)
    module.helper.weight = weight = module.weight
    graphs = ChunkGraphs([module], num_slots=[1], backend=backend)
    graphs.capture([(new_input(backend),)])
    assert module.helper.weight is module.weight is weight
    x = new_input(backend)
    with graphs.step(1):
        graphs.callables[0](x).sum().backward()
    expected = x.detach().sum(0)[:, None].expand(4, 4)
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)
