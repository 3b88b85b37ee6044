"""The settings of a training run: frozen dataclasses, read from YAML and written back.

`load_config` reads a file and applies ``section.key=value`` overrides. Every value is checked when
it is read, and the sections are checked against each other when the `Config` is built.
"""

from __future__ import annotations

from chunkgraph.settings.config import (
    CaptureConfig,
    Config,
    DataConfig,
    ExpertConfig,
    ModelConfig,
    PackingConfig,
    PipelineConfig,
    RunConfig,
    StashConfig,
    TrainConfig,
)
from chunkgraph.settings.loader import (
    Loaded,
    config_from_mapping,
    load_config,
    load_with_origins,
    to_mapping,
    to_yaml,
)
from chunkgraph.settings.resolved import resolved
from chunkgraph.settings.setting import Setting, settings_of

__all__ = [
    "CaptureConfig",
    "Config",
    "DataConfig",
    "ExpertConfig",
    "Loaded",
    "ModelConfig",
    "PackingConfig",
    "PipelineConfig",
    "RunConfig",
    "Setting",
    "StashConfig",
    "TrainConfig",
    "config_from_mapping",
    "load_config",
    "load_with_origins",
    "resolved",
    "settings_of",
    "to_mapping",
    "to_yaml",
]
