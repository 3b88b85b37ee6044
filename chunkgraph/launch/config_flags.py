"""Merge a configuration file into the flags of a Megatron pretrain script.

The sections ``model``, ``pipeline``, ``moe``, ``capture``, ``packing`` and ``stash`` become flags.
``train``, ``data`` and ``run`` apply to ``chunkgraph train`` only; a pretrain script gets its
steps, data and tokenizer from its own flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import GRANULARITY, Flag, flag_of
from chunkgraph.settings import Config, Setting, derived_fields, resolved, settings_of
from chunkgraph.settings.rule import Facts, Rule, check
from chunkgraph.settings.words import facts_of

__all__ = ["flag_values", "merge_flags"]

_VIRTUAL = "pipeline.virtual_pipeline_model_parallel_size"
_RIVALS = {
    _VIRTUAL: (
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--pipeline-model-parallel-layout",
    ),
    "model.recompute_granularity": ("--recompute-activations",),
    "model.params_dtype": ("--fp16",),
}
"""Other Megatron flags that decide the same setting."""
_SWITCHES = {"stash.enabled": "false", "packing.max_packed_seqs": "0", "capture.verify": "none"}
"""Switches and their off values; a flag that needs a switch is refused if the switch is off."""
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


@dataclass(frozen=True)
class FlagValue:
    """A value of the file as a flag.

    Attributes:
        key: Dotted path in the file.
        flag: The flag, Megatron's or chunkgraph's.
        values: Arguments of the flag, usually one; empty if the flag takes none.
    """

    key: str
    flag: str
    values: tuple[str, ...] = ()


def merge_flags(
    config: Config, script_args: Sequence[str], *, source: str
) -> tuple[list[str], list[str]]:
    """Prepend the file's values to the flags of the command line, which take precedence.

    Args:
        config: The contents of the file.
        script_args: Flags on the command line.
        source: Name of the file, for notes.

    Returns:
        All flags, and a note for each value of the file that the command line overrides.

    Raises:
        ConfigError: A value has no flag in Megatron.
    """
    line_flags = _flags_on(script_args)
    flags: list[str] = []
    notes: list[str] = []
    turned_off = line_flags.get(GRANULARITY) == ("layer",)
    if turned_off and config.capture.enabled:
        notes.append(f"{GRANULARITY} layer on the command line turns off capture of {source}")
    off = {path for path, value in _SWITCHES.items() if line_flags.get(flag_of(path)) == (value,)}
    idle = {item.path for item in settings_of(Config) if item.switch in off}
    for setting in flag_values(config, without_capture=turned_off):
        if setting.key in idle:
            continue  # the note of the switch covers it
        names = (setting.flag, *_RIVALS.get(setting.key, ()))
        override = next((name for name in names if name in line_flags), None)
        if override is None:
            flags += [setting.flag, *setting.values]
        elif override != setting.flag or line_flags[override] != setting.values:
            shown = " ".join([override, *line_flags[override]])
            notes.append(f"{shown} on the command line replaces {setting.key} of {source}")
    return [*flags, *script_args], notes


def _flags_on(script_args: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the flags of a command line, each with its arguments."""
    flags: dict[str, tuple[str, ...]] = {}
    name = ""
    for arg in script_args:
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            flags[name] = (value,) if equals else ()
        elif name:
            flags[name] = (*flags[name], arg)
    return flags


def flag_values(config: Config, *, without_capture: bool) -> list[FlagValue]:
    """List all values that have a flag.

    Args:
        config: The contents of the file.
        without_capture: Whether to omit the sections of graphs.

    Raises:
        ConfigError: A value has no flag in Megatron.
    """
    if without_capture:
        capture = config.capture.model_copy(update={"enabled": False})
        config = config.model_copy(update={"capture": capture})
    has_graphs = config.capture.enabled
    check(_RULES, facts_of(config), "these settings have no flags:")
    values = [*_special_values(config)]
    values += [
        FlagValue(item.path, flag, _texts(item, value))
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
        is_switched_off = item.switch and attrgetter(item.switch)(config) in (None, False, 0)
        if flag is None or is_switched_off:
            continue
        if item.path in _WITHOUT_EFFECT and _WITHOUT_EFFECT[item.path](config):
            continue
        is_pipeline = item.path.startswith("pipeline.")
        value = getattr(pipeline, item.name) if is_pipeline else attrgetter(item.path)(config)
        is_off = item.path in _SWITCHES and not value
        is_empty = value == () and not item.is_optional
        if value is None or (item.megatron and value is False) or is_off or is_empty:
            continue
        yield item, flag, value


def _texts(item: Setting, value: Any) -> tuple[str, ...]:
    """Format a value as the arguments of its flag."""
    if item.flag:
        return Flag(item).text_of(value)
    if value is True:
        return ()
    if item.path == "model.recompute_modules":
        return tuple(value)
    return (str(list(value)) if isinstance(value, tuple) else str(value),)


def _special_values(config: Config) -> Iterator[FlagValue]:
    """Yield values that have several flags, or a flag of a different name."""
    model, pipeline = config.model, config.pipeline
    yield FlagValue("model.seq_length", "--max-position-embeddings", (str(model.seq_length),))
    if model.swiglu:
        # As in `chunkgraph train`: neither gated layers nor their neighbors have biases.
        yield FlagValue("model.swiglu", "--disable-bias-linear")
    if model.params_dtype == "bfloat16":
        yield FlagValue("model.params_dtype", "--bf16")
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
    if config.capture.enabled:
        yield FlagValue("capture.enabled", GRANULARITY, ("chunk",))


def _texts_of_field(name: str, value: Any) -> tuple[str, ...]:
    """Format a field of Megatron's TransformerConfig as the arguments of its flag."""
    if value is True:
        return ()
    if "freq" in name:  # Megatron evaluates it as an expression, which has no spaces
        return (str(value).replace(" ", ""),)
    return tuple(map(str, value if isinstance(value, list) else [value]))
