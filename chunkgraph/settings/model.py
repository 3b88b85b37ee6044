"""The section ``model``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chunkgraph.settings.rule import Rule, recomputes
from chunkgraph.settings.setting import POSITIVE, Bounds, setting

__all__ = ["FP8_RULES", "RECOMPUTE_RULES", "ModelConfig"]

_PROBABILITY = Bounds(minimum=0, below=1)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The GPT or hybrid model to train."""

    num_layers: int = setting(
        help="Number of layers in the whole model, over all pipeline stages.",
        bounds=POSITIVE,
        megatron="--num-layers",
        example=8,
    )
    hidden_size: int = setting(
        help="Width of the residual stream, in elements.",
        bounds=POSITIVE,
        megatron="--hidden-size",
        example=64,
    )
    ffn_hidden_size: int = setting(
        help="Width of the feed-forward layer, in elements.",
        bounds=POSITIVE,
        megatron="--ffn-hidden-size",
        example=128,
    )
    num_attention_heads: int = setting(
        help="Number of attention heads per layer, over all tensor-parallel ranks.",
        bounds=POSITIVE,
        megatron="--num-attention-heads",
        example=4,
    )
    seq_length: int = setting(
        help="Number of tokens per sequence.",
        bounds=POSITIVE,
        megatron="--seq-length",
        example=32,
    )
    vocab_size: int = setting(
        264,
        help="Rows of the embedding. The built-in text needs 257 tokens (256 bytes and the end of "
        "a document); the default rounds up to a multiple of 8.",
    )
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = setting(
        "rope",
        help="How tokens encode their position.",
        megatron="--position-embedding-type",
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = setting(
        "LayerNorm",
        help="Normalization before attention and feed-forward.",
        megatron="--normalization",
    )
    swiglu: bool = setting(
        False,
        help="Use gated SiLU instead of GELU in the feed-forward layer.",
        megatron="--swiglu",
    )
    hidden_dropout: float = setting(
        0.0,
        help="Probability of dropping an element of a layer's output.",
        bounds=_PROBABILITY,
        megatron="--hidden-dropout",
    )
    attention_dropout: float = setting(
        0.0,
        help="Probability of dropping an attention weight.",
        bounds=_PROBABILITY,
        megatron="--attention-dropout",
    )
    untie_embeddings_and_output_weights: bool = setting(
        True,
        help="Give the output layer its own weights.",
        megatron="--untie-embeddings-and-output-weights",
    )
    params_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        help="Type of parameters and activations. Gradients accumulate in float32.",
    )
    recompute_granularity: Literal["full", "selective"] | None = setting(
        None,
        help="Activations to recompute in the backward pass instead of saving: whole layers "
        "(full), the parts of a layer in recompute_modules (selective), or none (null).",
        megatron="--recompute-granularity",
    )
    recompute_method: Literal["uniform", "block"] | None = setting(
        None,
        help="With full recomputation: recompute all layers in groups of recompute_num_layers "
        "(uniform), or only that many layers of each chunk, one by one (block).",
        megatron="--recompute-method",
    )
    recompute_num_layers: int | None = setting(
        None,
        help="With full recomputation: layers per group (uniform) or per chunk (block).",
        bounds=POSITIVE,
        megatron="--recompute-num-layers",
    )
    recompute_modules: tuple[str, ...] = setting(
        ("core_attn",),
        help="With selective recomputation: core_attn, mlp, layernorm, and any other part that "
        "the installed Megatron-core offers.",
        megatron="--recompute-modules",
    )
    fp8: Literal["hybrid", "e4m3"] | None = setting(
        None,
        help="FP8 format for the matrix products of layers: E4M3 with E5M2 for gradients (hybrid), "
        "E4M3 only, or no FP8 (null). Needs Transformer Engine's layers.",
        megatron="--fp8-format",
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise"] = setting(
        "delayed",
        help="With fp8, where scales come from: earlier microbatches (delayed), the tensor itself "
        "(tensorwise), or each block of it (blockwise).",
        megatron="--fp8-recipe",
        needs="model.fp8",
    )
    hybrid_layer_pattern: str | None = setting(
        None,
        help="Layers of a hybrid model, one character each: M (Mamba-2), * (attention), - "
        "(feed-forward), E (experts). | separates pipeline stages: use it between all of them or "
        "not at all. num_layers counts every layer. Quote the pattern in YAML. Null: a GPT model.",
    )
    mamba_state_dim: int = setting(
        128,
        help="State elements per channel of a Mamba head.",
        bounds=POSITIVE,
        needs="model.hybrid_layer_pattern",
    )
    mamba_head_dim: int = setting(
        64,
        help="Width of a Mamba head, in elements.",
        bounds=POSITIVE,
        needs="model.hybrid_layer_pattern",
    )
    mamba_num_groups: int = setting(
        8,
        help="Groups of Mamba heads that share their state's input and output projections.",
        bounds=POSITIVE,
        needs="model.hybrid_layer_pattern",
    )
    mamba_num_heads: int | None = setting(
        None,
        help="Mamba heads per layer. Null: enough for twice hidden_size.",
        bounds=POSITIVE,
        needs="model.hybrid_layer_pattern",
    )
    layer_spec: str = setting(
        "auto",
        help="Layer implementation: local, transformer_engine, auto (local on a CPU, "
        "transformer_engine on a GPU), or package.module:function that returns a Megatron module "
        "spec. The spec describes a GPT layer, whose attention and feed-forward a hybrid model "
        "reuses, or a whole hybrid stack.",
    )


FP8_RULES = (
    Rule(
        "recompute_granularity fp8: Transformer Engine's recomputation keeps the scales of the "
        "first pass in a Python queue, which a replay does not advance; recompute only core_attn "
        "({recompute_granularity=selective}), or nothing",
        lambda f: (
            f.fp8_recipe
            and (
                f.recompute_granularity == "full"
                or (
                    f.recompute_granularity == "selective"
                    and set(f.recompute_modules or ()) - {"core_attn"}
                )
            )
        ),
    ),
)
"""Rules of a model in FP8, from a file, a program or a command line."""

RECOMPUTE_RULES = (
    Rule(
        "recompute_granularity hidden_dropout attention_dropout: a replay cannot repeat the "
        "dropout masks of what is recomputed; set the dropout to 0, or recompute parts of a layer "
        "without dropout",
        lambda f: (
            (f.hidden_dropout and f.recompute_granularity == "full")
            or (f.attention_dropout and recomputes(f, "core_attn"))
        ),
    ),
)
"""Rules of a model whose activations are recomputed."""
