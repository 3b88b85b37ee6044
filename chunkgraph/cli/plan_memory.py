"""Read the memory of a GPU, and the sizes of a model, for the memory that a plan needs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from chunkgraph._text import parse_bytes, shown
from chunkgraph.slots import ExpertSizes, LatentSizes, ModelSizes

_ADAM_BYTES = 8
_MASTER_BYTES = 4
_DROPLESS_ROOM = 1.2 * 1.5
"""Graphs have room for 1.2 times the largest load; a new router's is about 1.5 of an even one."""
_LATENT = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def add_gpu_memory(parser: argparse.ArgumentParser) -> None:
    """Add the option that sets the memory of a GPU."""
    parser.add_argument(
        "--gpu-memory",
        type=byte_count,
        metavar="SIZE",
        help="compare the memory of each rank with that of a GPU, such as 80GiB",
    )


def byte_count(text: str) -> int:
    """Return the bytes of an argument such as ``80GiB``.

    Raises:
        ArgumentTypeError: It is no size.
    """
    num_bytes = parse_bytes(text)
    if not num_bytes:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a size; write it as 80GiB or 80GB")
    return num_bytes


def sizes_of(
    value: Callable[[str], Any],
    *,
    seq_length: int,
    micro_batch_size: int,
    num_copies: int,
    is_local: bool,
) -> ModelSizes:
    """Return the sizes that the settings describe.

    Args:
        value: Function that returns a setting by Megatron's name, or None.
        seq_length: Number of tokens of one sequence on one rank.
        micro_batch_size: Number of sequences in one microbatch.
        num_copies: Number of ranks that hold the same weights, including those of context
            parallelism.
        is_local: Whether the layers are Megatron's own, which save attention scores.
    """
    is_float = value("params_dtype") == "float32"
    shards = num_copies if value("use_distributed_optimizer") else 1
    granularity, parts = value("recompute_granularity"), value("recompute_modules") or ()
    by_layer = value("recompute_method") == "block"
    num_recomputed = (value("recompute_num_layers") or 1) if granularity == "full" else None
    return ModelSizes(
        num_layers=value("num_layers"),
        hidden_size=value("hidden_size"),
        ffn_hidden_size=value("ffn_hidden_size"),
        num_attention_heads=value("num_attention_heads"),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        vocab_size=value("vocab_size"),
        num_query_groups=value("num_query_groups"),
        head_size=value("kv_channels"),
        latent=_latent(value),
        experts=_experts(value, shards),
        bytes_per_element=4 if is_float else 2,
        optimizer_bytes_per_parameter=_ADAM_BYTES + (0 if is_float else _MASTER_BYTES),
        num_optimizer_shards=shards,
        tensor_parallel_size=value("tensor_model_parallel_size"),
        has_sequence_parallel=bool(value("sequence_parallel")),
        has_flash_attention=not is_local or (granularity == "selective" and "core_attn" in parts),
        has_gated_mlp=bool(value("swiglu")),
        has_tied_embeddings=not value("untie_embeddings_and_output_weights"),
        recompute_group_size=1 if by_layer and num_recomputed else num_recomputed,
        num_recomputed_layers=num_recomputed if by_layer else None,
        recomputed_modules=frozenset(parts if granularity == "selective" else ()),
        num_mtp_layers=value("mtp_num_layers") or 0,
        is_deterministic=bool(value("deterministic") or value("deterministic_mode")),
        is_quantized=bool(value("fp8")),
        has_quantized_weights=bool(value("fp8_param_gather")),
    )


def omissions_of(value: Callable[[str], Any]) -> list[str]:
    """Return a line on what the settings use and the estimate does not count, if there is any."""
    if value("moe_token_dispatcher_type") == "flex":
        return ["Memory does not count: DeepEP's buffers."]
    return []


def _latent(value: Callable[[str], Any]) -> LatentSizes | None:
    if not value("multi_latent_attention"):
        return None
    sizes = {name: size for name in _LATENT if (size := value(name)) is not None}
    return LatentSizes(q_lora_rank=value("q_lora_rank"), **sizes)


def _experts(value: Callable[[str], Any], num_shards: int) -> ExpertSizes | None:
    num_experts = value("num_moe_experts")
    if not num_experts:
        return None
    num_ranks = value("expert_model_parallel_size") or 1
    num_copies = num_shards * value("tensor_model_parallel_size") // num_ranks
    num_local, top_k = -(-num_experts // num_ranks), value("moe_router_topk") or 1
    factor = value("moe_expert_capacity_factor") or value("moe_expert_rank_capacity_factor")
    room_for_all = num_ranks * min(top_k, num_local) / top_k
    return ExpertSizes(
        num_experts=num_experts,
        num_local_experts=num_local,
        top_k=top_k,
        ffn_hidden_size=value("moe_ffn_hidden_size") or value("ffn_hidden_size"),
        shared_ffn_hidden_size=value("moe_shared_expert_intermediate_size") or 0,
        num_optimizer_shards=max(1, num_copies) if num_shards > 1 else 1,
        room=factor or min(_DROPLESS_ROOM, room_for_all),
    )
