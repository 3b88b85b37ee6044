"""`attach` refuses models and settings by name, before it changes the model."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from in_process import block_of
from refused import refused
from torch import nn

from chunkgraph.errors import CaptureError, ConfigError
from chunkgraph.megatron import attach
from chunkgraph.megatron.features.fp8 import Fp8State
from chunkgraph.megatron.refusals import MODEL_RULES

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp4", "e2m1"),
        ("distribute_saved_activations", True),
        ("cpu_offloading", True),
        ("fine_grained_activation_offloading", True),
        ("overlap_moe_expert_parallel_comm", True),
        ("delay_wgrad_compute", True),
        ("hybrid_context_parallel", True),
        ("variable_seq_lengths", True),
        ("enable_autocast", True),
        ("num_microbatches_with_partial_activation_checkpoints", 1),
        ("gtp_weight_remat_size", 2),
        ("expert_gtp_weight_remat_size", 2),
        ("overlap_dispatch_backward_with_experts_wgrad", True),
        ("use_transformer_engine_op_fuser", True),
        ("cuda_graph_impl", "local"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    chunks: list[nn.Module], name: str, value: object
) -> None:
    setattr(chunks[0].config, name, value)
    instead = ".*use max_slot_memory" if "offloading" in name else ""
    with pytest.raises(ConfigError, match=rf"{name}={value!r}{instead}"):
        attach(chunks)
    assert "forward" not in block_of(chunks).__dict__


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fp8_param", True, "fp8_param=True: the installed Transformer Engine renews"),
        ("fp8_dot_product_attention", True, "fp8_dot_product_attention=True"),
        ("fp8_recipe", "mxfp8", "fp8_recipe='mxfp8': its quantizers are untested"),
        (
            "use_transformer_engine_op_fuser",
            True,
            "use_transformer_engine_op_fuser=True with fp8=",
        ),
        ("recompute_granularity", "full", "recompute_granularity='full' with fp8='e4m3'"),
    ],
)
def test_what_does_not_go_with_fp8_is_refused(
    chunks: list[nn.Module], name: str, value: object, message: str
) -> None:
    config = chunks[0].config
    rules = (*MODEL_RULES, *Fp8State.rules)
    facts = {"is_rng_graph_safe": True, "has_transformer_engine": True}
    config.fp8, config.fp8_recipe = "e4m3", "tensorwise"
    config.hidden_dropout = config.attention_dropout = 0.0
    assert refused(rules, vars(config), **facts) == []
    setattr(config, name, value)
    (refusal,) = refused(rules, vars(config), **facts)
    assert refusal.startswith(message)


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="Transformer Engine is installed",
)
def test_fp8_needs_transformer_engine(chunks: list[nn.Module]) -> None:
    chunks[0].config.fp8, chunks[0].config.fp8_recipe = "e4m3", "delayed"
    with pytest.raises(ConfigError, match=r"fp8='e4m3': it needs Transformer Engine.*\[te\]"):
        attach(chunks)


def test_fully_sharded_parameters_are_refused(chunks: list[nn.Module]) -> None:
    class FullyShardedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    with pytest.raises(ConfigError, match="FSDP"):
        attach([FullyShardedDataParallel(chunks[0])])


def test_swapped_messages_between_two_ranks_are_refused(chunks: list[nn.Module]) -> None:
    config = chunks[0].config
    config.pipeline_model_parallel_size, config.batch_p2p_comm = 2, True
    facts = {"is_rng_graph_safe": True, "num_model_chunks": 2}
    (refusal,) = refused(MODEL_RULES, vars(config), **facts)
    assert "overlap_p2p_comm=True" in refusal
    config.overlap_p2p_comm = True
    assert refused(MODEL_RULES, vars(config), **facts) == []


def test_random_numbers_need_a_graph_safe_tracker(
    chunks: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    monkeypatch.setattr(get_cuda_rng_tracker(), "use_cudagraphable_rng", False)
    with pytest.raises(ConfigError, match="graph-safe"):
        attach(chunks)
    chunks[0].config.hidden_dropout = 0.0
    attach(chunks).detach()
    chunks[0].config.moe_router_force_load_balancing = True
    message = "moe_router_force_load_balancing=True: the RNG tracker is not graph-safe"
    with pytest.raises(ConfigError, match=message):
        attach(chunks)


def test_other_modules_are_refused(one_rank: torch.device) -> None:
    with pytest.raises(ConfigError, match="not a Megatron-core model"):
        attach([nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match="no model chunk"):
        attach([])


# Hooks on modules inside a captured part, which a replay does not run, are refused.


def keep(*_: Any) -> None:
    pass


def _norm(chunk: nn.Module) -> nn.Module:
    return next(m for name, m in chunk.named_modules() if name.endswith("final_layernorm"))


def test_a_users_hook_is_refused_by_the_capture(chunks: list[Any]) -> None:
    graphs = attach(chunks, scope="block")
    _norm(chunks[0]).register_forward_hook(keep)
    block = next(m for name, m in chunks[0].named_modules() if name.endswith("decoder"))

    def schedule(**_: Any) -> None:
        hidden = torch.ones(16, 2, 32, requires_grad=True)
        mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
        block(hidden_states=hidden, attention_mask=mask).sum().backward()

    wrapped = graphs.wrap_forward_backward(schedule)
    wrapped(num_microbatches=1)
    with pytest.raises(CaptureError, match=r"hook on final_layernorm .*keep"):
        wrapped(num_microbatches=1)
