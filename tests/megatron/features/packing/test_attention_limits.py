"""Packed sequences without a kernel of Transformer Engine are refused before training."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.features.packing.attention_limits import (
    AttentionSite,
    needs_tokens_in_pieces,
    refuse_for_layers,
    refuse_large_deterministic,
    shares_keys,
    why_refused,
)
from chunkgraph.packing import ContextLimits, PackedShape

pytestmark = [pytest.mark.megatron, pytest.mark.every_release]

_SITE = AttentionSite(capability=(9, 0), is_deterministic=True, has_flash=False, version=(2, 20))
_LARGE = {"num_seqs": 64, "num_heads": 16, "max_seqlen": 4096}


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "max_seqlen", "is_refused"),
    [
        (64, 16, 4096, True),
        (64, 4, 2048, True),  # the limit itself, 2^30
        (64, 4, 2047, False),
        (63, 4, 2048, False),
        (256, 4, 1024, True),
        (8, 16, 1024, False),
    ],
)
def test_the_limit(num_seqs: int, num_heads: int, max_seqlen: int, is_refused: bool) -> None:
    reason = why_refused(_SITE, num_seqs=num_seqs, num_heads=num_heads, max_seqlen=max_seqlen)
    assert bool(reason) == is_refused


@pytest.mark.parametrize(
    "changes",
    [
        {"capability": None},
        {"capability": (8, 0)},
        {"capability": (10, 0)},
        {"is_deterministic": False},
        {"has_flash": True},
        {"version": None},
        {"version": (2, 21)},
    ],
)
def test_elsewhere_it_does_not_hold(changes: dict[str, Any]) -> None:
    assert why_refused(_SITE, **_LARGE)
    assert why_refused(dataclasses.replace(_SITE, **changes), **_LARGE) == ""


def test_the_message_names_what_may_be_changed() -> None:
    with pytest.raises(ConfigError) as error:
        refuse_large_deterministic(_SITE, PackedShape(64, 4096), 16)
    for part in (
        *("packing.max_packed_seqs (64)", "model.seq_length: 4096", "16 heads", "2048 GiB"),
        *("16 times the limit", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "flash-attn-3", "sm_90"),
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("installed", "with_padding", "has_flash"),
    [
        ({}, True, False),
        ({"flash-attn": "2.7.3"}, True, False),
        ({"flash-attn": "2.7.3"}, False, True),
        ({"flash-attn-3": "3.0.0"}, True, True),
    ],
)
def test_what_this_process_has(
    installed: dict[str, str],
    with_padding: bool,
    has_flash: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    installed["transformer-engine"] = "2.20.2+abc"
    site = AttentionSite.here(torch.device("cpu"), with_padding=with_padding)
    assert site == AttentionSite(
        capability=None, is_deterministic=True, has_flash=has_flash, version=(2, 20)
    )
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    assert not AttentionSite.here(torch.device("cpu"), with_padding=True).is_deterministic


def test_a_model_is_asked_for_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads count per tensor-parallel rank; other layers are accepted."""
    engine = type("DotProductAttention", (nn.Module,), {"__module__": "transformer_engine.x"})
    own = type("TEDotProductAttention", (engine,), {"__module__": "megatron.core.x"})
    monkeypatch.setattr(AttentionSite, "here", classmethod(lambda *_, **__: _SITE))
    config = SimpleNamespace(num_attention_heads=4, tensor_model_parallel_size=1)
    shape, device = PackedShape(64, 2048), torch.device("cpu")
    with pytest.raises(ConfigError, match="4 heads"):
        refuse_for_layers([nn.Sequential(own())], config, shape, device)
    refuse_for_layers([nn.Sequential(nn.Linear(2, 2))], config, shape, device)
    config.tensor_model_parallel_size = 2
    refuse_for_layers([nn.Sequential(own())], config, shape, device)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"num_query_groups": 4}, False),
        ({"num_query_groups": None}, False),
        ({"context_parallel_size": 1}, False),
        ({"multi_latent_attention": True}, False),
    ],
)
def test_shared_keys_with_context_parallelism(changes: dict[str, Any], expected: bool) -> None:
    engine = type("DotProductAttention", (nn.Module,), {"__module__": "transformer_engine.x"})
    settings = {
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "context_parallel_size": 2,
        **changes,
    }
    config = SimpleNamespace(**settings)
    assert needs_tokens_in_pieces([nn.Sequential(engine())], config) == expected
    assert not needs_tokens_in_pieces([nn.Linear(2, 2)], config)


@pytest.mark.parametrize(
    ("world_size", "sizes", "counts_padding", "expected"),
    [(4, (), False, True), (4, (1,), False, False), (1, (), False, False), (4, (), True, False)],
)
def test_shared_keys_with_sizes_that_change(
    world_size: int, sizes: tuple[int, ...], counts_padding: bool, expected: bool
) -> None:
    engine = type("DotProductAttention", (nn.Module,), {"__module__": "transformer_engine.x"})
    config = SimpleNamespace(num_attention_heads=4, num_query_groups=2, context_parallel_size=1)
    limits = ContextLimits(
        world_size=world_size,
        max_tokens_per_rank=8,
        max_packed_seqs=3,
        sizes=sizes,
        counts_padding=counts_padding,
    )
    assert needs_tokens_in_pieces([engine()], config, limits) == expected
    assert all(limits.shape(size).counts_padding == counts_padding for size in limits.group_sizes)


def test_keys_are_shared_by_what_the_model_or_its_arguments_say() -> None:
    heads = {"num_attention_heads": 4, "num_query_groups": 1}
    assert shares_keys(SimpleNamespace(**heads))
    # Megatron's arguments have 1 group if heads share no keys.
    assert not shares_keys(SimpleNamespace(**heads, group_query_attention=False))
    assert shares_keys(SimpleNamespace(**heads, group_query_attention=True))
    assert not shares_keys(SimpleNamespace(num_attention_heads=4))
