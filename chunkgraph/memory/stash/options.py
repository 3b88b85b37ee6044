"""Options of a rank's stash: its size, and the policy when it runs out of pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from chunkgraph.errors import ConfigError
from chunkgraph.memory.stash.kernels import KernelChoice
from chunkgraph.settings.stash import StashSettings

__all__ = ["StashOptions"]


@dataclass(frozen=True, kw_only=True)
class StashOptions(StashSettings):
    """Add choices that a configuration file does not have to the settings of a stash.

    Attributes:
        kernels: See `new_kernels`.
        skips_single_slots: Whether a chunk with one slot, whose backwards directly follow their
            forwards, does not stash.

    Raises:
        ConfigError: A value is out of its range.
    """

    kernels: KernelChoice = "auto"
    skips_single_slots: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernels not in get_args(KernelChoice):
            choices = ", ".join(map(repr, get_args(KernelChoice)))
            raise ConfigError(f"stash.kernels is {self.kernels!r}; it must be one of {choices}.")
