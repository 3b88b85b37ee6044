"""The settings of a training run: pydantic models, read from YAML and written back.

`load_config` reads a file and applies ``section.key=value`` overrides. Every value is checked when
it is read, and the sections are checked against each other when the `Config` is built.
"""

from __future__ import annotations

from chunkgraph.settings.listing import Setting, settings_of
from chunkgraph.settings.loader import Config, config_from_mapping, load_config, to_mapping, to_yaml
from chunkgraph.settings.models import (
    CaptureConfig,
    ModelConfig,
    PackingConfig,
    PipelineConfig,
    Section,
    StashConfig,
    derived_fields,
    resolved,
)

__all__ = [
    "CaptureConfig",
    "Config",
    "ModelConfig",
    "PackingConfig",
    "PipelineConfig",
    "Section",
    "Setting",
    "StashConfig",
    "config_from_mapping",
    "derived_fields",
    "load_config",
    "resolved",
    "settings_of",
    "to_mapping",
    "to_yaml",
]
