"""What moves rows between tensors and pages: one interface, two implementations."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Literal, Protocol

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.memory.stash.arena import Arena
from chunkgraph.memory.stash.reference import ReferenceKernels
from chunkgraph.memory.stash.rows import RowLayout, RowsInUse
from chunkgraph.memory.stash.ticket import Ticket

__all__ = ["KernelChoice", "StashKernels", "new_kernels"]

KernelChoice = Literal["auto", "reference", "triton"]


class StashKernels(Protocol):
    """All of it runs on the device and in graphs: fixed shapes, nothing read on the host.

    Attributes:
        reads_host_pages: whether it works on a GPU with spill pages in the host's memory.
        loads_without_memory: whether `load` takes no memory, so that it may run on any stream.
    """

    reads_host_pages: bool
    loads_without_memory: bool

    def take(self, arena: Arena, rows: RowsInUse, layout: RowLayout) -> Ticket:
        """Take pages for the rows in use; all or, where too few are free, none."""

    def store(
        self, arena: Arena, values: torch.Tensor, rows: RowsInUse, layout: RowLayout, ticket: Ticket
    ) -> None:
        """Copy the rows in use of ``values`` ([num_rows, row]) to their pages."""

    def load(
        self, arena: Arena, into: torch.Tensor, rows: RowsInUse, layout: RowLayout, ticket: Ticket
    ) -> None:
        """Copy them back; rows that are not in use, or found no room, are zero."""

    def give_back(self, arena: Arena, layout: RowLayout, ticket: Ticket) -> None:
        """The pages are free again."""


def new_kernels(device: torch.device, choice: KernelChoice = "auto") -> StashKernels:
    """The implementation for ``device``.

    Args:
        device: where the pages lie.
        choice: ``auto`` takes Triton's on a GPU where it is installed, else the reference in plain
            torch operators. Both copy the same bits.

    Raises:
        ConfigError: Triton was asked for and cannot be had.
    """
    has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    if choice == "triton" and not has_triton:
        raise ConfigError(
            f"The stash's Triton kernels need a GPU and triton; the device is {device}. Choose "
            "'reference', or 'auto'."
        )
    if choice == "reference" or not has_triton:
        return ReferenceKernels()
    module = importlib.import_module("chunkgraph.memory.stash.triton_kernels")
    kernels: StashKernels = module.TritonKernels()
    return kernels
