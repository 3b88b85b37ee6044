"""What a forward stores outside of its result: no tensor of a pool outlives the capture unseen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from toys import Apply, capture, train

from chunkgraph.engine import ChunkGraphs
from chunkgraph.errors import CaptureError, MemoryPlanError
from chunkgraph.graphs import GraphBackend, RecorderBackend, is_capturing

WIDTH = 8


class Leaving(nn.Module):
    """Stores something outside of its result in every forward."""

    def __init__(self, leave: Callable[[Leaving, torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.previous: Any = torch.zeros(())
        self.num_calls = 0
        self.is_even = True
        self.metric: Any = None
        self.listed: list[torch.Tensor] = []
        self.named: dict[str, Any] = {"deep": {}}
        self.object = SimpleNamespace(value=None)
        self.pair = (torch.zeros(()), torch.ones(()))
        self.leave = leave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        self.leave(self, h)
        return h


def rows(backend: GraphBackend) -> torch.Tensor:
    return torch.ones(3, WIDTH, device=backend.device)


LEFT: dict[str, Callable[[Leaving, torch.Tensor], object]] = {
    "state": lambda m, h: setattr(m, "previous", h.detach()),
    "loss": lambda m, h: setattr(m, "metric", h.square().mean()),
    "list": lambda m, h: m.listed.append(h.detach()),
    "dict": lambda m, h: m.named["deep"].update(h=h.detach()),
    "object": lambda m, h: setattr(m.object, "value", h.detach()),
    "child": lambda m, h: setattr(m.linear, "last", h.detach()),
    "swapped": lambda m, _: setattr(m, "pair", m.pair[::-1]),
    "counter": lambda m, _: setattr(m, "num_calls", m.num_calls + 1),
    "alternating": lambda m, _: setattr(m, "is_even", not m.is_even),
}


@pytest.mark.parametrize("leave", LEFT.values(), ids=LEFT)
@pytest.mark.parametrize("num_warmup_steps", [0, 1])
def test_a_capture_leaves_no_memory_of_graphs_in_attributes(
    backend: GraphBackend,
    leave: Callable[[Leaving, torch.Tensor], object],
    num_warmup_steps: int,
) -> None:
    """What eager passes leave stays; replays change none of it, and gradients are eager's."""
    module = Leaving(leave).to(backend.device)
    graphs = ChunkGraphs([module], [2], backend=backend)
    x = rows(backend)
    for _ in range(num_warmup_steps):
        train(graphs, x)
    eager = torch.autograd.grad(module(x).sum(), module.linear.weight)
    module.linear.zero_grad()
    graphs.capture([x])
    before = dict(vars(module)), dict(vars(module.linear)), dict(vars(module.object))
    listed, named = list(module.listed), dict(module.named["deep"])
    values = [t.clone() for t in (module.previous, *listed, *named.values())]
    train(graphs, x)
    assert graphs.counters.replays == 1
    assert torch.equal(module.linear.weight.grad, eager[0])
    for owner, old in zip((module, module.linear, module.object), before, strict=True):
        assert vars(owner).keys() == old.keys()
        assert all(vars(owner)[key] is kept for key, kept in old.items())
    assert all(a is b for a, b in zip(module.listed, listed, strict=True))
    assert all(module.named["deep"][key] is value for key, value in named.items())
    now = (module.previous, *listed, *named.values())
    assert all(map(torch.equal, now, values))


TABLES: dict[int, torch.Tensor] = {}


def test_a_graph_that_reads_anothers_memory_is_refused() -> None:
    """The proof knows it, although no tensor of a pool is left at the end of the session."""

    def read(module: Any, x: torch.Tensor) -> torch.Tensor:
        table = TABLES.pop(0, None)
        if not is_capturing():
            table = torch.arange(WIDTH, dtype=x.dtype).cos()
        elif table is None:
            table = TABLES[0] = torch.arange(WIDTH, dtype=x.dtype).cos()
        return module.linear(x) * table

    module, backend = Apply(read, linear=nn.Linear(WIDTH, WIDTH)), RecorderBackend()
    with pytest.raises(MemoryPlanError, match=r"slot 0 forward overwrites 32 bytes that .*slot 1"):
        capture(module, torch.ones(3, WIDTH), backend=backend, num_slots=2)
    assert not TABLES


KEPT: list[torch.Tensor] = []


def test_tensors_kept_outside_of_the_module_are_refused(backend: GraphBackend) -> None:
    module = Leaving(lambda _, h: KEPT.append(h.detach()))
    message = r"1 tensors .* still referenced.*\(3, 8\) torch\.float32"
    try:
        with pytest.raises(CaptureError, match=message):
            capture(module, rows(backend), backend=backend)
    finally:
        KEPT.clear()


@pytest.mark.parametrize("can_sleep", [False, True])
def test_memory_kept_outside_of_tensors_would_be_lost_in_a_sleep(can_sleep: bool) -> None:
    """As libraries do that create a workspace in their first call."""
    kept: list[torch.UntypedStorage] = []
    module = Leaving(lambda _, h: kept.append((h.detach() * 1).untyped_storage()))
    backend = RecorderBackend(can_sleep=can_sleep)
    if not can_sleep:
        capture(module, rows(backend), backend=backend)
        return
    message = r"512 bytes of chunk 0 slot 0 pool .* in use.* first eager call"
    with pytest.raises(CaptureError, match=message):
        capture(module, rows(backend), backend=backend)


