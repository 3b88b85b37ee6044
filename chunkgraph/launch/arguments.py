"""Megatron's arguments under `--cuda-graph-granularity chunk`: refused by name, or adjusted."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chunkgraph.errors import ConfigError, PackingError
from chunkgraph.launch.flags import GraphFlags, forget_defaults, read_flags, write_defaults
from chunkgraph.launch.packing_rules import packed_shape, packing_refusals
from chunkgraph.megatron.features.experts.deep_ep_needs import BACKEND_NAMES, deep_ep_is_missing
from chunkgraph.megatron.features.experts.rank_budget import flex_backend
from chunkgraph.megatron.features.experts.refusals import moe_refusals, stash_refusals
from chunkgraph.megatron.features.fp8.feature import fp8_refusals
from chunkgraph.megatron.features.hybrid.feature import layer_refusals
from chunkgraph.megatron.refusals import GRAPH_SAFE_RNG, recompute_refusals, refused_settings
from chunkgraph.megatron.scope_choice import scope_obstacles

__all__ = ["refuse_changed_arguments", "settle_arguments"]


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
_REFUSED = "--cuda-graph-granularity chunk cannot go together with"
_REFUSALS_OF_GRAPHS = (
    _Refusal("enable_cuda_graph", _OTHER_GRAPHS),
    _Refusal("external_cuda_graph", _OTHER_GRAPHS),
    _Refusal("rl_training_cuda_graphs", _OTHER_GRAPHS),
    _Refusal("cuda_graph_modules", "a chunk graph holds all of a layer; leave it out"),
    _Refusal("cuda_graph_scope", "a chunk graph holds all of a layer; leave it out"),
    _Refusal("cuda_graph_scope_deprecated", "a chunk graph holds all of a layer; leave it out"),
    _Refusal("optimizer_cuda_graph", "it shares its capture stream with Megatron's other graphs"),
)
_REFUSALS_OF_MODELS = (
    _Refusal("perform_rl_step", "it changes the model between generation and training"),
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
    _Refusal("export_kd_teacher_load", "distillation keeps outputs of layers by hooks in Python"),
    _Refusal("te_precision_config_file", _QUANTIZED),
    _Refusal("kitchen_config_file", _QUANTIZED),
    _Refusal("kitchen_recipe_number", _QUANTIZED, lambda v: v is not None),
    _Refusal("qk_clip", "it reads the largest attention logits of each microbatch in Python"),
    _Refusal(
        "log_max_attention_logit",
        "it reads the largest attention logits of each microbatch in Python",
    ),
)
_OF_PACKING = ("packed_seqs", "packed_tokens", "document_tokens")
_NAMES = {
    "num_moe_experts": "--num-experts",
    "gated_linear_unit": "--swiglu",
    "fp4": "--fp4-format",
    "fp8": "--fp8-format",
    "fp8_param": "--fp8-param-gather",
    "token_drops": "--cuda-graph-token-drops",
    "page_bytes": "--cuda-graph-stash-page-bytes",
    **{f"max_{what}": f"--cuda-graph-max-{what.replace('_', '-')}" for what in _OF_PACKING},
}
"""Flags that are called otherwise than the setting."""
_SETTING = re.compile(
    r"""(?<![\w'-])([a-z][a-z0-9]*(?:_[a-z0-9]+)+|bf16|fp16|fp[48](?==))"""
    r"""(?:=(True|False|None|'[^']*'|\[[^]]*\]|[\w.]+))?"""
)


class _AsConfig:
    """Arguments by the names of TransformerConfig's fields, where those differ."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        if name in ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"):
            return None  # looked at above, in the words of the flags
        if name == "params_dtype":
            halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
            found = [kind for flag, kind in halves.items() if getattr(self._args, flag, False)]
            return found[0] if found else torch.float32
        given = getattr(self._args, "num_experts" if name == "num_moe_experts" else name, None)
        # What Megatron makes of its flags before it builds the model.
        if name == "recompute_granularity" and getattr(self._args, "recompute_activations", False):
            return "selective"
        if name == "recompute_modules" and given is None:
            return ["core_attn"]
        return given


def settle_arguments(args: argparse.Namespace, *, on_cpu: bool) -> GraphFlags | None:
    """Check ``args`` as the user gave them, and make Megatron leave the graphs to us.

    With granularity ``layer`` nothing is changed.

    Args:
        args: parsed, but not yet validated by Megatron; changed in place.
        on_cpu: whether the CPU host is in force, whose random numbers every graph can repeat.

    Returns:
        What to capture, or None for granularity ``layer``.

    Raises:
        ConfigError: naming every flag that cannot go together with ``chunk``, or has a wrong value.
    """
    flags, wrong = read_flags(args)
    found = [] if flags is None else _refusals(args, flags, on_cpu=on_cpu)
    if wrong and not found:
        raise ConfigError("\n".join(wrong))
    if found:
        raise ConfigError(
            f"{_REFUSED}\n  - " + "\n  - ".join([*(text.rstrip(".") for text in wrong), *found])
        )
    if flags is None:
        forget_defaults(args)
        return None
    if flex_backend(_AsConfig(args)) == "deepep":
        # Megatron's own config refuses a budget with this backend; it is put there once it is made.
        args.cuda_graph_expert_rank_capacity_factor = args.moe_expert_rank_capacity_factor
        args.moe_expert_rank_capacity_factor = None
    # Megatron builds graphs of its own, and other code paths with them, for anything else.
    args.cuda_graph_impl = "none"
    if _wants_te_rng(args, on_cpu):
        args.te_rng_tracker = True
    write_defaults(args, flags)
    return flags


def refuse_changed_arguments(args: argparse.Namespace) -> None:
    """Look again at arguments that the script may have changed since they were parsed.

    Raises:
        ConfigError: naming every flag that cannot go together with ``chunk``.
    """
    if found := _refused_flags(args, _REFUSALS_OF_MODELS):
        raise ConfigError(f"{_REFUSED}\n  - " + "\n  - ".join(found))


def _refusals(args: argparse.Namespace, flags: GraphFlags, *, on_cpu: bool) -> list[str]:
    """All that the arguments say of what a chunk graph cannot hold, in flags."""
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
    found += _refused_flags(args, (*_REFUSALS_OF_GRAPHS, *_REFUSALS_OF_MODELS))
    found += packing_refusals(flags, args)
    config = _AsConfig(args)
    settings = [
        *refused_settings(config),
        *fp8_refusals(config),
        *moe_refusals(config, flags.token_drops),
        *_hybrid_refusals(args, flags),
        *(
            f"--cuda-graph-chunk-scope chunk with {obstacle.flag}: {obstacle.why}; leave it out, "
            "or give --cuda-graph-chunk-scope block"
            for obstacle in scope_obstacles(
                config, flags.capture.scope, is_packed=bool(flags.packing.max_packed_seqs)
            )
        ),
    ]
    if flags.stash is not None:
        refusals = stash_refusals(config, flags.stash.page_bytes)
        settings += [f"--cuda-graph-{refusal}" for refusal in refusals]
    use_te_rng = _wants_te_rng(args, on_cpu)
    if not on_cpu:
        is_safe = use_te_rng or getattr(args, "te_rng_tracker", False)
        settings += [
            refusal.replace(GRAPH_SAFE_RNG, "add --te-rng-tracker")
            for refusal in recompute_refusals(config, is_rng_graph_safe=is_safe)
        ]
    found += settings
    backend = flex_backend(config)
    if backend in BACKEND_NAMES:
        missing = "it needs GPUs" if on_cpu else deep_ep_is_missing(backend)
        found += [f"--moe-flex-dispatcher-backend {backend}: {missing}"] if missing else []
    is_missing = importlib.util.find_spec("transformer_engine") is None
    if is_missing and use_te_rng:
        found.append(_missing_transformer_engine(args))
    if is_missing and getattr(args, "fp8", None):
        found.append(
            f"--fp8-format {args.fp8}: it is Transformer Engine's, which is not installed; install "
            "chunkgraph[te]"
        )
    return [_in_flags(text, args) for text in found]


def _refused_flags(args: argparse.Namespace, refusals: Sequence[_Refusal]) -> list[str]:
    return [
        f"{_flag(refusal.dest)}: {refusal.why}"
        for refusal in refusals
        if refusal.wanted(getattr(args, refusal.dest, None))
    ]


def _hybrid_refusals(args: argparse.Namespace, flags: GraphFlags) -> list[str]:
    """What the pattern of a hybrid model says; the layers of a model say it once more."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    pattern = next((p for name in names if (p := getattr(args, name, None))), None)
    if pattern is None:
        return []
    try:
        shape = packed_shape(flags, args)
    except PackingError:  # which is refused itself
        shape = None
    predicts = "/" in pattern or bool(getattr(args, "mtp_num_layers", None))
    return layer_refusals(_AsConfig(args), set(pattern), shape, predicts_several_tokens=predicts)


def _in_flags(text: str, args: argparse.Namespace) -> str:
    """What is said of settings, said of the flags that a user can type."""

    def in_flags(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in _NAMES and not hasattr(args, name):
            return match.group()
        flag = _NAMES.get(name, _flag(name))
        if value in ("False", "None"):
            return f"without {flag}"
        given = "" if value in (None, "True") else re.sub(r"[\[\]',]", "", value)
        return f"{flag} {given}".rstrip()

    said = _SETTING.sub(in_flags, text).replace("set it to True", "add it")
    return said.replace("with without", "without").replace("\n", "\n    ")


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
