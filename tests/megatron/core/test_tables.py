"""Graphs keep Megatron's memory that they use after Megatron frees it."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping
from in_process import attach
from torch import nn

from chunkgraph.engine import Chunk
from chunkgraph.engine.capture.dangling import Bookkeeping
from chunkgraph.graphs import RecorderBackend
from chunkgraph.megatron.features.model_state import CachedTables
from chunkgraph.megatron.model_part import GROWING_BUFFERS
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import seed_everything

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]


@pytest.fixture
def chunks(one_rank: torch.device, make_config: Callable[..., dict[str, Any]]) -> list[nn.Module]:
    config = config_from_mapping(make_config())
    seed_everything(config.train.seed, one_rank)
    return build_model(config, one_rank)


def _losses(graphs: Any, chunk: nn.Module, num_steps: int) -> list[torch.Tensor]:
    """Return the losses of steps of one microbatch, always the same one."""
    tokens = torch.arange(32).reshape(2, 16)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)

    def schedule(**_: Any) -> torch.Tensor:
        losses = chunk(tokens, tokens, mask, labels=tokens)
        losses.sum().backward()
        return losses.detach().clone()

    wrapped = graphs.wrap_forward_backward(schedule)
    return [wrapped(num_microbatches=1) for _ in range(num_steps)]


@pytest.mark.parametrize("scope", ["block", "chunk"])
def test_tables_outlive_the_cache_they_came_from(chunks: list[nn.Module], scope: Any) -> None:
    """Megatron's cache may drop the rotary table that the graphs read."""
    (rotary,) = [m for m in chunks[0].modules() if type(m).__name__ == "RotaryEmbedding"]
    cache = type(rotary).forward
    cache.cache_clear()
    tables: list[weakref.ref[torch.Tensor]] = []
    graphs = attach(chunks, scope=scope)

    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        table: torch.Tensor = cache(rotary, *args, **kwargs)
        tables.append(weakref.ref(table))
        return table

    with pytest.MonkeyPatch.context() as patch:  # a hook would be refused
        patch.setitem(vars(rotary), "forward", noting)
        first, second = _losses(graphs, chunks[0], 2)
    (table,) = {id(ref()): ref for ref in tables}.values()
    cache.cache_clear()
    gc.collect()
    assert table() is not None
    (third,) = _losses(graphs, chunks[0], 1)
    assert torch.equal(second, first)
    assert torch.equal(third, first)
    assert graphs.counters.replays == 2
    cache.cache_clear()
    graphs.detach()
    gc.collect()
    assert table() is None


@pytest.mark.parametrize("scope", ["block", "chunk"])
def test_global_buffers_outlive_their_replacement(chunks: list[nn.Module], scope: Any) -> None:
    """Megatron makes a larger one for a longer sequence and drops the one in the graphs."""
    from megatron.core.parallel_state import get_global_memory_buffer

    buffers = get_global_memory_buffer().buffer
    graphs = attach(chunks, scope=scope)
    first, second = _losses(graphs, chunks[0], 2)
    used = [weakref.ref(buffer) for buffer in buffers.values()]
    assert used
    for key, buffer in buffers.items():
        buffers[key] = torch.empty(2 * buffer.numel())
    del buffer
    assert all(ref() is not None for ref in used)
    (third,) = _losses(graphs, chunks[0], 1)
    assert graphs.counters.replays == 2
    assert torch.equal(second, first)
    assert torch.equal(third, first)
    graphs.detach()
    assert all(ref() is None for ref in used)


class _LatentTables(nn.Module):
    """As the positions of multi-latent attention: a longer table replaces the previous one."""

    length = 0

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def forward(self, length: int) -> torch.Tensor:
        return torch.arange(float(length))

    def get_cached_cos_sin(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if length > self.length:
            self.length = length
            table = self.forward(length)
            self.register_buffer("cos_cached", table.cos(), persistent=False)
            self.register_buffer("sin_cached", table.sin(), persistent=False)
        return self.cos_cached[:length], self.sin_cached[:length]


def test_tables_outlive_longer_ones() -> None:
    """Tables from the time of the capture stay; a longer one comes later."""
    module = _LatentTables()
    tables = CachedTables([module])
    module.get_cached_cos_sin(4)
    with tables.hold() as own:
        for length in (8, 4, 6):
            module.get_cached_cos_sin(length)
        held = weakref.ref(module.cos_cached)
    assert "get_cached_cos_sin" not in vars(module)
    module.get_cached_cos_sin(16)
    assert held() is not None
    own.clear()  # as graphs that are dropped do
    assert held() is None


def _latent() -> nn.Module:
    return _LatentTables()


def _yarn() -> nn.Module:
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    return YarnRotaryEmbedding(kv_channels=8, original_max_position_embeddings=2)


@pytest.mark.parametrize("make", [_latent, _yarn])
def test_no_cache_hands_a_table_to_another_graph(
    one_rank: torch.device, make: Callable[[], nn.Module]
) -> None:
    """Graphs share the tables from outside of captures, also more than Megatron's cache has."""
    module, backend = make().to(one_rank), RecorderBackend()
    cache: Any = type(module).forward
    pools = [backend.new_pool(f"pool {i}") for i in range(2)]
    tables = CachedTables([module])
    kept = Bookkeeping(replace(Chunk.from_module(module, "it"), caches=GROWING_BUFFERS))
    lengths = range(3, 3 + cache.cache_info().maxsize + 2)
    with tables.hold() as own:
        outside = {length: module(length) for length in lengths}
        inside = []
        for pool in pools:
            with kept.restoring(), backend.capture("graph", pool):
                assert all(module(length) is table for length, table in outside.items())
                inside.append(module(64))
                module.get_cached_cos_sin(64)
        assert inside[0] is not inside[1]
        eager = module(64)
    assert all(eager is not table for table in inside)
    assert "forward" not in vars(module)
    del inside
    gc.collect()
    assert not any(pool.live() for pool in pools)
    held = [weakref.ref(t[0] if isinstance(t, tuple) else t) for t in outside.values()]
    cache.cache_clear()
    outside.clear()
    assert all(ref() is not None for ref in held)
    own.clear()  # as graphs that are dropped do
    assert all(ref() is None for ref in held)
