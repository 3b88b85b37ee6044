"""Small chunks, and training steps of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from chunkgraph.engine import CaptureOptions, ChunkGraphs, Counters
from chunkgraph.graphs import Graph, GraphBackend


class Tower(nn.Module):
    """Has dropout and a buffer updated in place; ``syncs``: reads the device from the host."""

    def __init__(self, *, syncs: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("num_calls", torch.zeros(()))
        self.syncs = syncs

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.num_calls += 1
        h = self.linear(self.dropout(x))
        if self.syncs and h.abs().max().item() > 1e9:
            h = h / 2
        return h * scale


SYNC_LINE = rf"toys\.py:{Tower.forward.__code__.co_firstlineno + 3}"
"""A pattern for the file and line of the read."""


def towers(backend: GraphBackend, *syncs: bool) -> list[Tower]:
    """Make a tower for each of ``syncs``, from one seed."""
    torch.manual_seed(4)
    return [Tower(syncs=s).to(backend.device) for s in syncs]


def sample(backend: GraphBackend, rows: int = 4) -> torch.Tensor:
    """Draw the input (rows, 8) of a tower."""
    return torch.randn(rows, 8, device=backend.device, requires_grad=True)


def rows(module: nn.Module, **options: Any) -> torch.Tensor:
    """Draw an input (4, 8) on a module's device."""
    return torch.randn(4, 8, device=next(module.parameters()).device, **options)


def train_microbatch(call: Callable[..., Any], x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Run forward and backward of one microbatch; return a copy of its output."""
    y = call(x, **kwargs)
    y.square().sum().backward()
    return y.detach().clone()


@contextmanager
def counting(counters: Counters, **changes: int) -> Iterator[None]:
    """Assert how much counters change in the block: ``with counting(counters, captures=0)``."""
    before = {name: getattr(counters, name) for name in changes}
    yield
    assert {name: getattr(counters, name) - before[name] for name in changes} == changes


def add_to_main_grads(module: nn.Module) -> None:
    """Give trained parameters a ``main_grad`` that gradients go to, as Megatron's DDP does."""
    for parameter in (p for p in module.parameters() if p.requires_grad):
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(_into_main_grad)


def _into_main_grad(parameter: torch.Tensor) -> None:
    if not getattr(parameter, "grad_added_to_main_grad", False):
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None


class Apply(nn.Module):
    """Its forward is ``function(self, *args, **kwargs)``; the parts are its attributes."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def copy_with_gradient(gradient: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Return a function that copies its input; its backward is the given one."""

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return gradient(grad)

    return Copy.apply


def capture(
    chunk: Any, *sample: Any, backend: GraphBackend, num_slots: int = 1, **options: Any
) -> ChunkGraphs:
    """Move a module to the backend's device, and capture it with one sample."""
    if isinstance(chunk, nn.Module):
        chunk = chunk.to(backend.device)
    graphs = ChunkGraphs([chunk], [num_slots], backend=backend, options=CaptureOptions(**options))
    graphs.capture([sample])
    return graphs


class Operators(TorchDispatchMode):
    """Lists the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def capturing(backend: GraphBackend, label: str) -> AbstractContextManager[Graph]:
    """Capture into a pool of its own."""
    return backend.capture(label, backend.new_pool(label))


def train(graphs: ChunkGraphs, *inputs: torch.Tensor) -> None:
    """Run a step with a microbatch of each input through the first chunk."""
    with graphs.step(len(inputs)):
        for x in inputs:
            graphs.callables[0](x).sum().backward()


def all_equal(ones: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Return whether there are as many tensors, and pairs of them are equal."""
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))
