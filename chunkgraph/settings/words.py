"""The words of a configuration file, a program and a command line for settings."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from chunkgraph._text import shorten
from chunkgraph.settings.capture import CaptureConfig
from chunkgraph.settings.experts import ExpertConfig
from chunkgraph.settings.model import ModelConfig
from chunkgraph.settings.packing import PackingConfig
from chunkgraph.settings.pipeline import PipelineConfig
from chunkgraph.settings.rule import Facts, Words
from chunkgraph.settings.run import DataConfig, TrainConfig
from chunkgraph.settings.setting import Setting, settings_of
from chunkgraph.settings.stash import StashConfig

if TYPE_CHECKING:
    from chunkgraph.settings.config import Config

__all__ = ["FILE", "FLAGS", "PROGRAM", "all_settings", "fact_of", "facts_of"]

_SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "pipeline": PipelineConfig,
    "moe": ExpertConfig,
    "train": TrainConfig,
    "data": DataConfig,
    "packing": PackingConfig,
    "capture": CaptureConfig,
    "stash": StashConfig,
}
"""Sections with rules."""
_NAMES = {"capture.enabled": "captures", "stash.enabled": "stash"}
"""Facts with another name than the last part of the setting's path."""
_MEGATRON_FLAGS = {
    "bf16": "--bf16",
    "fp4": "--fp4-format",
    "fp8_param": "--fp8-param-gather",
    "nccl_ub": "--use-nccl-ub",
    "cuda_graph_scope_deprecated": "--cuda-graph-scope",
}
_WITHOUT_VALUES = {
    "hybrid_layer_pattern": "hybrid model",
    "context_parallel_sizes": "packing=PackedBanks.of_limits(...)",
    "stash": "stash=StashConfig(...)",
    "te_rng_tracker": "model_parallel_cuda_manual_seed(seed, te_rng_tracker=True)",
}
"""Settings that are not a single value in a program."""


def fact_of(path: str) -> str:
    """Return the name of a setting's fact."""
    return _NAMES.get(path) or path.rpartition(".")[2]


@functools.cache
def all_settings() -> tuple[Setting, ...]:
    """Return the settings of all sections with rules."""
    return tuple(s for name, kind in _SECTIONS.items() for s in settings_of(kind, f"{name}."))


@functools.cache
def _settings() -> dict[str, Setting]:
    """Return the settings by the names of their facts."""
    return {fact_of(item.path): item for item in all_settings()}


def _path(name: str) -> str:
    if name == "bf16":
        return "model.params_dtype"
    item = _settings().get(name)
    return item.path if item else name


def _in_file(name: str, value: Any) -> str:
    if name == "bf16":
        value = "bfloat16" if value else "float32"
    return f"{_path(name)}={_yaml(value)}"


def _yaml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return shorten(f"[{', '.join(map(_yaml, value))}]")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shorten(str(value))


def _attribute(name: str) -> str:
    return "gated_linear_unit" if name == "swiglu" else name


def _in_program(name: str, value: Any) -> str:
    if name in _WITHOUT_VALUES:
        return _WITHOUT_VALUES[name]
    return f"{_attribute(name)}={list(value) if isinstance(value, tuple) else value!r}"


def _flag(name: str) -> str:
    item = _settings().get(name)
    flag = (item.flag or item.megatron) if item else None
    return flag or _MEGATRON_FLAGS.get(name) or f"--{name.replace('_', '-')}"


def _on_command_line(name: str, value: Any) -> str:
    if name == "data_parallel_size":  # Megatron divides the processes
        return f"{value} data-parallel ranks"
    flag = _flag(name)
    if value is None or value is False:
        return f"without {flag}"
    values = value if isinstance(value, (list, tuple)) else [value]
    return " ".join([flag, *(str(one) for one in values if one is not True)])


FILE = Words(_path, _in_file, verb=" is ")
"""``model.fp8=e4m3``"""
PROGRAM = Words(_attribute, _in_program)
"""``fp8='e4m3'``"""
FLAGS = Words(_flag, _on_command_line)
"""``--fp8-format e4m3``"""


def facts_of(config: Config) -> Facts:
    """Return the facts of a configuration file."""
    flex = config.moe.moe_token_dispatcher_type == "flex"
    derived = {
        "packed": config.packing.max_packed_seqs > 0,
        "bf16": config.model.params_dtype == "bfloat16",
        "on_gpu": config.device == "cuda",
        "element_bytes": 2 if config.model.params_dtype == "bfloat16" else 4,
        "fp8_recipe": config.model.fp8_recipe if config.model.fp8 else None,
        # As the model is built: with flex, experts are not padded to a capacity.
        "moe_pad_expert_input_to_capacity": config.moe.moe_pad_expert_input_to_capacity
        and not flex,
    }

    def value(name: str) -> Any:
        if name in derived:
            return derived[name]
        if name == "device":
            return config.device
        item = _settings().get(name)
        if item is None:
            return None
        section, _, key = item.path.partition(".")
        return getattr(getattr(config, section), key)

    return Facts(value, FILE)
