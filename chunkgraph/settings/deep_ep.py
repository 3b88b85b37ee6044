"""What dispatch through DeepEP (``moe.moe_token_dispatcher_type: flex``) must satisfy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from chunkgraph.errors import ConfigError

if TYPE_CHECKING:
    from chunkgraph.settings.config import Config, ExpertConfig

__all__ = ["DEEPEP_RANKS", "check_flex", "deep_ep_limits"]

DEEPEP_RANKS = (2, 4, 8)
"""Ranks of a node between which DeepEP itself can dispatch in a graph; it has kernels for these."""
_MOST_HIDDEN, _HIDDEN_MULTIPLE, _MOST_TOPK = 8176, 16, 32
_OTHERWISE = "moe.moe_token_dispatcher_type=alltoall with moe.moe_expert_capacity_factor needs none"


def deep_ep_limits(hidden_size: int, moe_router_topk: int) -> list[str]:
    """What of a model DeepEP's kernels of one node cannot take; they stop the GPU where it is.

    Read in its source (release 1.2.1, ``intranode.cu``: asserts on the device).
    """
    found = []
    if hidden_size > _MOST_HIDDEN or hidden_size % _HIDDEN_MULTIPLE:
        found.append(
            f"hidden_size={hidden_size} with DeepEP: its kernels take up to {_MOST_HIDDEN}, a "
            f"multiple of {_HIDDEN_MULTIPLE}"
        )
    if moe_router_topk > _MOST_TOPK:
        found.append(
            f"moe_router_topk={moe_router_topk} with DeepEP: its kernels take up to {_MOST_TOPK}"
        )
    return found


def check_flex(config: Config) -> None:
    """Check what belongs to ``flex``, or to nothing without it.

    Raises:
        ConfigError: A value is out of range, or two settings cannot go together.
    """
    moe = config.moe
    if moe.moe_token_dispatcher_type != "flex":
        _refuse_without_flex(moe)
        return
    backend = moe.moe_flex_dispatcher_backend
    if backend is None:
        raise ConfigError(
            "moe.moe_flex_dispatcher_backend is null with moe.moe_token_dispatcher_type=flex. Set "
            f"it to hybridep, or to deepep for DeepEP's dispatch within a node; {_OTHERWISE}."
        )
    ranks = config.pipeline.expert_model_parallel_size
    if backend == "deepep" and ranks not in DEEPEP_RANKS:
        raise ConfigError(
            f"pipeline.expert_model_parallel_size is {ranks} with deepep, which dispatches in a "
            f"graph between {', '.join(map(str, DEEPEP_RANKS))} ranks of a node. Set it to one "
            "of these, or moe.moe_flex_dispatcher_backend to hybridep."
        )
    limits = deep_ep_limits(config.model.hidden_size, moe.moe_router_topk)
    if backend == "deepep" and limits:
        raise ConfigError(f"{'; '.join(limits)}. Set moe.moe_flex_dispatcher_backend to hybridep.")
    factor = moe.moe_expert_rank_capacity_factor
    if factor is None or not (factor >= 1 and math.isfinite(factor)):
        raise ConfigError(
            f"moe.moe_expert_rank_capacity_factor is {'null' if factor is None else factor}: "
            f"{backend} needs a fixed number of rows for a graph, and below 1 ranks drop tokens in "
            "every step. Set it to 1 or more; the highest load decides how much more."
        )
    if moe.moe_expert_capacity_factor is not None:
        raise ConfigError(
            f"moe.moe_expert_capacity_factor is {moe.moe_expert_capacity_factor} with {backend}, "
            "whose room is that of a rank. Set it to null; moe.moe_expert_rank_capacity_factor "
            "says how much."
        )
    if moe.token_drops not in ("raise", "rerun"):
        raise ConfigError(
            f"moe.token_drops is {moe.token_drops} with {backend}, which only tells that a rank "
            "had no room. Set it to rerun, which runs such a step anew, or raise."
        )
    needs = {
        "moe.use_transformer_engine_op_fuser=true": moe.use_transformer_engine_op_fuser,
        "moe.moe_grouped_gemm=true": moe.moe_grouped_gemm,
        "moe.moe_router_dtype=fp32": moe.moe_router_dtype == "fp32",
        "model.swiglu=true": config.model.swiglu,
        "model.params_dtype=bfloat16": config.model.params_dtype == "bfloat16",
    }
    missing = [need for need, is_met in needs.items() if not is_met]
    if missing:
        raise ConfigError(
            f"moe.moe_flex_dispatcher_backend={backend} needs {', '.join(missing)}: only that "
            "grouped product takes the number of tokens of each expert from the device."
        )
    _check_untried(config, backend)


def _refuse_without_flex(moe: ExpertConfig) -> None:
    given = {
        "moe.moe_flex_dispatcher_backend": moe.moe_flex_dispatcher_backend,
        "moe.moe_expert_rank_capacity_factor": moe.moe_expert_rank_capacity_factor,
        "moe.use_transformer_engine_op_fuser": moe.use_transformer_engine_op_fuser or None,
    }
    for path, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{path} is {str(value).lower()}, but moe.moe_token_dispatcher_type is "
                f"{moe.moe_token_dispatcher_type}; it belongs to flex. Set one of them."
            )


def _check_untried(config: Config, backend: str) -> None:
    model = config.model
    untried = {
        f"model.fp8={model.fp8}": model.fp8 is not None,
        f"model.recompute_granularity={model.recompute_granularity}": (
            model.recompute_granularity == "full"
            or (
                model.recompute_granularity == "selective"
                and bool({"moe", "moe_act"} & set(model.recompute_modules))
            )
        ),
        "capture.num_warmup_steps=0 (DeepEP's buffer is made in an eager step)": (
            config.capture.enabled and config.capture.num_warmup_steps < 1
        ),
    }
    for what, is_asked in untried.items():
        if is_asked:
            raise ConfigError(
                f"moe.moe_flex_dispatcher_backend is {backend} together with {what}, which was not "
                f"tried. Leave one of them out; {_OTHERWISE}."
            )
