"""The values of a configuration file, each with its flag in a Megatron pretrain script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import GRANULARITY, Flag
from chunkgraph.settings import Config, Setting, resolved, settings_of

__all__ = ["FlagValue", "Off", "flag_values", "settings_that_are_off"]

_VIRTUAL = "pipeline.virtual_pipeline_model_parallel_size"
_RIVALS = {
    _VIRTUAL: (
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--pipeline-model-parallel-layout",
    ),
    "model.recompute_granularity": ("--recompute-activations",),
}
"""Further flags of Megatron that decide the same thing."""
_GRAPHS = ("capture", "packing", "stash")
"""Sections that mean something only with graphs."""
_WITHOUT_EFFECT: dict[str, Callable[[Config], bool]] = {
    "model.recompute_modules": lambda c: c.model.recompute_granularity != "selective",
    _VIRTUAL: lambda c: c.pipeline.num_model_chunks == 1,
    "pipeline.microbatch_group_size_per_vp_stage": lambda c: c.pipeline.num_model_chunks == 1,
    "pipeline.context_parallel_size": lambda c: c.pipeline.context_parallel_size == 1,
    "moe.moe_pad_expert_input_to_capacity": lambda c: c.moe.moe_expert_capacity_factor is None,
    # Without graphs nobody would count what it cuts.
    "moe.moe_expert_rank_capacity_factor": lambda c: not c.capture.enabled,
}
"""Values that Megatron does not need, or refuses, although they are not null."""
_OFF = {
    "model.params_dtype": (("--bf16", "--fp16"), None),
    "pipeline.context_parallel_size": (("--context-parallel-size",), "1"),
    "capture.enabled": ((GRANULARITY,), "layer"),
}
"""Flags that turn on what these settings leave off, and their values that do not."""


@dataclass(frozen=True)
class FlagValue:
    """A value of the file as a flag.

    Attributes:
        key: where it stands in the file.
        flag: Megatron's flag, or ours.
        values: of the flag, usually one; none where the flag takes none.
        rivals: flags that decide the same thing.
    """

    key: str
    flag: str
    values: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()


@dataclass(frozen=True)
class Off:
    """A setting that the file leaves off.

    Attributes:
        key: where it stands in the file.
        flags: those that would turn it on.
        idle: their value that does not.
    """

    key: str
    flags: tuple[str, ...]
    idle: str | None = None


def flag_values(config: Config, *, without_capture: bool) -> list[FlagValue]:
    """List all values that have a flag.

    Args:
        config: the file's contents.
        without_capture: leave out the sections of graphs.

    Raises:
        ConfigError: a value has no flag in Megatron.
    """
    has_graphs = config.capture.enabled and not without_capture
    _refuse(config, has_graphs=has_graphs)
    found = [*_more(config, has_graphs=has_graphs)]
    found += [
        FlagValue(item.path, flag, _texts(item, value), _RIVALS.get(item.path, ()))
        for item, flag, value in _asked(config)
        if has_graphs or not (item.flag or item.path.startswith(_GRAPHS))
    ]
    found.sort(key=lambda one: one.key.startswith(("packing", "stash")))
    if config.packing.context_parallel_sizes:
        # As in `chunkgraph train`: the mean over the step's tokens, whoever works on them.
        found.append(FlagValue("packing.context_parallel_sizes", "--calculate-per-token-loss"))
    return found


def settings_that_are_off(config: Config) -> list[Off]:
    """List what the file leaves out on purpose and a command line may bring in."""
    found = []
    for item in settings_of(config.__class__):
        if item.path in _OFF or _needs_more(item, config):
            continue
        value = _value_at(config, item.path)
        flag = item.flag or item.megatron
        if flag is None or item.path == "pipeline.microbatch_group_size_per_vp_stage":
            continue
        if item.path == _VIRTUAL:
            value = None if config.pipeline.num_model_chunks == 1 else value
        if value in (None, False, ()) or (item.path == _SEQS and not value):
            idle = None
            if item.flag and value is not None and value != ():
                idle = Flag(item).text_of(value)[0]
            found.append(Off(item.path, (flag, *_RIVALS.get(item.path, ())), idle))
    is_off = {
        "model.params_dtype": config.model.params_dtype == "float32",
        "pipeline.context_parallel_size": config.pipeline.context_parallel_size == 1,
        "capture.enabled": not config.capture.enabled,
    }
    return [*found, *(Off(path, *_OFF[path]) for path, off in is_off.items() if off)]


_SEQS = "packing.max_packed_seqs"


def _asked(config: Config) -> Iterator[tuple[Setting, str, Any]]:
    """Yield the settings that ask for something, each with its flag and its value."""
    pipeline = resolved(config).pipeline
    for item in settings_of(config.__class__):
        flag = item.flag or item.megatron
        if flag is None or _needs_more(item, config):
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
    """True for a section's switch that is off, and for an empty list that means nothing."""
    if item.path in ("stash.enabled", _SEQS):
        return not value
    return value == () and not item.is_optional


