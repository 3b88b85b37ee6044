"""Refuse or adjust Megatron's arguments under `--cuda-graph-granularity chunk`."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import GraphFlags, read_flags
from chunkgraph.launch.packing_rules import SCRIPT_PACKING_RULES
from chunkgraph.megatron.features import FEATURES
from chunkgraph.megatron.features.experts.grouped_gemm import FP8_MULTIPLES, native_need
from chunkgraph.megatron.features.experts.hybrid_ep import hybrid_ep_need, uses_hybrid_ep
from chunkgraph.megatron.features.experts.overlap import OVERLAP_RULES
from chunkgraph.megatron.features.fp8 import keeps_transposes
from chunkgraph.megatron.refusals import DELAY_RULES, DRIVER_RULES, facts_of_model
from chunkgraph.megatron.rules.experts import STATIC, uses_dropless
from chunkgraph.megatron.rules.features import SCHEDULE_RULES
from chunkgraph.schedules import FILE_SUFFIX, read_matching_schedule, splits_backward
from chunkgraph.settings.rule import Facts, Rule, refusals
from chunkgraph.settings.words import FLAGS

__all__ = [
    "refuse_changed_arguments",
    "schedule_of",
    "settle_arguments",
]

_NO_HOOKS = "its hooks run in Python, which a replay does not"
_ALL_OF_A_LAYER = "a chunk graph holds all of a layer"
_WARMUP = "cuda_graph_warmup_steps"
_LEAVE_OUT = "leave it out"
_QUANTIZED = "whether a layer renews its quantized weights is Python state, frozen in a replay"
_LOGITS = "it reads the largest attention logits of each microbatch in Python"
_TURNED_OFF = {
    "delay_wgrad_compute": "a backward graph computes weight gradients too",
    "fine_grained_activation_offloading": (
        "activations are in the graphs' memory on the GPU, which must hold those of all slots"
    ),
}
_REFUSED = "--cuda-graph-granularity chunk cannot go together with"
_REFUSED_SCHEDULE = "--pipeline-schedule cannot go together with"
_GRAPH_RULES = (
    Rule(f"rl_training_cuda_graphs: Megatron would capture the same layers again; {_LEAVE_OUT}"),
    Rule(f"cuda_graph_modules=: {_ALL_OF_A_LAYER}; {_LEAVE_OUT}"),
    Rule(f"cuda_graph_scope=: {_ALL_OF_A_LAYER}; {_LEAVE_OUT}"),
    Rule(f"cuda_graph_scope_deprecated=: {_ALL_OF_A_LAYER}; {_LEAVE_OUT}"),
    Rule("optimizer_cuda_graph: it shares its capture stream with Megatron's other graphs"),
    Rule("inference_cuda_graph_scope=: there is no inference in a chunk graph"),
    Rule(
        "transformer_impl: it is not installed; install transformer_engine, or use "
        "{transformer_impl=local}",
        lambda f: (
            f.on_gpu and not f.has_transformer_engine and f.transformer_impl == "transformer_engine"
        ),
    ),
    Rule(
        "hidden_dropout attention_dropout: without Transformer Engine every replay would repeat "
        "Megatron's random numbers; install transformer_engine, or set both to 0",
        lambda f: (
            f.on_gpu
            and not f.has_transformer_engine
            and f.transformer_impl != "transformer_engine"
            and max(f.hidden_dropout or 0.0, f.attention_dropout or 0.0) > 0
        ),
    ),
)
_PROGRAM_RULES = (
    Rule("perform_rl_step: it changes the model between generation and training"),
    Rule("inprocess_restart: a restart inside the process would keep graphs of destroyed groups"),
    Rule("yaml_cfg=: Megatron reads all its settings from that file, without these flags"),
    Rule(f"logits_save_dir=: {_NO_HOOKS}"),
    Rule(f"logits_load_dir=: {_NO_HOOKS}"),
    Rule(f"save_activations_interval=: {_NO_HOOKS}"),
    Rule(f"save_dgrads_interval=: {_NO_HOOKS}"),
    Rule(f"save_tokens_per_expert_interval=: {_NO_HOOKS}"),
    Rule("modelopt_enabled: its distillation schedules call the model differently"),
    Rule("export_kd_teacher_load=: distillation keeps outputs of layers by hooks in Python"),
    Rule("flextron: hooks of layers read the budget that Python draws for each microbatch"),
    Rule(f"te_precision_config_file=: {_QUANTIZED}"),
    Rule(f"kitchen_config_file=: {_QUANTIZED}"),
    Rule(f"kitchen_recipe_number=: {_QUANTIZED}", lambda f: f.kitchen_recipe_number is not None),
    Rule(f"qk_clip: {_LOGITS}"),
    Rule(f"log_max_attention_logit: {_LOGITS}"),
)
"""Rules for arguments that a script may still change after parsing."""


def _missing_needs(f: Facts) -> object:
    """Return what a dispatcher lacks on this machine."""
    if f.is_plan or not uses_hybrid_ep(f):
        return False
    missing = hybrid_ep_need(f) if f.on_gpu else "it needs GPUs"
    return missing and {"missing": missing}


def _lacks_gemm(name: str) -> Callable[[Facts], object]:
    """Return a condition on experts that need Transformer Engine's grouped GEMM for ``name``."""

    def missing(f: Facts) -> object:
        recipe = f.fp8_recipe
        is_other = recipe not in (None, *FP8_MULTIPLES)  # refused anyway
        if f.is_plan or is_other or not (f.on_gpu and f.captures and uses_dropless(f)):
            return False
        text = getattr(f, name) and native_need(f.params_dtype, recipe)
        return text and {"missing": text}

    return missing


