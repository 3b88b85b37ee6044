"""The contract between the engine and a graph backend: pools, captures, replays and addresses.

Two implementations derive from it and run the same test suite: ``CUDABackend`` and
``RecorderBackend`` (the CPU recorder). The engine depends on these classes only. A default is that
of a device whose work is synchronous and whose memory is not counted.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from chunkgraph.graphs.addresses import AddressRange, AddressRanges, tensor_at
from chunkgraph.graphs.allocations import AllocationLog

__all__ = ["CopyNode", "Graph", "GraphBackend", "Pool"]


class Pool(Protocol):
    """Memory that captured graphs allocate from. Freed blocks serve later captures of this pool."""

    label: str
    device: torch.device

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that the pool holds, in use or free."""
        return self.reserved().num_bytes

    @abstractmethod
    def reserve(self, num_bytes: int) -> None:
        """Allocate about ``num_bytes`` from the device, in one piece that captures divide.

        Captures that allocate many small pieces waste memory at the end of each piece. This is a
        hint: if ``num_bytes`` is the peak of the captured work, the pool becomes no larger than
        necessary.
        """

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Allocate at least 1 byte, outside of captures, until its last tensor is freed."""

    @abstractmethod
    def sleep(self) -> None:
        """Give the memory back to the device, which has finished all work; keep the addresses.

        Only for pools of a backend with ``can_sleep``. `reserved` stays as it is.
        """

    @abstractmethod
    def wake(self) -> None:
        """Get memory for the same addresses, with undefined contents.

        Raises:
            torch.OutOfMemoryError: Too little is free; the pool still sleeps.
        """

    @abstractmethod
    def live(self) -> AddressRanges:
        """Return the addresses of the blocks in use."""

    @abstractmethod
    def reserved(self) -> AddressRanges:
        """Return the addresses of all memory of the pool."""

    @abstractmethod
    def alias(self, start: int, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage on the pool's memory that keeps no block in use."""

    def is_alias(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a graph replays on this storage; graphs of most backends hold none."""
        del storage
        return False

    def poison(self, kept: Iterable[AddressRange] = ()) -> None:
        """Fill all but ``kept`` with 0xFF (a NaN in every floating dtype), in stream order."""
        for area in self.reserved() - AddressRanges(kept):
            tensor_at(area.start, area.end - area.start, self.device).fill_(0xFF)


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
