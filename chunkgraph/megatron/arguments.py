"""Megatron's arguments under `--cuda-graph-granularity chunk`: refused by name, or adjusted."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.compat import flex_backend
from chunkgraph.megatron.deep_ep_needs import BACKEND_NAMES, deep_ep_is_missing
from chunkgraph.megatron.flags import GraphFlags, flags_from
from chunkgraph.megatron.launch_packing import packing_refusals
from chunkgraph.megatron.moe_support import stash_refusals
from chunkgraph.megatron.support import refused_settings

__all__ = ["settle_arguments"]


@dataclass(frozen=True)
class _Refusal:
    """A flag of the training program that chunk graphs cannot honour; ``dest`` is its name."""

    dest: str
    why: str
    wanted: Callable[[Any], bool] = bool


_NO_HOOKS = "its hooks run in Python, which a replay does not"
_OTHER_GRAPHS = "Megatron would capture the same layers again; leave it out"
_QUANTIZED = (
    "whether a layer renews its quantized weights is Python state of its own, frozen in a replay"
)
_REFUSALS = (
    _Refusal("enable_cuda_graph", _OTHER_GRAPHS),
    _Refusal("external_cuda_graph", _OTHER_GRAPHS),
    _Refusal("cuda_graph_modules", "a chunk graph holds all of a layer; leave it out"),
    _Refusal("cuda_graph_scope", "a chunk graph holds all of a layer; leave it out"),
    _Refusal("cuda_graph_scope_deprecated", "a chunk graph holds all of a layer; leave it out"),
    _Refusal("optimizer_cuda_graph", "it shares its capture stream with Megatron's other graphs"),
    _Refusal("perform_rl_step", "it changes the model between generation and training"),
    _Refusal("rl_training_cuda_graphs", _OTHER_GRAPHS),
    _Refusal("inprocess_restart", "a restart inside the process would leave graphs of dead groups"),
    _Refusal("yaml_cfg", "Megatron reads all its settings from that file, without these flags"),
    _Refusal("use_megatron_fsdp", "parameters move, and a graph remembers their addresses"),
    _Refusal("use_torch_fsdp2", "parameters move, and a graph remembers their addresses"),
    _Refusal("logits_save_dir", _NO_HOOKS),
    _Refusal("logits_load_dir", _NO_HOOKS),
    _Refusal("save_activations_interval", _NO_HOOKS),
    _Refusal("save_dgrads_interval", _NO_HOOKS),
    _Refusal("save_tokens_per_expert_interval", _NO_HOOKS),
    _Refusal("modelopt_enabled", "its distillation schedules call the model in another way"),
    _Refusal("te_precision_config_file", _QUANTIZED),
    _Refusal("kitchen_config_file", _QUANTIZED),
    _Refusal("kitchen_recipe_number", _QUANTIZED, lambda v: v is not None),
    _Refusal("qk_clip", "it reads the largest attention logits of each microbatch in Python"),
    _Refusal(
        "log_max_attention_logit",
        "it reads the largest attention logits of each microbatch in Python",
    ),
)


class _AsConfig:
    """Arguments by the names of TransformerConfig's fields, where those differ."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        if name in ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"):
            return None  # looked at above, in the words of the flags
        return getattr(self._args, "num_experts" if name == "num_moe_experts" else name, None)


def settle_arguments(args: argparse.Namespace, *, on_cpu: bool) -> GraphFlags | None:
    """Check ``args`` as the user gave them, and make Megatron leave the graphs to us.

    With granularity ``layer`` nothing is changed.

    Args:
        args: parsed, but not yet validated by Megatron; changed in place.
        on_cpu: whether the CPU host is in force, whose random numbers every graph can repeat.

    Returns:
        What to capture, or None for granularity ``layer``.

    Raises:
        ConfigError: naming every flag that cannot go together with ``chunk``.
    """
    flags = flags_from(args)
    if flags is None:
        return None
    found: list[str] = []
    implementation = getattr(args, "cuda_graph_impl", "none")
    if implementation not in ("local", "none"):
        found.append(
            f"--cuda-graph-impl {implementation}: it captures the same layers in its own way; give "
            "--cuda-graph-impl local, or leave it out"
        )
    inference_scope = getattr(args, "inference_cuda_graph_scope", None)
    if getattr(inference_scope, "name", inference_scope) not in (None, "none"):
        found.append("--inference-cuda-graph-scope: there is no inference in a chunk graph")
    found += [
        f"{_flag(refusal.dest)}: {refusal.why}"
        for refusal in _REFUSALS
        if refusal.wanted(getattr(args, refusal.dest, None))
    ]
    found += packing_refusals(flags, args)
    found += refused_settings(_AsConfig(args), flags.token_drops)
    if flags.stash is not None:
        found += [
            f"--cuda-graph-{refusal}"
            for refusal in stash_refusals(_AsConfig(args), flags.stash.page_bytes)
        ]
    backend = flex_backend(_AsConfig(args))
    if backend in BACKEND_NAMES:
        missing = "it needs GPUs" if on_cpu else deep_ep_is_missing(backend)
        found += [f"--moe-flex-dispatcher-backend {backend}: {missing}"] if missing else []
    use_te_rng = _wants_te_rng(args, on_cpu)
    if use_te_rng and importlib.util.find_spec("transformer_engine") is None:
        found.append(_missing_transformer_engine(args))
    if found:
        raise ConfigError(
            "--cuda-graph-granularity chunk cannot go together with\n  - " + "\n  - ".join(found)
        )
    if backend == "deepep":
        # Megatron's own config refuses a budget with this backend; it is put there once it is made.
        args.cuda_graph_expert_rank_capacity_factor = args.moe_expert_rank_capacity_factor
        args.moe_expert_rank_capacity_factor = None
    # Megatron builds graphs of its own, and other code paths with them, for anything else.
    args.cuda_graph_impl = "none"
    if use_te_rng:
        args.te_rng_tracker = True
    args.cuda_graph_chunk_scope = flags.scope
    args.cuda_graph_memory_plan = flags.memory_plan
    args.cuda_graph_shared_slots = "yes" if flags.shared_slots else "no"
    args.cuda_graph_memset_kernels = "yes" if flags.memset_kernels else "no"
    args.cuda_graph_verify = flags.verify
    args.cuda_graph_on_failure = flags.on_failure
    args.cuda_graph_token_drops = flags.token_drops
    return flags


def _wants_te_rng(args: argparse.Namespace, on_cpu: bool) -> bool:
    """Whether only Transformer Engine's random states, of Megatron's, can be switched in a graph.

    Its own layers switch them even without dropout.
    """
    if on_cpu:
        return False
    dropout = max(getattr(args, "hidden_dropout", 0.0), getattr(args, "attention_dropout", 0.0))
    return dropout > 0 or getattr(args, "transformer_impl", None) == "transformer_engine"


def _missing_transformer_engine(args: argparse.Namespace) -> str:
    if getattr(args, "transformer_impl", None) == "transformer_engine":
        return (
            "--transformer-impl transformer_engine: it is not installed; install "
            "transformer_engine, or give --transformer-impl local"
        )
    return (
        "--hidden-dropout or --attention-dropout above 0 without Transformer Engine: no other "
        "random numbers of Megatron's change from replay to replay; install transformer_engine, or "
        "set both to 0"
    )


def _flag(dest: str) -> str:
    return f"--{dest.removesuffix('_deprecated').replace('_', '-')}"
