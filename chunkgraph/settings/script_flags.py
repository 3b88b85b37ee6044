"""A configuration file as flags of a pretrain script: Megatron's, and those of chunk graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from chunkgraph.errors import ConfigError
from chunkgraph.settings.listing import Setting, settings_of
from chunkgraph.settings.loader import Config
from chunkgraph.settings.models import derived_fields
from chunkgraph.settings.rule import Facts, Rule, check
from chunkgraph.settings.words import facts_of

_GRAPHS = ("capture", "packing", "stash")
"""Sections that have an effect only with graphs."""
_WITHOUT_EFFECT: dict[str, Callable[[Config], bool]] = {
    "model.recompute_modules": lambda c: c.model.recompute_granularity != "selective",
    "pipeline.virtual_pipeline_model_parallel_size": lambda c: c.pipeline.num_model_chunks == 1,
    "pipeline.microbatch_group_size_per_vp_stage": lambda c: c.pipeline.num_model_chunks == 1,
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
    Rule(
        f"seq_buckets: {_NO_FLAG}",
        lambda f: bool(f.max_packed_seqs and f.captures) and f.seq_buckets is not None,
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


def words_of(value: Any) -> tuple[str, ...]:
    """Format a value of a setting as its flag's arguments."""
    if isinstance(value, tuple):
        return tuple(text for one in value for text in words_of(one))
    if isinstance(value, bool):
        return (str(value).lower(),)
    return (repr(value).removesuffix(".0") if isinstance(value, float) else str(value),)


def flags_of(config: Config) -> list[tuple[str, ...]]:
    """Return the flags of all values, each with its arguments.

    Raises:
        ConfigError: A value has no flag in Megatron.
    """
    check(_RULES, facts_of(config), "these settings have no flags:")
    flags = [*_special_flags(config)]
    for item in settings_of(Config):
        if (value := _value_of(item, config)) is not None:
            own = item.flag and (item.flag, *words_of(value))
            flags.append(own or (str(item.megatron), *_texts(item.name, value)))
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
        if name == "num_query_groups" and value is not None:
            yield ("--group-query-attention",)  # without it Megatron ignores the number
        if value is not None and value is not False:
            yield f"--{name.replace('_', '-')}", *_texts(name, value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Format a value of Megatron's setting as the arguments of its flag."""
    if value is True:
        return ()
    if "freq" in name:  # Megatron evaluates it as an expression, which has no spaces
        return (str(value).replace(" ", ""),)
    return tuple(map(str, value if isinstance(value, (list, tuple)) else [value]))