class Result:
    """A class that pytrees do not know."""

    def __init__(self, y: torch.Tensor, hidden: torch.Tensor) -> None:
        self.y = y
        self.hidden = hidden


def test_tensors_in_results_that_are_no_trees_are_refused(backend: GraphBackend) -> None:
    def give(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, Result]:
        h = module.linear(x)
        return h.sum(), Result(h.mean(), h)

    with pytest.raises(CaptureError, match=r"Result\.(y|hidden)"):
        capture(Apply(give, linear=nn.Linear(WIDTH, WIDTH)), rows(backend), backend=backend)


def test_a_refused_capture_adds_to_no_unknown_leaf(backend: GraphBackend) -> None:
    extra = torch.randn(WIDTH, device=backend.device, requires_grad=True)
    extra.grad = torch.ones_like(extra)
    closing = Apply(lambda m, x: m.linear(x * extra), linear=nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match="neither arguments nor among its parameters"):
        capture(closing, rows(backend), backend=backend)
    assert torch.equal(extra.grad, torch.ones_like(extra))


@pytest.mark.parametrize("kept", ["parameter", "tensor", "view", "in a tuple"])
def test_unknown_leaves_in_reentrant_checkpoints_are_refused(
    backend: GraphBackend, kept: str
) -> None:
    """As after ``load_state_dict(assign=True)``, where a list keeps the parameter of before."""
    extra = nn.Parameter(torch.randn(WIDTH, device=backend.device))
    kinds = {"tensor": extra.detach().clone(), "view": extra.detach()[:]}
    value = kinds.get(kept, extra).requires_grad_()
    value.grad = torch.ones_like(value)
    other = nn.Parameter(torch.ones(WIDTH, device=backend.device))  # not used: no concern
    held: Any = [(value, other)] if kept == "in a tuple" else [[value, other]]

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: module.linear(y * module.held[0][0]), x, use_reentrant=True)

    module = Apply(run, linear=nn.Linear(WIDTH, WIDTH))
    module.held = held
    x = rows(backend).requires_grad_()
    with pytest.raises(CaptureError, match=r"lose their gradients"):
        capture(module, x, backend=backend)
    assert torch.equal(value.grad, torch.ones_like(value))
    module.held[0] = (torch.ones(WIDTH, device=backend.device), other, value)
    train(capture(module, x, backend=backend), x)


def test_leaves_that_a_module_keeps_and_does_not_train_are_left_alone() -> None:
    """Such as a former model that gave its weights back, and a layer for later."""
    former, critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    for kept in (former, critic):
        kept(torch.ones(2, WIDTH)).sum().backward()
    for parameter in former.parameters():
        parameter.data = torch.empty(0)
    model = nn.Linear(WIDTH, WIDTH)
    view = torch.ones(2, 2, requires_grad=True).mul(1).unbind()[0]
    with torch.no_grad():
        view.mul_(2)  # now torch refuses to say whether it is a leaf
    model.kept = [former, nn.LazyLinear(3), critic, view]  # type: ignore[assignment]
    parameters = [*former.parameters(), *critic.parameters()]
    grads = [(p.grad, p.grad.clone()) for p in parameters if p.grad is not None]
    x = torch.ones(2, WIDTH)
    train(capture(model, x, backend=RecorderBackend()), x)
    for parameter, (grad, copy) in zip(parameters, grads, strict=True):
        assert parameter.grad is grad
        assert torch.equal(grad, copy)
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks


class Unusable(torch.Tensor):
    """A foreign tensor class that refuses all functions of torch."""

    @classmethod
    def __torch_function__(cls, function: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise ValueError(f"no {function} here")


def test_leaves_of_other_modules_are_no_concern(backend: GraphBackend) -> None:
    """They are alive during a capture, and may have any class."""
    others = [nn.LazyLinear(WIDTH), torch.ones(WIDTH, requires_grad=True).as_subclass(Unusable)]
    with torch._C.DisableTorchFunctionSubclass():
        others.append(torch.ones(WIDTH).as_subclass(Unusable).requires_grad_())
    capture(nn.Linear(WIDTH, WIDTH), rows(backend), backend=backend)
    assert len(others) == 3


def test_tensors_of_the_compiler_are_not_looked_into() -> None:
    """``torch.compile`` keeps tensors without memory; torch warns if their address is read."""
    with FakeTensorMode():
        fake = torch.ones(4, 4)
    module = nn.Linear(4, 4)
    graphs = ChunkGraphs([module], [1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphs.capture([(torch.ones(2, 4),)])
    assert graphs.counters.captures == 1
    assert fake.shape == (4, 4)


def test_a_stale_view_elsewhere_in_the_process_does_not_matter(backend: GraphBackend) -> None:
    """Torch refuses to read whether it is a leaf."""
    views = (torch.ones(2, 2, requires_grad=True) * 1).unbind()
    with pytest.raises(RuntimeError, match="modified inplace"):
        views[0].mul_(2)
    inputs = torch.ones(2, WIDTH, device=backend.device, requires_grad=True)
    graphs = capture(nn.Linear(WIDTH, WIDTH), inputs, backend=backend)
    train(graphs, inputs)
    assert graphs.counters.replays == 1
