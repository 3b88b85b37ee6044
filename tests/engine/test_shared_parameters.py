"""Parameters whose gradients come from several engines, microbatches or eager work."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.engine.verify import same_bits
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend


def rows(module: nn.Module, **options: Any) -> torch.Tensor:
    return torch.randn(4, 8, device=next(module.parameters()).device, **options)


def test_two_engines_may_share_a_parameter(backend: GraphBackend) -> None:
    torch.manual_seed(0)
    first = nn.Linear(8, 8).to(backend.device)
    second = nn.Sequential(first, nn.Tanh())
    eager = copy.deepcopy([first, second])
    eager[1][0] = eager[0]
    engines = [ChunkGraphs([m], [1], backend=backend) for m in (first, second)]
    for engine in engines:
        engine.capture([rows(first)])
    for _ in range(2):
        batches = [rows(first) for _ in range(4)]
        first.zero_grad()
        eager[0].zero_grad()
        with engines[0].step(2), engines[1].step(2):
            for i, x in enumerate(batches):
                engines[i % 2].callables[0](x).square().sum().backward()
        for i, x in enumerate(batches):
            eager[i % 2](x).square().sum().backward()
        assert same_bits(first.weight.grad, eager[0].weight.grad)


def test_one_backward_over_several_microbatches_is_equal_or_refused(
    backend: GraphBackend,
) -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 8).to(backend.device)
    eager = copy.deepcopy(module)
    graphs = ChunkGraphs([module], [3], backend=backend)
    graphs.capture([rows(module)])
    batches = [rows(module) for _ in range(3)]
    with graphs.step(3):
        sum(graphs.callables[0](x).square().sum() for x in batches).backward()
    sum(eager(x).square().sum() for x in batches).backward()
    assert same_bits(module.weight.grad, eager.weight.grad)
    with pytest.raises(ReplayMismatchError, match="one backward pass"), graphs.step(3):
        sum(graphs.callables[0](x).square().sum() for x in batches).backward()


def test_one_backward_over_several_engines_is_equal_or_refused(backend: GraphBackend) -> None:
    torch.manual_seed(0)
    first = nn.Linear(8, 8).to(backend.device)
    second, third = nn.Sequential(first, nn.Tanh()), nn.Linear(8, 8).to(backend.device)
    eager = copy.deepcopy(nn.ModuleList([first, second, third]))
    engines = [ChunkGraphs([m], [2], backend=backend) for m in (first, second, third)]
    for engine in engines:
        engine.capture([rows(first)])

    def losses(calls: Any, x: torch.Tensor) -> torch.Tensor:
        return sum(call(x).square().sum() for call in calls)  # type: ignore[return-value]

    def replay(x: torch.Tensor, indices: tuple[int, ...] = (0, 1, 2)) -> None:
        with ExitStack() as steps:
            for engine in engines:
                steps.enter_context(engine.step(1))
            losses([engines[i].callables[0] for i in indices], x).backward()

    x = rows(first)
    replay(x)
    losses(eager, x).backward()
    assert same_bits(first.weight.grad, eager[0].weight.grad)
    with pytest.raises(ReplayMismatchError, match="one backward pass"):
        replay(x)
    replay(x, (0, 2))  # these share no parameter
    engines[1].release()
    engines[1].capture([x])
    with pytest.raises(ReplayMismatchError, match="one backward pass"):
        replay(x)
    # Freed engines do not count, though others may have their addresses.
    del engines[1]
    gc.collect()
    replay(x, (0, 1))


def test_eager_work_on_a_parameter_in_the_backward_of_a_replay_is_refused(
    backend: GraphBackend,
) -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 8).to(backend.device)
    eager = copy.deepcopy(module)
    graphs = ChunkGraphs([module], [1], backend=backend)
    x = rows(module).requires_grad_()
    graphs.capture([x])

    def work(m: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, m.weight)

    def after(m: nn.Linear, call: Callable[..., torch.Tensor]) -> torch.Tensor:
        return work(m, call(x)).square().sum()

    def before(m: nn.Linear, call: Callable[..., torch.Tensor]) -> torch.Tensor:
        return call(work(m, x)).square().sum()

    for losses in (after, before):
        for _ in range(2):  # the refused step leaves nothing over
            with (
                pytest.raises(ReplayMismatchError, match=r"parameter weight gets .* eager work"),
                graphs.step(1),
            ):
                losses(module, graphs.callables[0]).backward()
    module.zero_grad()
    for _ in range(2):
        with graphs.step(1):
            work(module, x).square().sum().backward()
            graphs.callables[0](x).square().sum().backward()
            work(module, x).square().sum().backward()
        work(eager, x).square().sum().backward()
        eager(x).square().sum().backward()
        work(eager, x).square().sum().backward()
        assert same_bits(module.weight.grad, eager.weight.grad)
    with graphs.step(1, eager=True):
        after(module, graphs.callables[0]).backward()
    after(eager, eager).backward()
    assert same_bits(module.weight.grad, eager.weight.grad)


def test_eager_work_on_a_main_grad_in_the_backward_of_a_replay_is_refused(
    backend: GraphBackend,
) -> None:
    def into_main_grad(parameter: torch.Tensor) -> None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]

    module = nn.Linear(8, 8).to(backend.device)
    for p in module.parameters():
        p.main_grad = torch.zeros_like(p)
        p.register_post_accumulate_grad_hook(into_main_grad)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([rows(module)])
    with pytest.raises(ReplayMismatchError, match=r"parameter weight gets"), graphs.step(1):
        (graphs.callables[0](rows(module)) @ module.weight).sum().backward()


def test_captured_parameters_have_no_hook_of_graphs_that_are_gone(backend: GraphBackend) -> None:
    module = nn.Linear(8, 8).to(backend.device)
    for ends in (ChunkGraphs.release, lambda _: None):
        first, second = (ChunkGraphs([module], [1], backend=backend) for _ in range(2))
        for graphs in (first, second):  # one engine does not refuse the other's hook
            graphs.capture([rows(module)])
        for graphs in (first, second, first):
            with graphs.step(1):
                graphs.callables[0](rows(module)).sum().backward()
        ends(first)
        ends(second)
        del first, second, graphs
        gc.collect()
        assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
