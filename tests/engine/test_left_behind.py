"""Tensors that a forward stores outside of its result, as no replay would, are refused by name."""

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

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import GraphBackend

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
        self.seen: set[int] = set()
        self.named: dict[str, Any] = {"deep": {}}
        self.object = SimpleNamespace(value=None)
        self.pair = (torch.zeros(()), torch.ones(()))
        self.leave = leave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        self.leave(self, h)
        return h


def set_child(module: Leaving, h: torch.Tensor) -> None:
    module.linear.last = h.detach()


def swap(module: Leaving, _: torch.Tensor) -> None:
    module.pair = (module.pair[1], module.pair[0])


def count(module: Leaving, _: torch.Tensor) -> None:
    module.num_calls += 1


def add(module: Leaving, _: torch.Tensor) -> None:
    module.seen.add(len(module.seen))


def alternate(module: Leaving, _: torch.Tensor) -> None:
    module.is_even = not module.is_even


LEFT: dict[str, tuple[Callable[[Leaving, torch.Tensor], object], str]] = {
    "state": (lambda m, h: setattr(m, "previous", h.detach()), "previous"),
    "loss": (lambda m, h: setattr(m, "metric", h.square().mean()), "metric"),
    "list": (lambda m, h: m.listed.append(h.detach()), r"listed\["),
    "dict": (lambda m, h: m.named["deep"].update(h=h.detach()), r"named\['deep'\]\['h'\]"),
    "object": (lambda m, h: setattr(m.object, "value", h.detach()), r"object\.value"),
    "child": (set_child, r"linear\.last"),
    "swapped": (swap, "pair"),
    "counter": (count, "num_calls"),
    "alternating": (alternate, "is_even"),
}


@pytest.mark.parametrize(("leave", "name"), LEFT.values(), ids=LEFT)
@pytest.mark.parametrize("num_warmup_steps", [0, 1])
def test_values_left_in_attributes_are_refused_by_name(
    backend: GraphBackend,
    leave: Callable[[Leaving, torch.Tensor], object],
    name: str,
    num_warmup_steps: int,
) -> None:
    module = Leaving(leave).to(backend.device)
    graphs = ChunkGraphs([module], [2], backend=backend)
    x = torch.ones(3, WIDTH, device=backend.device)
    for _ in range(num_warmup_steps):
        with graphs.step(1):
            graphs.callables[0](x).sum().backward()
    before = dict(vars(module))
    listed = list(module.listed)
    with pytest.raises(CaptureError, match=f"its forward sets .*{name}"):
        graphs.capture([x])
    assert all(vars(module)[key] is value for key, value in before.items())
    assert len(module.listed) == len(listed)


KEPT: list[torch.Tensor] = []


def test_tensors_kept_outside_of_the_module_are_refused(backend: GraphBackend) -> None:
    module = Leaving(lambda _, h: KEPT.append(h.detach())).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    x = torch.ones(3, WIDTH, device=backend.device)
    try:
        with pytest.raises(
            CaptureError, match=r"1 tensors .* still referenced.*\(3, 8\) torch\.float32"
        ):
            graphs.capture([x])
    finally:
        KEPT.clear()


class Result:
    """A class that pytrees do not know."""

    def __init__(self, y: torch.Tensor, hidden: torch.Tensor) -> None:
        self.y = y
        self.hidden = hidden


def test_tensors_in_results_that_are_no_trees_are_refused(backend: GraphBackend) -> None:
    class Giving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Result]:
            h = self.linear(x)
            return h.sum(), Result(h.mean(), h)

    graphs = ChunkGraphs([Giving().to(backend.device)], [1], backend=backend)
    with pytest.raises(CaptureError, match=r"Result\.(y|hidden)"):
        graphs.capture([torch.ones(3, WIDTH, device=backend.device)])


def make_mask(module: Leaving, h: torch.Tensor) -> None:
    if module.metric is None:
        module.metric = torch.ones(WIDTH, device=h.device)


def note_shape(module: Leaving, h: torch.Tensor) -> None:
    module.metric = tuple(h.shape)


@pytest.mark.parametrize("leave", [make_mask, note_shape])
def test_what_only_a_first_call_sets_is_kept(
    backend: GraphBackend, leave: Callable[[Leaving, torch.Tensor], object]
) -> None:
    module = Leaving(leave).to(backend.device)
    graphs = ChunkGraphs([module], [2], backend=backend)
    x = torch.ones(3, WIDTH, device=backend.device)
    for _ in range(3):
        with graphs.step(1):
            graphs.callables[0](x).sum().backward()
    assert graphs.counters.replays == 2
    assert module.metric is not None


def test_a_cache_made_in_a_warmup_pass_is_kept(backend: GraphBackend) -> None:
    module = Leaving(make_mask).to(backend.device)
    options = CaptureOptions()
    graphs = ChunkGraphs([module], [1], backend=backend, options=options)
    graphs.capture([torch.ones(3, WIDTH, device=backend.device)])
    assert torch.equal(module.metric, torch.ones(WIDTH, device=backend.device))


@pytest.mark.parametrize("num_passes", [0, 1])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_gradients_of_unknown_leaves_in_recomputation_are_refused(
    backend: GraphBackend, has_gradient: bool, num_passes: int
) -> None:
    extra = torch.randn(WIDTH, WIDTH, device=backend.device, requires_grad=True)

    class Closing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(
                lambda t: (t @ extra).tanh(), x, use_reentrant=True, preserve_rng_state=False
            )
            return self.linear(hidden)

    before = extra.grad = torch.ones_like(extra) if has_gradient else None
    options = CaptureOptions(num_warmup_passes=num_passes)
    graphs = ChunkGraphs([Closing().to(backend.device)], [1], backend=backend, options=options)
    x = torch.ones(3, WIDTH, device=backend.device, requires_grad=True)
    with pytest.raises(CaptureError, match=r"computes a gradient of a tensor .*\(8, 8\)"):
        graphs.capture([x])
    assert extra.grad is before
    assert before is None or torch.equal(before, torch.ones_like(extra))


@pytest.mark.parametrize("num_passes", [0, 1])
def test_a_refused_capture_adds_to_no_unknown_leaf(backend: GraphBackend, num_passes: int) -> None:
    extra = torch.randn(WIDTH, device=backend.device, requires_grad=True)

    class Closing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x * extra)

    extra.grad = torch.ones_like(extra)
    options = CaptureOptions(num_warmup_passes=num_passes)
    graphs = ChunkGraphs([Closing().to(backend.device)], [1], backend=backend, options=options)
    with pytest.raises(CaptureError, match="neither arguments nor among its parameters"):
        graphs.capture([torch.ones(3, WIDTH, device=backend.device)])
    assert torch.equal(extra.grad, torch.ones_like(extra))


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
    module = nn.Linear(WIDTH, WIDTH).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([torch.ones(3, WIDTH, device=backend.device)])
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
    module = nn.Linear(WIDTH, WIDTH).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    inputs = torch.ones(2, WIDTH, device=backend.device, requires_grad=True)
    for _ in range(2):
        with graphs.step(1):
            graphs.callables[0](inputs).sum().backward()
    assert graphs.counters.replays == 1