def _has_file_and(name: str) -> Callable[[Facts], bool]:
    return lambda f: bool(f.schedule.endswith(FILE_SUFFIX) and getattr(f, name))


_SCRIPT_SCHEDULE_RULES = (
    *SCHEDULE_RULES,
    *(
        Rule(
            f"{name}= schedule: the file is a schedule of one number of microbatches; use a "
            "schedule by name",
            _has_file_and(name),
        )
        for name in ("rampup_batch_size", "step_batch_size_schedule")
    ),
)
_FLAG_RULES = (
    *_GRAPH_RULES,
    *OVERLAP_RULES,
    *_PROGRAM_RULES,
    *SCRIPT_PACKING_RULES,
    *_SCRIPT_SCHEDULE_RULES,
    Rule("moe_flex_dispatcher_backend: {missing}", _missing_needs),
    *(
        Rule(
            f"{name} moe_expert_capacity_factor: only Transformer Engine's grouped GEMM multiplies "
            f"such experts with counts from the device; {{missing}}, or {STATIC}",
            _lacks_gemm(name),
        )
        for name in ("fp16", "fp8")
    ),
)


class _AsConfig:
    """Parsed arguments under the names of TransformerConfig's fields."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        if name == "params_dtype":
            halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
            kinds = [kind for flag, kind in halves.items() if getattr(self._args, flag, False)]
            return kinds[0] if kinds else torch.float32
        names = {"num_moe_experts": "num_experts", "gated_linear_unit": "swiglu"}
        value = getattr(self._args, names.get(name, name), None)
        # Megatron resolves its flags like this before it builds the model.
        if name == "recompute_granularity" and getattr(self._args, "recompute_activations", False):
            return "selective"
        if name == "recompute_modules" and value is None:
            return ["core_attn"]
        return value


def settle_arguments(
    args: argparse.Namespace, *, on_cpu: bool, is_plan: bool = False
) -> GraphFlags | None:
    """Check ``args`` as parsed, and turn off Megatron's own graphs.

    Granularity ``layer`` changes nothing, but a schedule may drive the eager model.

    Args:
        args: Parsed arguments, not yet validated by Megatron; changed in place.
        on_cpu: Whether the CPU host is active, whose random numbers every graph can repeat.
        is_plan: Whether the run is on another machine, so that installed packages do not matter.

    Returns:
        The flags of chunk graphs, or None for granularity ``layer``.

    Raises:
        ConfigError: Flags cannot be combined with ``chunk``, or have wrong values; the error lists
            all of them.
    """
    flags, problems = read_flags(args)
    if flags is None:
        if problems:
            raise ConfigError("\n".join(problems))
        schedule = schedule_of(args)
        if schedule != "auto":
            facts = _facts(args, GraphFlags(schedule=schedule), on_cpu=on_cpu, is_plan=is_plan)
            rules = (*_SCRIPT_SCHEDULE_RULES, *DRIVER_RULES, *DELAY_RULES)
            _refuse(refusals(rules, facts), _REFUSED_SCHEDULE)
            _check_schedule(args)
        if hasattr(args, _WARMUP):
            setattr(args, _WARMUP, int(getattr(args, _WARMUP)))  # without the mark of the default
        return None
    facts = _facts(args, flags, on_cpu=on_cpu, is_plan=is_plan)
    of_features = (rule for kind in FEATURES for rule in kind.rules)
    broken = refusals((*_FLAG_RULES, *of_features), facts)
    if problems and not broken:
        raise ConfigError("\n".join(problems))
    _refuse([*(text.rstrip(".") for text in problems), *broken])
    _check_schedule(args)
    # With any other value Megatron builds its own graphs and takes other code paths.
    args.cuda_graph_impl = "none"
    if _wants_te_rng(args, on_cpu):
        args.te_rng_tracker = True
    setattr(args, _WARMUP, flags.capture.num_warmup_steps)
    return replace(flags, turned_off=tuple(_turn_off(args, flags.schedule)))


def refuse_changed_arguments(args: argparse.Namespace) -> None:
    """Check again the arguments that the script may have changed after parsing.

    Raises:
        ConfigError: Flags cannot be combined with ``chunk``; the error lists all of them.
    """
    _refuse(refusals(_PROGRAM_RULES, Facts(lambda name: getattr(args, name, None), FLAGS)))


def _turn_off(args: argparse.Namespace, schedule: str) -> Iterator[str]:
    """Turn off flags that change no result and that a graph cannot hold; yield a line on each."""
    names = ["fine_grained_activation_offloading"]
    if not splits_backward(schedule):
        names.append("delay_wgrad_compute")  # next to overlapped transfers; others are refused
    for name in names:
        if getattr(args, name, False):
            setattr(args, name, False)
            yield (
                f"chunk graphs: training runs without --{name.replace('_', '-')}, with the same "
                f"results: {_TURNED_OFF[name]}."
            )


def schedule_of(args: argparse.Namespace) -> str:
    """Return the schedule of training steps."""
    return args.pipeline_schedule or "auto"


def _check_schedule(args: argparse.Namespace) -> None:
    """Compare the schedule with the pipeline and the batch size, before the model is built.

    A pipeline with another layout than equal stages is compared when graphs are attached.

    Raises:
        ConfigError: The schedule is a file that does not match.
        TopologyError: The schedule does not exist for the pipeline.
    """
    layouts = ("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage")
    if any(getattr(args, name, None) for name in layouts):
        return
    num_copies, counts = _num_copies(args), []
    micro_batch_size = getattr(args, "micro_batch_size", None)
    if num_copies and micro_batch_size:
        rows = micro_batch_size * num_copies // (getattr(args, "context_parallel_size", None) or 1)
        counts = [(getattr(args, "global_batch_size", None) or rows) // rows]
    read_matching_schedule(
        schedule_of(args),
        getattr(args, "pipeline_model_parallel_size", None) or 1,
        getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1,
        counts,
        "--global-batch-size",
    )


def _hybrid_pattern(args: argparse.Namespace) -> str | None:
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    return next((pattern for name in names if (pattern := getattr(args, name, None))), None)


def _refuse(texts: list[str], heading: str = _REFUSED) -> None:
    if texts:
        indented = (text.replace("\n", "\n    ") for text in texts)
        raise ConfigError("\n  - ".join([heading, *indented]))


def _facts(args: argparse.Namespace, flags: GraphFlags, *, on_cpu: bool, is_plan: bool) -> Facts:
    """Return the facts that the flags state about a model that is not built yet."""
    implementation = getattr(args, "cuda_graph_impl", None)
    if implementation == "local" and args.cuda_graph_granularity == "chunk":
        implementation = None  # `settle_arguments` replaces it with `none`
    inference_scope = getattr(args, "inference_cuda_graph_scope", None)
    inference_scope = getattr(inference_scope, "name", inference_scope)
    sizes = tuple(sorted(set(flags.packing.context_parallel_sizes)))
    values = {
        **flags.packing.model_dump(),
        "context_parallel_sizes": sizes,
        "cuda_graph_impl": implementation,
        "data_parallel_size": _num_copies(args),
        "has_transformer_engine": is_plan
        or importlib.util.find_spec("transformer_engine") is not None,
        "hybrid_layer_pattern": _hybrid_pattern(args),
        "inference_cuda_graph_scope": None if inference_scope == "none" else inference_scope,
        "is_plan": is_plan,
        "is_rng_graph_safe": on_cpu
        or _wants_te_rng(args, on_cpu)
        or getattr(args, "te_rng_tracker", False),
        "keeps_transposes": is_plan
        or not getattr(args, "fp8_param_gather", False)
        or keeps_transposes(),
        "num_warmup_steps": flags.capture.num_warmup_steps,
        "on_gpu": not on_cpu,
        "packed": flags.packing.max_packed_seqs > 0,
        "packing": flags.packing,
        "pads_rows": bool(sizes),
        "schedule": flags.schedule,
        "scope": flags.capture.scope,
        "splits_backward": splits_backward(flags.schedule),
        "stash": flags.stash.enabled,
        "token_drops": flags.token_drops,
        "verify": flags.capture.verify,
    }
    return facts_of_model(_AsConfig(args), values, FLAGS)


def _num_copies(args: argparse.Namespace) -> int | None:
    """Return the number of data-parallel ranks; None if the process count is unknown or wrong."""
    num_processes = int(os.environ.get("WORLD_SIZE", "0"))
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    tensor_ranks, pipeline_ranks = (getattr(args, name, None) or 1 for name in sizes)
    if not num_processes or num_processes % (tensor_ranks * pipeline_ranks):
        return None  # Megatron refuses the latter
    return num_processes // (tensor_ranks * pipeline_ranks)


def _wants_te_rng(args: argparse.Namespace, on_cpu: bool) -> bool:
    """Return whether graphs need the random states of Transformer Engine.

    Of Megatron's trackers only this one can switch states in a graph. Transformer Engine's layers
    switch states even if they draw nothing.
    """
    if on_cpu:
        return False
    dropout = max(getattr(args, "hidden_dropout", 0.0), getattr(args, "attention_dropout", 0.0))
    draws = dropout > 0 or getattr(args, "moe_router_force_load_balancing", False)
    return draws or getattr(args, "transformer_impl", None) == "transformer_engine"