def _needs_more(item: Setting, config: Config) -> bool:
    """True where the setting has no effect, as what it needs is off."""
    return item.needs is not None and _value_at(config, item.needs) in (None, False, 0, (), "none")


def _texts(item: Setting, value: Any) -> tuple[str, ...]:
    """Write a value as it stands after its flag."""
    if item.flag:
        return Flag(item).text_of(value)
    if value is True:
        return ()
    if item.path == "model.recompute_modules":
        return tuple(value)
    return (str(list(value)) if isinstance(value, tuple) else str(value),)


def _more(config: Config, *, has_graphs: bool) -> Iterator[FlagValue]:
    """Yield what has several flags, or none of its own name."""
    model, pipeline = config.model, config.pipeline
    yield FlagValue("model.seq_length", "--max-position-embeddings", (str(model.seq_length),))
    if model.swiglu:
        # As `chunkgraph train` builds it: gated layers have no biases, nor have those next to them.
        yield FlagValue("model.swiglu", "--disable-bias-linear")
    if model.params_dtype == "bfloat16":
        yield FlagValue("model.params_dtype", "--bf16", rivals=("--fp16",))
    if model.layer_spec != "auto":
        yield FlagValue("model.layer_spec", "--transformer-impl", (model.layer_spec,))
    if config.moe.num_moe_experts is not None and pipeline.tensor_model_parallel_size > 1:
        # As `chunkgraph train` has it; Megatron would split experts over those ranks.
        key = "pipeline.tensor_model_parallel_size"
        yield FlagValue(key, "--expert-tensor-parallel-size", ("1",))
    if has_graphs:
        yield FlagValue("capture.enabled", GRANULARITY, ("chunk",))


def _refuse(config: Config, *, has_graphs: bool) -> None:
    """Refuse what has no flag in Megatron."""
    model, packing = config.model, config.packing
    if packing.context_parallel_sizes and not has_graphs:
        raise ConfigError(
            f"packing.context_parallel_sizes is {list(packing.context_parallel_sizes)}, but "
            "without capture nobody spreads the documents of a pretrain script over ranks. Set it "
            "to [], capture the chunks, or use chunkgraph train."
        )
    if packing.pad_seq_to_mult > 1:
        raise ConfigError(
            f"packing.pad_seq_to_mult is {packing.pad_seq_to_mult}, but a pretrain script's "
            "data set (--sft) places its documents itself. Set it to 1, or use chunkgraph train."
        )
    if model.hybrid_layer_pattern is not None:
        raise ConfigError(
            f"model.hybrid_layer_pattern is {model.hybrid_layer_pattern}, which this file "
            "cannot give to a pretrain script yet. Set it to null and give the script Megatron's "
            "own --hybrid-layer-pattern and --spec, or use chunkgraph train."
        )
    if model.layer_spec not in ("auto", "local", "transformer_engine"):
        raise ConfigError(
            f"model.layer_spec {model.layer_spec} cannot be given to a pretrain script by this "
            "name. Set it to auto, and give the script --spec."
        )


def _value_at(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
