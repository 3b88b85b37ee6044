"""The configuration of a run: its sections, with Megatron's names for Megatron's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from chunkgraph.settings.capture import CaptureConfig
from chunkgraph.settings.experts import ExpertConfig
from chunkgraph.settings.model import ModelConfig
from chunkgraph.settings.packing import PackingConfig
from chunkgraph.settings.pipeline import PipelineConfig
from chunkgraph.settings.run import DataConfig, RunConfig, TrainConfig
from chunkgraph.settings.setting import setting
from chunkgraph.settings.stash import StashConfig

__all__ = [
    "CaptureConfig",
    "Config",
    "DataConfig",
    "ExpertConfig",
    "ModelConfig",
    "PackingConfig",
    "PipelineConfig",
    "RunConfig",
    "StashConfig",
    "TrainConfig",
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run.

    Raises:
        ConfigError: a value is out of range, or two values cannot go together.
        TopologyError: the sizes cannot form a pipeline.
    """

    model: ModelConfig
    train: TrainConfig
    name: str = setting("chunkgraph", help="Name of the run, for headings and directories.")
    device: Literal["cpu", "cuda", "auto"] = setting(
        "auto", help="Device to train on. auto: cuda where there is a GPU, otherwise cpu."
    )
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    moe: ExpertConfig = field(default_factory=ExpertConfig)
    stash: StashConfig = field(default_factory=StashConfig)
    data: DataConfig = field(default_factory=DataConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        from chunkgraph.settings.rules import check_config

        check_config(self)

    @property
    def tokens_per_sequence(self) -> int:
        """Return the tokens of a sequence in the pipeline, packed or not."""
        packed_tokens = self.packing.max_packed_tokens if self.packing.max_packed_seqs else None
        return packed_tokens or self.model.seq_length
