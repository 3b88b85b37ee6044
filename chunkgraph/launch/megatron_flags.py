"""Map the values of a configuration file to flags of a Megatron pretrain script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import GRANULARITY, Flag
from chunkgraph.settings import Config, Setting, derived_fields, resolved, settings_of

__all__ = ["FlagValue", "flag_values"]

_VIRTUAL = "pipeline.virtual_pipeline_model_parallel_size"
_RIVALS = {
    _VIRTUAL: (
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--pipeline-model-parallel-layout",
    ),
    "model.recompute_granularity": ("--recompute-activations",),
}
"""Other Megatron flags that decide the same setting."""
_GRAPHS = ("capture", "packing", "stash")
"""Sections that have an effect only with graphs."""
_WITHOUT_EFFECT: dict[str, Callable[[Config], bool]] = {
    "model.recompute_modules": lambda c: c.model.recompute_granularity != "selective",
    _VIRTUAL: lambda c: c.pipeline.num_model_chunks == 1,
    "pipeline.microbatch_group_size_per_vp_stage": lambda c: c.pipeline.num_model_chunks == 1,
    "pipeline.context_parallel_size": lambda c: c.pipeline.context_parallel_size == 1,
    # Without graphs nothing would count the dropped tokens.
    "moe.moe_expert_rank_capacity_factor": lambda c: not c.capture.enabled,
}
"""Settings that Megatron does not need, or refuses, although they are not null."""


@dataclass(frozen=True)
class FlagValue:
    """A value of the file as a flag.

    Attributes:
        key: Dotted path in the file.
        flag: The flag, Megatron's or chunkgraph's.
        values: Arguments of the flag, usually one; empty if the flag takes none.
        rivals: Other flags that decide the same setting.
    """

    key: str
    flag: str
    values: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()


def flag_values(config: Config, *, without_capture: bool) -> list[FlagValue]:
    """List all values that have a flag.

    Args:
        config: The contents of the file.
        without_capture: Whether to omit the sections of graphs.

    Raises:
        ConfigError: A value has no flag in Megatron.
    """
    has_graphs = config.capture.enabled and not without_capture
    _refuse(config, has_graphs=has_graphs)
    values = [*_special_values(config, has_graphs=has_graphs)]
    values += [
        FlagValue(item.path, flag, _texts(item, value), _RIVALS.get(item.path, ()))
        for item, flag, value in _active_settings(config)
        if has_graphs or not (item.flag or item.path.startswith(_GRAPHS))
    ]
    values.sort(key=lambda one: one.key.startswith(("packing", "stash")))
    if config.packing.context_parallel_sizes:
        # As in `chunkgraph train`: the loss is the mean over all tokens of the step.
        values.append(FlagValue("packing.context_parallel_sizes", "--calculate-per-token-loss"))
    return values


def _active_settings(config: Config) -> Iterator[tuple[Setting, str, Any]]:
    """Yield the settings that have an effect, each with its flag and its value."""
    pipeline = resolved(config).pipeline
    for item in settings_of(config.__class__):
        flag = item.flag or item.megatron
        if flag is None or _has_no_effect(item, config):
            continue
        if item.path in _WITHOUT_EFFECT and _WITHOUT_EFFECT[item.path](config):
            continue
        value = _value_at(config, item.path)
        if item.path.startswith("pipeline."):
            value = getattr(pipeline, item.name)
        if value is None or (item.megatron and value is False) or _is_off_switch(item, value):
            continue
        yield item, flag, value


def _is_off_switch(item: Setting, value: Any) -> bool:
    """Return whether a value is a section's switch that is off, or an empty list without effect."""
    if item.path in ("stash.enabled", "packing.max_packed_seqs"):
        return not value
    return value == () and not item.is_optional


def _has_no_effect(item: Setting, config: Config) -> bool:
    """Return whether the setting without which ``item`` has no effect is off."""
    return item.switch is not None and _value_at(config, item.switch) in (
        None,
        False,
        0,
        (),
        "none",
    )


