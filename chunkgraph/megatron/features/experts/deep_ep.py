"""Which settings of Megatron's flexible dispatcher a graph can hold: DeepEP's with a budget."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from chunkgraph.engine import CaptureOptions
from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.experts.deep_ep_needs import BACKEND_NAMES, deep_ep_is_missing
from chunkgraph.megatron.features.experts.rank_budget import flex_backend
from chunkgraph.settings import DEEPEP_RANKS, deep_ep_limits

__all__ = [
    "BACKEND_NAMES",
    "expert_ranks",
    "flex_refusals",
    "ranks_of_other_nodes",
    "refuse_for_deep_ep",
]

_STATIC = (
    "set moe_token_dispatcher_type='alltoall', moe_expert_capacity_factor and "
    "moe_pad_expert_input_to_capacity=True"
)
_OTHER_BACKENDS = {
    "ncclep": "a rank that is over its budget ends the process, so that no step can be run anew",
}
_FACTOR = "moe_expert_rank_capacity_factor"


def flex_refusals(config: Any, token_drops: str) -> list[str]:
    """What keeps ``moe_token_dispatcher_type='flex'`` out of a graph, each with what to do.

    Args:
        config: anything that has TransformerConfig's fields as attributes, or some of them.
        token_drops: see `attach`.
    """
    backend = flex_backend(config)
    if backend not in BACKEND_NAMES:
        known = _OTHER_BACKENDS.get(str(backend), "not known")
        why = (
            f"moe_token_dispatcher_type='flex' with moe_flex_dispatcher_backend={backend!r}: "
            f"{known}; only DeepEP can dispatch in a graph "
            f"('hybridep', or 'deepep' within a node, with {_FACTOR}); or {_STATIC}"
        )
        return [why]
    name = BACKEND_NAMES[backend]
    ranks = getattr(config, "expert_model_parallel_size", None) or 1
    found = []
    if backend == "deepep" and ranks not in DEEPEP_RANKS:
        found.append(
            f"expert_model_parallel_size={ranks} with {name}: it dispatches in a graph between "
            f"{', '.join(map(str, DEEPEP_RANKS))} ranks of a node; set it to one of these, or "
            "moe_flex_dispatcher_backend to 'hybridep'"
        )
    if backend == "deepep":
        sizes = (getattr(config, name, None) or 0 for name in ("hidden_size", "moe_router_topk"))
        found += [
            f"{limit}; set moe_flex_dispatcher_backend to 'hybridep'"
            for limit in deep_ep_limits(*sizes)
        ]
        if getattr(config, "fp16", False):
            found.append("fp16 with DeepEP: it adds up bfloat16 alone; set bf16")
    return [
        *found,
        *_budget_refusals(config, backend, token_drops),
        *_product_refusals(config, name),
        *_untried(config, name),
    ]


def refuse_for_deep_ep(config: Any, options: CaptureOptions | None) -> None:
    """Check what DeepEP needs besides Megatron's settings, if they ask for it.

    Args:
        config: Megatron's TransformerConfig.
        options: when and how to capture; None: as always.

    Raises:
        ConfigError: no step would run eagerly before the capture, or experts are on several nodes
            where DeepEP dispatches within one.
        MissingDependencyError: what it needs of the machine is not there.
    """
    backend = flex_backend(config)
    if backend not in BACKEND_NAMES:
        return
    if options is not None and options.num_warmup_steps < 1:
        raise ConfigError(
            f"num_warmup_steps=0 with {BACKEND_NAMES[backend]}: its buffer is made, and kernels "
            "are compiled, in the first eager step. Make it 1 or more."
        )
    if backend == "deepep" and (ranks := expert_ranks()):
        here = dist.get_rank()
        if others := ranks_of_other_nodes(ranks, here, os.environ):
            raise ConfigError(
                f"rank {here}: experts are on the ranks {ranks}, of which {others} are on other "
                "nodes, and DeepEP dispatches within a node in a graph. Make "
                "expert_model_parallel_size smaller, number the ranks so that those who share "
                "experts are of one node, or set moe_flex_dispatcher_backend to 'hybridep'."
            )
    if (missing := deep_ep_is_missing(backend)) is not None:
        raise MissingDependencyError(missing)


def _budget_refusals(config: Any, backend: str, token_drops: str) -> list[str]:
    found = []
    name = BACKEND_NAMES[backend]
    factor = getattr(config, _FACTOR, None)
    if factor is None or not math.isfinite(factor):
        how = (
            " (a flag of chunkgraph launch; before attach() set it on Megatron's config once that "
            "is made, whose own check refuses it for this backend)"
            if backend == "deepep"
            else ""
        )
        found.append(
            f"moe_flex_dispatcher_backend={backend!r} without {_FACTOR}: how many rows come "
            f"depends on the tokens, and a graph has fixed shapes; set it to 1 or more{how}, or "
            f"{_STATIC}"
        )
    elif factor < 1:
        found.append(
            f"{_FACTOR}={factor!r}: below 1 ranks drop tokens in every step; set it to 1 or more"
        )
    capacity = getattr(config, "moe_expert_capacity_factor", None)
    if (capacity is not None and capacity >= 0) or getattr(
        config, "moe_pad_expert_input_to_capacity", False
    ):
        found.append(
            f"moe_expert_capacity_factor={capacity!r} with {name}: the room is that of a rank; "
            f"leave it and moe_pad_expert_input_to_capacity out, and set {_FACTOR}"
        )
    if token_drops not in ("raise", "rerun"):
        found.append(
            f"token_drops={token_drops!r} with {name}: it only tells that a rank had no room; "
            "say 'rerun', which runs such a step anew, or 'raise'"
        )
    return found


def _product_refusals(config: Any, name: str) -> list[str]:
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
            found.append(f"{field}={value!r} with {name}: {why}; turn it on, or {_STATIC}")
    dtype = getattr(config, "moe_router_dtype", None)
    if dtype != "fp32":
        found.append(
            f"moe_router_dtype={dtype!r} with {name}: it sends probabilities in float32; set it "
            "to 'fp32'"
        )
    if not (getattr(config, "bf16", False) or getattr(config, "fp16", False)):
        found.append(f"neither bf16 nor fp16 with {name}: it sends rows of 2 bytes; set bf16")
    return found


def _untried(config: Any, name: str) -> list[str]:
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
        f"{what} with {name}: not tried; leave it out" for what, is_it in asked.items() if is_it
    ]
    ranks = getattr(config, "expert_tensor_parallel_size", None)
    if (ranks or 1) > 1:
        found.append(
            f"expert_tensor_parallel_size={ranks} with {name}: the grouped product cannot be "
            "split; set it to 1"
        )
    return found


def expert_ranks() -> list[int]:
    """The ranks that share this rank's experts; none where no groups are set up."""
    state = import_megatron("megatron.core.parallel_state")
    if not (dist.is_initialized() and state.model_parallel_is_initialized()):
        return []
    return dist.get_process_group_ranks(state.get_expert_model_parallel_group())


def ranks_of_other_nodes(
    ranks: Sequence[int], rank: int, environment: Mapping[str, str]
) -> list[int]:
    """Those of some ranks that were not started on the node of ``rank``.

    Args:
        ranks: global ones.
        rank: of this process.
        environment: LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them, which numbers the ranks
            of a node one after the other; where they are missing, no rank is found.
    """
    local = [environment.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not all(number.isdecimal() for number in local):
        return []
    place, size = map(int, local)
    first = rank - place
    return [r for r in ranks if not first <= r < first + size]
