from __future__ import annotations

import dataclasses

import pytest

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.slots import ExpertSizes, LatentSizes, ModelSizes, estimate_memory, plan_slots

# GPT-3's layer, as in the paper: s 2048, b 1, h 12288, a 96, ffn 4 h, 16-bit.
GPT3 = ModelSizes(
    num_layers=96,
    hidden_size=12288,
    ffn_hidden_size=4 * 12288,
    num_attention_heads=96,
    seq_length=2048,
    micro_batch_size=1,
    vocab_size=51200,
    has_flash_attention=False,
)
SBH = 2048 * 12288


def test_layer_bytes_are_the_papers():
    # Korthikanti et al. 2022: s b h (34 + 5 a s / h), here 34 + 80.
    assert GPT3.layer_activation_bytes == SBH * (34 + 80)
    # With tensor parallel size 8: s b h (10 + 24 / 8 + 80 / 8).
    split = dataclasses.replace(GPT3, tensor_parallel_size=8)
    assert split.layer_activation_bytes == SBH * (10 + 3 + 10)


def test_flash_attention_keeps_no_scores():
    flash = dataclasses.replace(GPT3, has_flash_attention=True)
    assert flash.layer_activation_bytes == SBH * 34 + 4 * 96 * 2048


def test_deterministic_attention_adds_up_parts_of_256_keys():
    flash = dataclasses.replace(GPT3, has_flash_attention=True, tensor_parallel_size=8)
    ordered = dataclasses.replace(flash, is_deterministic=True)
    scratch, more = (
        estimate_memory(plan_slots(1, rank=0), m).scratch_bytes for m in (flash, ordered)
    )
    assert more - scratch == 2048 // 256 * SBH * 4 // 8
    unfused = dataclasses.replace(GPT3, is_deterministic=True)
    assert estimate_memory(plan_slots(1, rank=0), unfused) == estimate_memory(
        plan_slots(1, rank=0), GPT3
    )


def test_recomputed_layers_keep_their_inputs_alone():
    plan = plan_slots(4, 2, rank=0)  # 12 layers a chunk
    pairs = estimate_memory(plan, dataclasses.replace(GPT3, recompute_group_size=2))
    forward = (4 * 2 + 4 * 4) * SBH  # of one layer: hidden states, and both middles of the MLP
    assert pairs.slot_bytes_per_chunk == ((6 + 1) * 2 * SBH + forward,) * 2
    assert pairs.scratch_bytes == estimate_memory(plan, GPT3).scratch_bytes + SBH * 114
    block = dataclasses.replace(GPT3, recompute_group_size=1, num_recomputed_layers=5)
    one_slot = 7 * SBH * 114 + 6 * 2 * SBH + forward
    assert estimate_memory(plan, block).slot_bytes_per_chunk == (one_slot,) * 2


def test_recomputed_modules_are_scratch_of_one_layer():
    plan = plan_slots(1, 1, rank=0)
    whole = estimate_memory(plan, GPT3)
    for modules, kept in ({"mlp"}, 4 * 4 * 1), ({"layernorm"}, 4), ({"mlp", "layernorm"}, 20):
        part = dataclasses.replace(GPT3, recomputed_modules=frozenset(modules))
        assert GPT3.layer_activation_bytes - part.layer_activation_bytes == kept * SBH
        assert estimate_memory(plan, part).scratch_bytes == whole.scratch_bytes


def test_quantized_layers_keep_bytes_and_copies_of_weights():
    quantized = dataclasses.replace(GPT3, is_quantized=True)
    # One byte instead of two of the inputs of attention, of both products of the MLP (h + h + 4 h),
    # and one more of the output projection's input, which attention keeps, too.
    assert GPT3.layer_activation_bytes - quantized.layer_activation_bytes == (1 + 1 + 4 - 1) * SBH
    plan = plan_slots(1, 1, rank=0)
    plain, with_copies, only_copies = (
        estimate_memory(plan, model).parameter_bytes
        for model in (GPT3, quantized, dataclasses.replace(quantized, has_quantized_weights=True))
    )
    assert with_copies - plain == 96 * 12 * 12288**2 * 2  # not of the embedding
    assert only_copies == plain


def test_layers_of_further_tokens_are_on_the_last_rank():
    more = dataclasses.replace(GPT3, num_mtp_layers=2)
    first, last = (plan_slots(2, 2, rank=rank) for rank in (0, 1))
    assert estimate_memory(first, more) == estimate_memory(first, GPT3)
    plain, estimate = estimate_memory(last, GPT3), estimate_memory(last, more)
    one, two = estimate.slot_bytes_per_chunk
    assert one == plain.slot_bytes_per_chunk[0]
    assert two - one == 2 * (SBH * 114 + 4 * 2 * SBH)
    assert estimate.logit_bytes == 3 * plain.logit_bytes
    assert estimate.parameter_bytes - plain.parameter_bytes == 2 * 2 * (12 + 2) * 12288**2


