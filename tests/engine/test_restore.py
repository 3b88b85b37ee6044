"""Eager passes of a capture leave the chunk's state as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.engine.capture.restore import restoring_writes
from chunkgraph.graphs import GraphBackend


class Counting(nn.Module):
    """Counts its calls in a buffer, in an attribute and in a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(3))
        self.listed = [torch.zeros(3)]
        self.shifted = self.scale.detach()[1:]

    def tensors(self) -> list[torch.Tensor]:
        return [self.get_buffer("calls"), *self.listed, self.scale]


@pytest.mark.parametrize("is_seen", [True, False], ids=["operator", "unknown kernel"])
def test_writes_are_undone(is_seen: bool) -> None:
    """Any write to memory other than parameters is undone."""
    module = Counting()
    before = [t.detach().clone() for t in module.tensors()]
    pending = module.scale * module.get_buffer("calls")  # saves both
    with restoring_writes(Chunk.from_module(module, "counting")), torch.no_grad():
        for tensor in module.tensors()[: 3 if is_seen else 2]:
            if is_seen:
                tensor.add_(1.0)
            else:
                tensor.numpy()[...] += 1.0
    assert all(torch.equal(a, b) for a, b in zip(module.tensors(), before, strict=True))
    pending.sum().backward()  # autograd would refuse a changed saved tensor


def test_memory_without_writes_is_not_written(tmp_path: Path) -> None:
    """A mapped read-only file, and memory that its owner has freed."""
    np.zeros(1000, dtype=np.float32).tofile(tmp_path / "table")
    module = Counting()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about read-only memory
        table = np.memmap(tmp_path / "table", dtype=np.float32, mode="r")
        module.listed += [torch.from_numpy(table), torch.zeros(3)]
    module.listed[-1].untyped_storage().resize_(0)
    with restoring_writes(Chunk.from_module(module, "counting")):
        module.listed[0].add_(1.0)
    assert not module.listed[0].any()


class Compiled(nn.Module):
    """Counts positive values in a compiled kernel, which no operator shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("positive", torch.zeros(8, dtype=torch.int64))
        self.count = torch.compile(self._count, dynamic=False)

    @staticmethod
    def _count(counts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        counts += (x > 0).sum(0)
        return counts / (1 + counts.sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        with torch.no_grad():
            shares = self.count(self.get_buffer("positive"), y)
        return y * shares


@pytest.mark.gpu
@pytest.mark.parametrize("verify", ["none", "shadow"])
def test_compiled_kernels_write_as_in_eager(verify: str) -> None:
    def run(module: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(1)
        losses = []
        for _ in range(4):
            x = torch.randn(16, 8, device="cuda", generator=generator)
            loss = call(x).square().mean()
            loss.backward()
            losses.append(loss.detach().clone())
        return [*losses, *(p.grad for p in module.parameters()), *module.buffers()]

    eager, module = Compiled().cuda(), Compiled().cuda()
    expected = run(eager, eager)
    graphs = ChunkGraphs([module], [1], options=CaptureOptions(verify=verify))
    graphs.capture([(torch.randn(16, 8, device="cuda"),)])
    with graphs.step(4):
        actual = run(module, graphs.callables[0])
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_calls_without_gradients_are_no_samples(backend: GraphBackend) -> None:
    """An evaluation or a teacher's forward in a warmup step has other arguments."""
    module = nn.Linear(8, 8).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    for _ in range(3):
        with graphs.step(1):
            with torch.no_grad():
                graphs.callables[0](torch.ones(5, 8, device=backend.device))
            graphs.callables[0](torch.ones(3, 8, device=backend.device)).sum().backward()
    assert graphs.counters.replays == 2
