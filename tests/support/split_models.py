"""Models whose backward is split, and training steps that compare them with eager ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import copy_with_gradient

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.engine.split import SPLIT, WeightBackwards
from chunkgraph.graphs import GraphBackend

WIDTH = 16


class Block(nn.Module):
    """A transformer layer of torch modules."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (h.view(rows, length, 2, -1).transpose(1, 2) for h in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, width)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Tied(nn.Module):
    """A weight used three times, once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.first(self.norm(x)))
        return x + self.first(h).tanh() @ self.first.weight


class Recomputed(nn.Module):
    """A layer with a recomputed forward, next to dropout."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.last = Block(dropout=0.0), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(x)
        y: torch.Tensor = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return self.last(y)


class RecomputedFirst(nn.Module):
    """A scale of the chunk's input with a recomputed forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(lambda x: x * self.scale, x, use_reentrant=True)
        return F.gelu(y)


class Frozen(nn.Module):
    """Some parameters take no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(), nn.Linear(WIDTH, WIDTH)
        self.last.weight.requires_grad_(False)
        self.block.norm1.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(x))


class Convolved(nn.Module):
    """A convolution, a product of activations, a scale and a statistic in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.conv(x.transpose(1, 2))) * self.scale
        return x + torch.einsum("bct,bcs->bts", h, h) @ x


class _Product(torch.autograd.Function):
    """A user's linear layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)  # autocast has cast the product
        for_input = grad @ weight if ctx.needs_input_grad[0] else None
        return for_input, grad.flatten(0, 1).t() @ x.flatten(0, 1)


class Own(nn.Module):
    """Has custom functions, rows of a table, and a weight that is computed from two others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.left, self.right = nn.Linear(4, WIDTH), nn.Linear(4, WIDTH, bias=False)
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table((x.detach()[..., 0] * 10).long() % 7)
        low_rank = self.left.weight @ self.right.weight.t() + self.left.bias
        return x + (_Product.apply(x, self.weight) + rows).tanh() @ low_rank


@copy_with_gradient
def unseen(grad: torch.Tensor) -> torch.Tensor:
    """Read the gradient by address and fill new memory, as kernels outside of torch do."""
    assert grad.data_ptr()
    return torch.ones(grad.shape, dtype=grad.dtype, device=grad.device)


class UnseenBeforeBias(nn.Module):
    """A kernel and a bias get the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((unseen(self.first(x)) + self.bias).tanh())


def as_split(module: nn.Module, backend: GraphBackend, num_slots: int = 3, **options: Any) -> Any:
    chunk = Chunk.from_module(module, "rank 0 chunk 0", program=SPLIT)
    options = CaptureOptions(**options)
    graphs: Any = ChunkGraphs([chunk], num_slots, backend=backend, options=options)
    graphs.weights = WeightBackwards(graphs)
    return graphs


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(Block(), Block()),
    "tied": Tied,
    "checkpoint": lambda: Recomputed(use_reentrant=False),
    "reentrant checkpoint": lambda: Recomputed(use_reentrant=True),
    "reentrant checkpoint of the input": RecomputedFirst,
    "frozen": Frozen,
    "convolved": Convolved,
    "own": Own,
    "unseen": UnseenBeforeBias,
}


def pair(name: str, device: torch.device) -> tuple[nn.Module, nn.Module]:
    modules = []
    for _ in range(2):
        torch.manual_seed(3)
        modules.append(MODELS[name]().to(device))
    return modules[0], modules[1]


Result = list[torch.Tensor]


def run_eagerly(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Result:
    """Run whole backwards, each directly after its forward."""
    results: Result = []
    for source in inputs:
        x = source.detach().clone().requires_grad_(source.requires_grad)
        y = module(x)
        y.square().sum().backward()
        results += [y.detach().clone(), *([x.grad] if x.grad is not None else [])]
    return results


def run_split(graphs: ChunkGraphs, inputs: Sequence[torch.Tensor], lag: int) -> Result:
    """Run backwards whose weight halves follow ``lag`` microbatches later."""
    results: Result = []
    runners: deque[Callable[[], None]] = deque()
    with graphs.step(len(inputs)):
        for source in inputs:
            x = source.detach().clone().requires_grad_(source.requires_grad)
            y = graphs.callables[0](x)
            y.square().sum().backward()
            results += [y.detach().clone(), *([x.grad] if x.grad is not None else [])]
            runners.append(graphs.weights.runner(0))
            if len(runners) > lag:
                runners.popleft()()
        while runners:
            runners.popleft()()
    return results


def gradients(module: nn.Module) -> Result:
    return [p.grad for p in module.parameters() if p.grad is not None]


def assert_equal(mine: Result, theirs: Result) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


def check_step(graphs: Any, eager: nn.Module, inputs: Result, lag: int) -> None:
    """Check that split backwards have the bits of whole ones, with the same random numbers."""
    torch.manual_seed(lag)
    expected = run_eagerly(eager, inputs)
    torch.manual_seed(lag)
    assert_equal(run_split(graphs, inputs, lag), expected)


def inputs_of(device: torch.device, count: int, *, requires_grad: bool = True) -> Result:
    drawn = [torch.randn(2, 5, WIDTH, device=device) for _ in range(count)]
    return [x.requires_grad_(requires_grad) for x in drawn]
