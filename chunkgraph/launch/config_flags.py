"""Merge a configuration file into the flags of a Megatron pretrain script.

The sections ``model``, ``pipeline``, ``moe``, ``capture``, ``packing`` and ``stash`` become flags.
``train``, ``data`` and ``run`` apply to ``chunkgraph train`` only; a pretrain script gets its
steps, data and tokenizer from its own flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import FLAGS, GRANULARITY, Flag
from chunkgraph.settings import Config, Setting, derived_fields, settings_of
from chunkgraph.settings.rule import Facts, Rule, check
from chunkgraph.settings.words import facts_of

__all__ = ["flags_of", "merge_flags"]

_RIVALS = {
    "--num-virtual-stages-per-pipeline-rank": {
        "--num-layers-per-virtual-pipeline-stage",
        "--pipeline-model-parallel-layout",
    },
    "--recompute-granularity": {"--recompute-activations"},
    "--bf16": {"--fp16"},
}
"""Other flags of Megatron that decide the same, and that it refuses together."""
_GRAPHS = ("capture", "packing", "stash")
"""Sections that have an effect only with graphs."""


def _has_one_chunk(config: Config) -> bool:
    return config.pipeline.num_model_chunks == 1


_WITHOUT_EFFECT: dict[str, Callable[[Config], bool]] = {
    "model.recompute_modules": lambda c: c.model.recompute_granularity != "selective",
    "pipeline.virtual_pipeline_model_parallel_size": _has_one_chunk,
    "pipeline.microbatch_group_size_per_vp_stage": _has_one_chunk,
    # Without graphs nothing would count the dropped tokens.
    "moe.moe_expert_rank_capacity_factor": lambda c: not c.capture.enabled,
}
"""Settings that Megatron does not need, or refuses, although they are not null."""


def _holds(f: Facts, limit: int | None) -> bool:
    return bool(f.stash and f.captures) and limit is not None


_NO_FLAG = "it has no flag; use null, or chunkgraph train"
_RULES = (
    Rule(
        "context_parallel_sizes: documents of a pretrain script are spread over ranks only with "
        "capture; use [], capture the chunks, or use chunkgraph train",
        lambda f: f.context_parallel_sizes and not f.captures,
    ),
    Rule(f"initial_bytes: {_NO_FLAG}", lambda f: _holds(f, f.initial_bytes)),
    Rule(f"max_bytes: {_NO_FLAG}", lambda f: _holds(f, f.max_bytes)),
    Rule(
        "hybrid_layer_pattern: a configuration file cannot pass it to a pretrain script yet; use "
        "null and pass Megatron's --hybrid-layer-pattern and --spec, or use chunkgraph train"
    ),
    Rule(
        "layer_spec: it has no name on the command line; use auto, and pass --spec to the script",
        lambda f: f.layer_spec not in ("auto", "local", "transformer_engine"),
    ),
)
"""Rules for values that have no flag in Megatron."""


def merge_flags(config: Config, script_args: Sequence[str], line: argparse.Namespace) -> list[str]:
    """Put the file's values before the flags of the command line, which win as the last ones.

    Args:
        config: The contents of the file.
        script_args: Flags on the command line.
        line: The same flags, as a parser with `add_flags` reads them; None for absent ones. What
            they turn off takes the file's settings that need it along.

    Raises:
        ConfigError: A value has no flag in Megatron.
    """
    if line.cuda_graph_granularity == "layer":
        config = _changed(config, "capture.enabled", False)
    for flag in FLAGS[1:]:
        if (parsed := getattr(line, flag.dest)) is not None:
            config = _changed(config, flag.path, flag.value_of(parsed))
    names = {arg.partition("=")[0] for arg in script_args}
    flags = [flag for flag in flags_of(config) if names.isdisjoint(_RIVALS.get(flag[0], ()))]
    return [*(text for flag in flags for text in flag), *script_args]


def _changed(config: Config, path: str, value: Any) -> Config:
    """Return ``config`` with a value that is not checked yet."""
    section, _, name = path.partition(".")
    changed = getattr(config, section).model_copy(update={name: value})
    return config.model_copy(update={section: changed})


def flags_of(config: Config) -> list[tuple[str, ...]]:
    """Return the flags of all values, each with its arguments.

    Raises:
        ConfigError: A value has no flag in Megatron.
    """
    check(_RULES, facts_of(config), "these settings have no flags:")
    flags = [*_special_flags(config)]
    for item in settings_of(Config):
        if (value := _value_of(item, config)) is not None:
            own = item.flag and (item.flag, *Flag(item).text_of(value))
            flags.append(own or (str(item.megatron), *_texts(item.name, value)))
    if config.capture.enabled:
        flags.append((GRANULARITY, "chunk"))
    return flags


def _value_of(item: Setting, config: Config) -> Any:
    """Return the value of a setting; None if it has no flag, no effect, or its flag's default."""
    value = attrgetter(item.path)(config)
    is_for_graphs = bool(item.flag) or item.path.startswith(_GRAPHS)
    is_default = value == item.default if item.flag else value is False or value == ()
    if (
        (item.flag or item.megatron) is None
        or (is_for_graphs and not config.capture.enabled)
        or (item.switch and not attrgetter(item.switch)(config))
        or (item.path in _WITHOUT_EFFECT and _WITHOUT_EFFECT[item.path](config))
        or is_default
    ):
        return None
    return value


def _special_flags(config: Config) -> Iterator[tuple[str, ...]]:
    """Yield values that have several flags, or a flag of a different name."""
    model, pipeline = config.model, config.pipeline
    yield "--max-position-embeddings", str(model.seq_length)
    yield "--position-embedding-type", "rope"
    if model.params_dtype == "bfloat16":
        yield ("--bf16",)
    if model.layer_spec != "auto":
        yield "--transformer-impl", model.layer_spec
    # As in `chunkgraph train`: neither gated layers nor their neighbors have biases, experts are
    # not split over the tensor ranks, and the loss is the mean over all tokens of the step.
    if model.swiglu:
        yield ("--disable-bias-linear",)
    if config.moe.num_moe_experts is not None and pipeline.tensor_model_parallel_size > 1:
        yield "--expert-tensor-parallel-size", "1"
    if config.packing.max_packed_seqs and config.packing.context_parallel_sizes:
        yield ("--calculate-per-token-loss",)
    for name, value in derived_fields(config).items():
        if value is False and not name.startswith("moe_"):
            raise ConfigError(
                f"model.transformer_config.{name} is false, for which a pretrain script may have a "
                "flag of another name. Leave it out, and pass Megatron's flag to the script."
            )
        if value is not None and value is not False:
            yield f"--{name.replace('_', '-')}", *_texts(name, value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Format a value of Megatron's setting as the arguments of its flag."""
    if value is True:
        return ()
    if "freq" in name:  # Megatron evaluates it as an expression, which has no spaces
        return (str(value).replace(" ", ""),)
    return tuple(map(str, value if isinstance(value, (list, tuple)) else [value]))
