"""Move rows between tensors and pages: one interface, two implementations."""

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
    """Kernels of the stash. They can be captured: shapes are fixed, and the host reads nothing.

    Attributes:
        reads_host_pages: Whether they work on a GPU with spill pages in host memory.
        loads_without_memory: Whether `load` allocates no memory, so that it may run on any stream.
    """

    reads_host_pages: bool
    loads_without_memory: bool

    def take(self, arena: Arena, rows: RowsInUse, layout: RowLayout) -> Ticket:
        """Allocate pages for the rows in use: all of them, or none if too few are free."""

    def store(
        self, arena: Arena, values: torch.Tensor, rows: RowsInUse, layout: RowLayout, ticket: Ticket
    ) -> None:
        """Copy the rows in use of ``values`` ([num_rows, row]) to their pages."""

    def load(
        self, arena: Arena, into: torch.Tensor, rows: RowsInUse, layout: RowLayout, ticket: Ticket
    ) -> None:
        """Copy the rows back to ``into``; rows that are not in use or had no room become zero."""

    def give_back(self, arena: Arena, ticket: Ticket) -> None:
        """Free the pages."""


def new_kernels(device: torch.device, choice: KernelChoice = "auto") -> StashKernels:
    """Return the kernels for ``device``.

    Args:
        device: Device of the pages.
        choice: ``auto`` uses Triton's kernels on a GPU if Triton is installed, else the reference
            kernels of plain torch operators. Both copy the same bits.

    Raises:
        ConfigError: ``choice`` is ``triton``, which is not available.
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