def _texts(item: Setting, value: Any) -> tuple[str, ...]:
    """Format a value as the arguments of its flag."""
    if item.flag:
        return Flag(item).text_of(value)
    if value is True:
        return ()
    if item.path == "model.recompute_modules":
        return tuple(value)
    return (str(list(value)) if isinstance(value, tuple) else str(value),)


def _special_values(config: Config, *, has_graphs: bool) -> Iterator[FlagValue]:
    """Yield values that have several flags, or a flag of a different name."""
    model, pipeline = config.model, config.pipeline
    yield FlagValue("model.seq_length", "--max-position-embeddings", (str(model.seq_length),))
    if model.swiglu:
        # As in `chunkgraph train`: neither gated layers nor their neighbors have biases.
        yield FlagValue("model.swiglu", "--disable-bias-linear")
    if model.params_dtype == "bfloat16":
        yield FlagValue("model.params_dtype", "--bf16", rivals=("--fp16",))
    if model.layer_spec != "auto":
        yield FlagValue("model.layer_spec", "--transformer-impl", (model.layer_spec,))
    if config.moe.num_moe_experts is not None and pipeline.tensor_model_parallel_size > 1:
        # As in `chunkgraph train`; Megatron's default splits experts over the tensor ranks.
        key = "pipeline.tensor_model_parallel_size"
        yield FlagValue(key, "--expert-tensor-parallel-size", ("1",))
    yield FlagValue("model", "--position-embedding-type", ("rope",))
    for name, value in derived_fields(config).items():
        key = f"model.transformer_config.{name}"
        if value is False and not name.startswith("moe_"):
            raise ConfigError(
                f"{key} is false, for which a pretrain script may have a flag of another name. "
                "Leave it out, and pass Megatron's flag to the script."
            )
        if value is None or value is False:
            continue
        if name not in model.transformer_config:  # it follows from other settings
            key = "moe" if config.moe.num_moe_experts and "dropout" not in name else "model"
        yield FlagValue(key, f"--{name.replace('_', '-')}", _texts_of_field(name, value))
    if has_graphs:
        yield FlagValue("capture.enabled", GRANULARITY, ("chunk",))


def _texts_of_field(name: str, value: Any) -> tuple[str, ...]:
    """Format a field of Megatron's TransformerConfig as the arguments of its flag."""
    if value is True:
        return ()
    if "freq" in name:  # Megatron evaluates it as an expression, which has no spaces
        return (str(value).replace(" ", ""),)
    return tuple(map(str, value if isinstance(value, list) else [value]))


def _refuse(config: Config, *, has_graphs: bool) -> None:
    """Refuse values that have no flag in Megatron."""
    model, packing = config.model, config.packing
    if packing.context_parallel_sizes and not has_graphs:
        raise ConfigError(
            f"packing.context_parallel_sizes is {list(packing.context_parallel_sizes)}, but "
            "documents of a pretrain script are spread over ranks only with capture. Set it "
            "to [], capture the chunks, or use chunkgraph train."
        )
    for name in ("initial_bytes", "max_bytes"):
        if config.stash.enabled and has_graphs and getattr(config.stash, name) is not None:
            raise ConfigError(
                f"stash.{name} is {getattr(config.stash, name)}, which has no flag. Set it to "
                "null, or use chunkgraph train."
            )
    if model.hybrid_layer_pattern is not None:
        raise ConfigError(
            f"model.hybrid_layer_pattern is {model.hybrid_layer_pattern}, which a "
            "configuration file cannot pass to a pretrain script yet. Set it to null and pass "
            "Megatron's --hybrid-layer-pattern and --spec to the script, or use chunkgraph train."
        )
    if model.layer_spec not in ("auto", "local", "transformer_engine"):
        raise ConfigError(
            f"model.layer_spec {model.layer_spec} cannot be passed to a pretrain script by "
            "name. Set it to auto, and pass --spec to the script."
        )


def _value_at(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
