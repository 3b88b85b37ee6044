"""Which settings of Megatron's flexible dispatcher a chunk graph can hold: HybridEP's alone."""

from __future__ import annotations

import math
from typing import Any

from chunkgraph.engine import CaptureOptions
from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.megatron.hybridep_needs import hybridep_is_missing

__all__ = ["asks_for_hybridep", "flex_refusals", "refuse_for_hybridep"]

_STATIC = (
    "set moe_token_dispatcher_type='alltoall', moe_expert_capacity_factor and "
    "moe_pad_expert_input_to_capacity=True"
)
_OTHER_BACKENDS = {
    "deepep": "it waits on the host for the number of rows that came (Megatron's dispatcher does "
    "not ask for DeepEP's mode of the worst case)",
    "ncclep": "a rank that is over its budget ends the process, so that no step can be run anew",
}


def asks_for_hybridep(config: Any) -> bool:
    """Whether Megatron's config, or arguments, name HybridEP."""
    return bool(
        getattr(config, "num_moe_experts", None)
        and getattr(config, "moe_token_dispatcher_type", None) == "flex"
        and getattr(config, "moe_flex_dispatcher_backend", None) == "hybridep"
    )


def flex_refusals(config: Any, token_drops: str) -> list[str]:
    """What keeps ``moe_token_dispatcher_type='flex'`` out of a graph, each with what to do.

    Args:
        config: anything that has TransformerConfig's fields as attributes, or some of them.
        token_drops: see `attach`.
    """
    backend = getattr(config, "moe_flex_dispatcher_backend", None) or "deepep"
    if backend != "hybridep":
        why = (
            f"moe_token_dispatcher_type='flex' with moe_flex_dispatcher_backend={backend!r}: "
            f"{_OTHER_BACKENDS.get(backend, 'not known')}; only DeepEP's HybridEP can dispatch in "
            f"a graph ('hybridep', with moe_expert_rank_capacity_factor); or {_STATIC}"
        )
        return [why]
    return [
        *_budget_refusals(config, token_drops),
        *_product_refusals(config),
        *_untried(config),
    ]


def refuse_for_hybridep(config: Any, options: CaptureOptions | None) -> None:
    """Check what HybridEP needs besides Megatron's settings, if they ask for it.

    Args:
        config: Megatron's TransformerConfig.
        options: when and how to capture; None: as always.

    Raises:
        ConfigError: no step would run eagerly before the capture.
        MissingDependencyError: what it needs of the machine is not there.
    """
    if not asks_for_hybridep(config):
        return
    if options is not None and options.num_warmup_steps < 1:
        raise ConfigError(
            "num_warmup_steps=0 with HybridEP: its buffer is made, and its kernels are compiled, "
            "in the first eager step. Make it 1 or more."
        )
    if (missing := hybridep_is_missing()) is not None:
        raise MissingDependencyError(missing)


def _budget_refusals(config: Any, token_drops: str) -> list[str]:
    found = []
    name = "moe_expert_rank_capacity_factor"
    factor = getattr(config, name, None)
    if factor is None or not math.isfinite(factor):
        found.append(
            f"moe_flex_dispatcher_backend='hybridep' without {name}: how many rows come depends on "
            f"the tokens, and a graph has fixed shapes; set it to 1 or more, or {_STATIC}"
        )
    elif factor < 1:
        found.append(
            f"{name}={factor!r}: below 1 ranks drop tokens in every step; set it to 1 or more"
        )
    capacity = getattr(config, "moe_expert_capacity_factor", None)
    if (capacity is not None and capacity >= 0) or getattr(
        config, "moe_pad_expert_input_to_capacity", False
    ):
        found.append(
            f"moe_expert_capacity_factor={capacity!r} with HybridEP: the room is that of a rank; "
            f"leave it and moe_pad_expert_input_to_capacity out, and set {name}"
        )
    if token_drops not in ("raise", "rerun"):
        found.append(
            f"token_drops={token_drops!r} with HybridEP: it only tells that a rank had no room; "
            "say 'rerun', which runs such a step anew, or 'raise'"
        )
    return found


def _product_refusals(config: Any) -> list[str]:
    why = "only that grouped product takes the number of tokens of each expert from the device"
    needs = {
        "use_transformer_engine_op_fuser": True,
        "moe_grouped_gemm": True,
        "gated_linear_unit": True,
    }
    found = []
    for field, wanted in needs.items():
        # Of arguments it is called otherwise.
        value = getattr(config, field, None)
        if field == "gated_linear_unit" and value is None:
            value = getattr(config, "swiglu", None)
        if bool(value) != wanted:
            found.append(f"{field}={value!r} with HybridEP: {why}; turn it on, or {_STATIC}")
    dtype = getattr(config, "moe_router_dtype", None)
    if dtype != "fp32":
        found.append(
            f"moe_router_dtype={dtype!r} with HybridEP: it sends probabilities in float32; set it "
            "to 'fp32'"
        )
    if not (getattr(config, "bf16", False) or getattr(config, "fp16", False)):
        found.append("neither bf16 nor fp16 with HybridEP: it sends rows of 2 bytes; set bf16")
    return found


def _untried(config: Any) -> list[str]:
    recomputed = set(getattr(config, "recompute_modules", None) or ())
    how = getattr(config, "recompute_granularity", None)
    asked = {
        f"fp8={getattr(config, 'fp8', None)!r}": getattr(config, "fp8", None),
        f"fp4={getattr(config, 'fp4', None)!r}": getattr(config, "fp4", None),
        f"recompute_granularity={how!r} of experts": how == "full"
        or (how == "selective" and {"moe", "moe_act"} & recomputed),
        "moe_permute_fusion_into_hybridep=True": getattr(
            config, "moe_permute_fusion_into_hybridep", False
        ),
        "moe_latent_size": getattr(config, "moe_latent_size", None),
    }
    found = [
        f"{what} with HybridEP: not tried; leave it out" for what, is_it in asked.items() if is_it
    ]
    ranks = getattr(config, "expert_tensor_parallel_size", None)
    if (ranks or 1) > 1:
        found.append(
            f"expert_tensor_parallel_size={ranks} with HybridEP: its grouped product cannot be "
            "split; set it to 1"
        )
    return found
