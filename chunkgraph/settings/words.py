"""How settings are written in YAML, in Python and on a command line."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from chunkgraph._text import shorten
from chunkgraph.settings.listing import Setting, settings_of
from chunkgraph.settings.models import Settings, derived_fields
from chunkgraph.settings.rule import Facts, Words

_NAMES = {
    "capture.enabled": "captures",
    "stash.enabled": "stash",
}
"""Facts with another name than the last part of the setting's path."""
_MEGATRON_FLAGS = {
    "bf16": "--bf16",
    "fp4": "--fp4-format",
    "fp8_param": "--fp8-param-gather",
    "nccl_ub": "--use-nccl-ub",
}
_WITHOUT_VALUES = {
    "hybrid_layer_pattern": "hybrid model",
    "context_parallel_sizes": "packing=PackedBanks.of_limits(...)",
    "stash": "stash=StashConfig(...)",
    "te_rng_tracker": "model_parallel_cuda_manual_seed(seed, te_rng_tracker=True)",
}
"""Settings that are not a single value in a program."""


@functools.cache
def settings_by_fact() -> Mapping[str, Setting]:
    """Return the settings by the names that rules have for them."""
    return {_NAMES.get(item.path, item.name): item for item in settings_of(Settings)}


def _path(name: str) -> str:
    if name == "bf16":
        return "model.params_dtype"
    item = settings_by_fact().get(name)
    return item.path if item else f"model.transformer_config.{name}"


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
    item = settings_by_fact().get(name)
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


def facts_of(config: Settings) -> Facts:
    """Return the facts of a configuration file."""
    is_half = config.model.params_dtype == "bfloat16"
    facts = {
        **derived_fields(config),
        "packed": config.packing.max_packed_seqs > 0,
        "bf16": is_half,
        "on_gpu": config.device == "cuda",
        "element_bytes": 2 if is_half else 4,
        "fp8_recipe": config.model.fp8_recipe if config.model.fp8 else None,
    }

    def value(name: str) -> Any:
        item = settings_by_fact().get(name)
        if name in facts or item is None:
            return facts.get(name)
        return functools.reduce(getattr, item.path.split("."), config)

    return Facts(value, FILE)
