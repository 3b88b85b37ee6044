"""The contract between the engine and a graph backend: captures, replays and addresses.

Two implementations derive from it and run the same test suite: ``CUDABackend`` and
``RecorderBackend`` (the CPU recorder). The engine depends on these classes only. A default is that
of a device whose work is synchronous and whose memory is not counted.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from chunkgraph.graphs.addresses import AddressRange, AddressRanges, Pool
from chunkgraph.graphs.allocations import AllocationLog
from chunkgraph.graphs.copies import Copier


class CopyNode(Protocol):
    """A copy to fixed memory, the target, with which each replay of a graph begins."""

    def read(self, address: int) -> bool:
        """Copy from ``address`` from now on; from the target's own, copy nothing.

        The source is as long as the target, and in use until the replays that read it
        are done, in stream order.

        Returns:
            False if the graph cannot read this memory. It then copies nothing.
        """


class Graph(Protocol):
    """A captured callable: every replay does the same work on the same addresses.

    Attributes:
        label: Name of the graph in errors.
    """

    label: str

    @property
    def copy_nodes(self) -> Sequence[CopyNode | None]:
        """Return a copy to each of the capture's ``targets``, None where there is none.

        Each copies nothing until `CopyNode.read`. Empty: the backend makes none.
        """

    def replay(self) -> None:
        """Run the captured work again on the current stream.

        Results are in the tensors that the capture produced, valid until the next replay of a
        graph that writes the same addresses.
        """

    def writes(self) -> AddressRanges:
        """Return the addresses that a replay may write: exact, or (CUDA) the whole pool."""

    def reads(self) -> AddressRanges:
        """Return the addresses of pools that a replay reads and that the graph did not allocate.

        Exact, or (CUDA, where it is unknown) empty.
        """

    def release(self) -> None:
        """Free the graph; a replay afterwards is an error."""


class GraphBackend(Protocol):
    """Create pools and capture into them."""

    name: str
    device: torch.device
    repeats_bits: bool
    """Whether eager work on this device always repeats its bits."""
    memsets_kept: str
    """Why small memsets are not replaced by kernels; "" if they are."""
    can_sleep: bool
    """Whether pools can give their memory back and get it again; each is then one range."""
    default_generator: torch.Generator
    """The random generator that graphs draw from by default."""

    @abstractmethod
    def new_pool(self, label: str) -> Pool:
        """Return a new, empty pool."""

    @abstractmethod
    def capture(
        self,
        label: str,
        pool: Pool,
        generators: Sequence[torch.Generator] = (),
        targets: Sequence[AddressRange | None] = (),
    ) -> AbstractContextManager[Graph]:
        """Capture the work inside the ``with`` block; allocations inside come from ``pool``.

        The graph can be replayed after the block. The capture does not change external memory that
        the captured work writes (nothing runs, or the bytes are restored), nor the random state.
        Captured work that sets a random state and then draws is refused.
        Tensors created inside hold undefined values until the first replay.

        Args:
            label: Name of the graph in errors.
            pool: Pool of the allocations.
            generators: Random generators, besides the device's default, that the work draws from.
            targets: Memory of the device, outside of all pools, that `Graph.copy_nodes` copy to;
                None: there is no such copy.

        Raises:
            CaptureError: A graph cannot hold the work; the graph and its allocations are freed.
        """

    def new_copier(self) -> Copier:
        """Return what copies between slots and the host."""
        return Copier()

    def on_capture_stream(self) -> AbstractContextManager[None]:
        """Run eager work on the stream that captures use (capture warmup)."""
        return nullcontext()

    @contextmanager
    def preserve_random_state(self, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
        """Restore the states of the device's default generator and of ``generators`` on exit."""
        states = [(g, g.get_state()) for g in (self.default_generator, *generators)]
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)

    def release_cached_memory(self) -> None:
        """Free memory that the allocator caches for eager work, before pools are filled."""
        return

    def release_workspaces(self) -> None:
        """Free workspaces of matrix libraries, unless a graph may use them, and cached memory."""
        return

    def take_workspaces(self) -> None:
        """Make matrix libraries allocate their workspaces for captures, in separate segments."""
        return

    def allocated_bytes(self) -> int:
        """Return the bytes of live tensors on the device; 0 if they are not counted."""
        return 0

    def observe_allocations(self) -> AbstractContextManager[AllocationLog]:
        """Observe the allocations of eager work on the capture stream."""
        return nullcontext(AllocationLog())

    def free_bytes(self) -> int | None:
        """Return the bytes free for allocations, including cached ones; None if unknown."""
        return None

    def synchronize(self) -> None:
        """Wait for the device."""
        return

    def storage_ranges(self, tensor: torch.Tensor) -> AddressRanges:
        """Return the addresses of the storage of ``tensor``."""
        storage = tensor.untyped_storage()
        return AddressRanges([(storage.data_ptr(), storage.data_ptr() + storage.nbytes())])
