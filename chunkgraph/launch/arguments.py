"""Refuse or adjust Megatron's arguments under `--cuda-graph-granularity chunk`."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Iterator

from chunkgraph import __version__
from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import SWITCH, GraphFlags, leaves_to_megatron, read_flags
from chunkgraph.megatron.core.access import import_megatron, versions
from chunkgraph.megatron.features import FEATURES
from chunkgraph.megatron.features.experts.overlap import OVERLAP_RULES
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.script import SCRIPT_RULES, packing_options
from chunkgraph.megatron.refusals import facts_of_model
from chunkgraph.megatron.rules.features import IDLE_RULES, SCHEDULE_RULES
from chunkgraph.schedules import splits_backward
from chunkgraph.settings.rule import Facts, Rule, refusals
from chunkgraph.settings.words import FLAGS

_NO_HOOKS = "its hooks run in Python, which a replay does not"
_WARMUP = "cuda_graph_warmup_steps"
_MODULES = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
_QUANTIZED = "whether a layer renews its quantized weights is Python state, frozen in a replay"
_LOGITS = "it reads the largest attention logits of each microbatch in Python"
_TURNED_OFF = {
    "fine_grained_activation_offloading": (
        "activations are in the graphs' memory on the GPU; --cuda-graph-max-slot-memory moves them "
        "to the host"
    ),
    "delay_wgrad_compute": "a backward graph computes weight gradients too",
}
_OF_STEPS = {
    *("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "seed", "lr"),
    *("optimizer", "weight_decay", "clip_grad", "pipeline_schedule"),
}
_REFUSED = "--cuda-graph-granularity chunk does not support"
_GRAPH_RULES = (
    Rule("rl_training_cuda_graphs: Megatron would capture the same layers again; leave it out"),
    Rule(
        "optimizer_cuda_graph scope: use {scope=auto}, which captures the optimizer's step, or "
        "leave the former out",
        lambda f: f.optimizer_cuda_graph and f.scope != "auto",
    ),
    Rule("inference_cuda_graph_scope=: there is no inference in a chunk graph"),
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
    Rule(f"moe_routing_trace_path=: {_NO_HOOKS}"),
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
_FLAG_RULES = (
    *_GRAPH_RULES,
    *OVERLAP_RULES,
    *_PROGRAM_RULES,
    *IDLE_RULES,
    *SCRIPT_RULES,
    *SCHEDULE_RULES,
)


def settle_arguments(args: argparse.Namespace, *, on_cpu: bool) -> GraphFlags | None:
    """Check ``args`` as parsed, and turn off Megatron's own graphs.

    Granularity ``layer`` changes nothing, but a schedule may drive the eager model.

    Args:
        args: Parsed arguments, not yet validated by Megatron; changed in place.
        on_cpu: Whether the CPU host is active, whose random numbers every graph can repeat.

    Returns:
        The flags of chunk graphs, or None for granularity ``layer``.

    Raises:
        ConfigError: Flags cannot be combined with ``chunk``, or have wrong values; the error lists
            all of them.
        PackingError: Microbatches of packed sequences have no such shape.
    """
    flags = read_flags(args)
    if flags is None:
        if hasattr(args, _WARMUP):
            setattr(args, _WARMUP, int(getattr(args, _WARMUP)))  # without the mark of the default
        if leaves_to_megatron(args) and os.environ.get("RANK", "0") == "0":
            sys.stdout.write(
                "chunk graphs: Megatron captures chunks itself, as --cuda-graph-impl "
                f"{args.cuda_graph_impl} asks; {SWITCH} would replace its graphs.\n"
            )
        return None
    facts = _facts(args, flags, on_cpu=on_cpu)
    of_features = (rule for kind in FEATURES for rule in kind.rules)
    _refuse(refusals((*_FLAG_RULES, *of_features), facts))
    if (options := packing_options(flags.packing, args)) is not None:
        PackedBanks.of_model(options, args)
    turned_off = tuple(_turn_off(args, flags.schedule))
    # With any other value Megatron builds its own graphs and takes other code paths.
    args.cuda_graph_impl = "none"
    args.optimizer_cuda_graph = False  # chunk graphs hold the optimizer's step already
    if _wants_te_rng(args, on_cpu):
        args.te_rng_tracker = True
    setattr(args, _WARMUP, flags.capture.num_warmup_steps)
    return flags.model_copy(update={"turned_off": turned_off})


def refuse_changed_arguments(args: argparse.Namespace) -> None:
    """Check again the arguments that the script may have changed after parsing.

    Raises:
        ConfigError: Flags cannot be combined with ``chunk``; the error lists all of them.
    """
    _refuse(refusals(_PROGRAM_RULES, Facts(lambda name: getattr(args, name, None), FLAGS)))


def equal_facts(args: argparse.Namespace) -> dict[str, object]:
    """Return the arguments and versions that all ranks must share: those of the model and step."""
    config = import_megatron("megatron.core.transformer.transformer_config").TransformerConfig
    names = {*(f.name for f in dataclasses.fields(config)), *_OF_STEPS} & vars(args).keys()
    values = {name: getattr(args, name) for name in sorted(names)}
    plain = {n: v for n, v in values.items() if isinstance(v, (bool, int, float, str, list))}
    return {"chunkgraph": __version__, **versions(), **plain}


def _turn_off(args: argparse.Namespace, schedule: str) -> Iterator[str]:
    """Turn off flags that change no result and that a graph cannot hold; yield a line on each."""
    modules: dict[str, list[str]] = {name: [] for name in _MODULES if getattr(args, name, None)}
    if modules or getattr(args, "cuda_graph_impl", None) == "transformer_engine":
        vars(args).update(modules)
        yield (
            "chunk graphs: they replace Megatron's graphs of --cuda-graph-impl and "
            "--cuda-graph-modules, since they hold all of a layer."
        )
    if args.has_megatron_chunks and args.cuda_graph_granularity == "chunk":
        args.cuda_graph_granularity = "layer"
        yield (
            "chunk graphs: they take over Megatron's --cuda-graph-granularity chunk; with "
            "--cuda-graph-impl local or transformer_engine, and without --chunkgraph, Megatron "
            "captures."
        )
    for name, why in _TURNED_OFF.items():
        # A schedule that splits backwards needs the latter; without overlapped transfers it is
        # refused otherwise.
        is_needed = name == "delay_wgrad_compute" and splits_backward(schedule)
        if _is_on(args, name) and not is_needed:
            setattr(args, name, False)
            yield (
                f"chunk graphs: training runs without --{name.replace('_', '-')}, with the same "
                f"results: {why}."
            )
    makes_masks = _is_on(args, "create_attention_mask_in_dataloader")
    masks_itself = getattr(args, "transformer_impl", None) == "transformer_engine"
    if makes_masks and masks_itself and not _is_on(args, "reset_attention_mask"):
        args.create_attention_mask_in_dataloader = False
        yield (
            "chunk graphs: training runs with --no-create-attention-mask-in-dataloader, with the "
            "same results: Transformer Engine's causal attention reads no mask."
        )


def _refuse(texts: list[str]) -> None:
    if texts:
        indented = (text.replace("\n", "\n    ") for text in texts)
        raise ConfigError("\n  - ".join([_REFUSED, *indented]))


def _facts(args: argparse.Namespace, flags: GraphFlags, *, on_cpu: bool) -> Facts:
    """Return the facts that the flags state about a model that is not built yet."""
    implementation = getattr(args, "cuda_graph_impl", None)
    if implementation in ("local", "transformer_engine"):
        implementation = None  # `settle_arguments` replaces it with `none`
    inference_scope = getattr(args, "inference_cuda_graph_scope", None)
    inference_scope = getattr(inference_scope, "name", inference_scope)
    sizes = tuple(sorted(set(flags.packing.context_parallel_sizes)))
    modules = getattr(args, "recompute_modules", None)
    values = {
        **flags.capture.model_dump(),
        **flags.packing.model_dump(),
        "context_parallel_sizes": sizes,
        "cuda_graph_impl": implementation,
        "data_parallel_size": _num_copies(args),
        "element_bytes": 2 if _is_on(args, "bf16") or _is_on(args, "fp16") else 4,
        "has_transformer_engine": True,  # `attach` looks for packages
        "hybrid_layer_pattern": getattr(args, "hybrid_layer_pattern", None)
        or getattr(args, "hybrid_override_pattern", None),
        "inference_cuda_graph_scope": None if inference_scope == "none" else inference_scope,
        "is_rng_graph_safe": on_cpu
        or _wants_te_rng(args, on_cpu)
        or _is_on(args, "te_rng_tracker"),
        "keeps_transposes": True,
        "num_moe_experts": getattr(args, "num_experts", None),
        "on_gpu": not on_cpu,
        "packed": flags.packing.max_packed_seqs > 0,
        "packing": flags.packing,
        "pads_rows": bool(sizes),
        # Megatron resolves its flags like this before it builds the model.
        "recompute_granularity": "selective"
        if _is_on(args, "recompute_activations")
        else getattr(args, "recompute_granularity", None),
        "recompute_modules": ["core_attn"] if modules is None else modules,
        "schedule": flags.schedule,
        "splits_backward": splits_backward(flags.schedule),
        "stash": flags.stash.enabled,
        "swiglu": _is_on(args, "swiglu"),
        "token_drops": flags.token_drops,
    }
    return facts_of_model(args, values, FLAGS)


def _is_on(args: argparse.Namespace, name: str) -> bool:
    return bool(getattr(args, name, False))


def _num_copies(args: argparse.Namespace) -> int | None:
    """Return the number of data-parallel ranks; None if the process count is unknown."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    size_of_copy = math.prod(getattr(args, name, None) or 1 for name in names)
    return int(os.environ.get("WORLD_SIZE", "0")) // size_of_copy or None


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
