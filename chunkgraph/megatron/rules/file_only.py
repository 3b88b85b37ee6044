"""The rules of features in a configuration file; elsewhere Megatron checks the same."""

from __future__ import annotations

from collections.abc import Callable

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.settings.rule import Facts, Rule

__all__ = ["FILE_ONLY_RULES"]


def _is_uneven(name: str) -> Callable[[Facts], object]:
    return lambda f: f.fp8 and getattr(f, name) % (16 * f.tensor_model_parallel_size)


def _with_experts(
    text: str, when: Callable[[Facts], object], error: type[ConfigError] = ConfigError
) -> Rule:
    return Rule(text, lambda f: f.num_moe_experts is not None and when(f), error)


FILE_ONLY_RULES = (
    Rule(
        "recompute_granularity recompute_modules: selective recomputation would recompute "
        "nothing; name parts of a layer, such as core_attn",
        lambda f: f.recompute_granularity == "selective" and not f.recompute_modules,
    ),
    Rule(
        "recompute_modules swiglu: without SwiGLU the feed-forward layer has a bias, which "
        "Megatron-core returns from the recomputed part, so that its backward recurses forever; "
        "use {swiglu=true}, or leave mlp out",
        lambda f: (
            f.recompute_granularity == "selective" and "mlp" in f.recompute_modules and not f.swiglu
        ),
    ),
    Rule(
        "fp8: only Transformer Engine's layers on a GPU support FP8; use {device=cuda} and "
        "{layer_spec=transformer_engine}, or leave it out",
        lambda f: f.fp8 and (f.layer_spec == "local" or f.device == "cpu"),
    ),
    *(
        Rule(
            f"{setting} fp8 tensor_model_parallel_size: the share of each tensor-parallel rank "
            "must be a multiple of 16; change it, or train without FP8",
            _is_uneven(setting),
        )
        for setting in ("hidden_size", "ffn_hidden_size")
    ),
    Rule(
        "expert_model_parallel_size num_moe_experts: there are no experts to split; change one of "
        "them",
        lambda f: f.num_moe_experts is None and f.expert_model_parallel_size > 1,
        TopologyError,
    ),
    _with_experts(
        "moe_router_topk num_moe_experts: a token cannot go to more experts than there are",
        lambda f: f.moe_router_topk > f.num_moe_experts,
    ),
    _with_experts(
        "expert_model_parallel_size data_parallel_size: data-parallel ranks split the experts, so "
        "the former must divide the latter; change one of them",
        lambda f: f.data_parallel_size % f.expert_model_parallel_size,
        TopologyError,
    ),
    _with_experts(
        "num_moe_experts tensor_model_parallel_size: Megatron trains experts on several "
        "tensor-parallel ranks only with sequence parallelism; use {sequence_parallel=true}",
        lambda f: f.tensor_model_parallel_size > 1 and not f.sequence_parallel,
        TopologyError,
    ),
    _with_experts(
        "moe_layer_freq num_layers: the former needs one number for each layer of the model, 1 "
        "(experts) or 0 (feed-forward)",
        lambda f: (
            f.moe_layer_freq is not None
            and (len(f.moe_layer_freq) != f.num_layers or set(f.moe_layer_freq) - {0, 1})
        ),
    ),
)