def test_bytes_of_a_rank():
    plan = plan_slots(4, 2, rank=0)
    estimate = estimate_memory(plan, GPT3)
    one_slot = 12 * SBH * 114 + 2 * SBH
    layer = 12 * 12288**2
    assert estimate.slot_bytes_per_chunk == (one_slot, one_slot)
    assert estimate.slot_bytes == (8 + 4) * one_slot
    assert plan.peak_in_flight == 11
    assert estimate.scratch_bytes == SBH * 114 + 2 * layer
    assert estimate.parameter_bytes == 2 * (24 * layer + 51200 * 12288)
    assert estimate.gradient_bytes == 2 * estimate.parameter_bytes
    assert estimate.total_bytes == (
        estimate.slot_bytes
        + estimate.scratch_bytes
        + estimate.parameter_bytes
        + estimate.gradient_bytes
        + estimate.optimizer_bytes
    )
    assert estimate.optimizer_bytes == 12 * (24 * layer + 51200 * 12288)
    assert estimate.logit_bytes == 0
    assert estimate_memory(plan_slots(4, rank=3), GPT3).logit_bytes == 2048 * 51200 * (2 + 4)


def test_embeddings_are_on_the_first_and_last_rank():
    embedding = 2 * 51200 * 12288
    middle = estimate_memory(plan_slots(4, rank=1), GPT3).parameter_bytes
    for rank in (0, 3):
        parameter_bytes = estimate_memory(plan_slots(4, rank=rank), GPT3).parameter_bytes
        assert parameter_bytes == middle + embedding
    alone = estimate_memory(plan_slots(1, rank=0), GPT3).parameter_bytes
    assert alone == 4 * middle + 2 * embedding
    tied = dataclasses.replace(GPT3, has_tied_embeddings=True)
    assert estimate_memory(plan_slots(1, rank=0), tied).parameter_bytes == alone - embedding


def test_a_gate_adds_a_matrix():
    gated = dataclasses.replace(GPT3, has_gated_mlp=True)
    assert gated.num_layer_parameters - GPT3.num_layer_parameters == 4 * 12288**2
    assert gated.layer_activation_bytes - GPT3.layer_activation_bytes == 2 * 4 * SBH


LLAMA_3_8B = ModelSizes(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    seq_length=8192,
    micro_batch_size=1,
    vocab_size=128256,
    has_gated_mlp=True,
)


def test_parameters_of_known_models():
    """Without norms: 8.03 billion, and 46.7 of Mixtral 8x7B."""
    alone = estimate_memory(plan_slots(1, rank=0), LLAMA_3_8B)
    assert alone.parameter_bytes / 2 == pytest.approx(8.03e9, rel=0.001)
    experts = ExpertSizes(num_experts=8, num_local_experts=8, top_k=2, ffn_hidden_size=14336)
    mixtral = dataclasses.replace(LLAMA_3_8B, vocab_size=32000, experts=experts)
    weights = estimate_memory(plan_slots(1, rank=0), mixtral).parameter_bytes / 2
    assert weights == pytest.approx(46.7e9, rel=0.001)


def test_latent_attention_has_the_parameters_of_deepseek_v3():
    latent = LatentSizes(q_lora_rank=1536, kv_lora_rank=512)
    assert latent.num_parameters(7168, 128) == 187_105_280


def test_optimizer_state_is_shared():
    experts = ExpertSizes(
        num_experts=8, num_local_experts=2, top_k=2, ffn_hidden_size=64, num_optimizer_shards=4
    )
    model = dataclasses.replace(LLAMA_3_8B, experts=experts, num_optimizer_shards=16)
    estimate = estimate_memory(plan_slots(4, rank=1), model)
    num_shared, num_of_experts = 8 * model.num_shared_parameters, 8 * model.num_expert_parameters
    assert estimate.optimizer_bytes == 12 * (num_shared // 16 + num_of_experts // 4)
    assert estimate.parameter_bytes == 2 * (num_shared + num_of_experts)


def test_sequence_parallelism_splits_all_of_a_layer():
    split = dataclasses.replace(GPT3, tensor_parallel_size=8, has_sequence_parallel=True)
    assert split.layer_activation_bytes == GPT3.layer_activation_bytes // 8
    assert split.hidden_bytes == GPT3.hidden_bytes // 8


def test_layers_must_divide():
    with pytest.raises(TopologyError, match=r"96 layers .* 10 stages \(5 ranks x 2 chunks\)"):
        estimate_memory(plan_slots(5, 2, rank=0), GPT3)


def test_sizes_must_be_positive():
    with pytest.raises(ConfigError, match="hidden_size is 0"):
        dataclasses.replace(GPT3, hidden_size=0)
