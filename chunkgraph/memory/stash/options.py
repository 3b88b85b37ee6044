"""How a rank's stash is sized, and what follows when it runs out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from chunkgraph.errors import ConfigError
from chunkgraph.memory.stash.kernels import KernelChoice
from chunkgraph.settings.stash import StashSettings

__all__ = ["StashOptions"]


@dataclass(frozen=True, kw_only=True)
class StashOptions(StashSettings):
    """The settings of a stash, and choices that a configuration file does not have.

    Attributes:
        kernels: see `new_kernels`.
        skips_single_slots: whether a chunk with one slot, each of whose backwards follows its
            forward at once, keeps what its experts save where it is.

    Raises:
        ConfigError: a value is out of its range.
    """

    kernels: KernelChoice = "auto"
    skips_single_slots: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernels not in get_args(KernelChoice):
            choices = ", ".join(map(repr, get_args(KernelChoice)))
            raise ConfigError(f"stash.kernels is {self.kernels!r}; it must be one of {choices}.")
