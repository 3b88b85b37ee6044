"""What the engine asks of a graph backend: pools, captures, replays and addresses.

Two implementations hold this contract and run the same test suite: ``CUDABackend`` and
``RecorderBackend`` (the CPU recorder). The engine knows no other type.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch._ops import OpOverload

from chunkgraph.graphs.addresses import AddressRanges

__all__ = ["Graph", "GraphBackend", "Pool", "Router"]


class Pool(Protocol):
    """Memory that captured graphs allocate from. Freed blocks serve later captures of this pool."""

    label: str

    @property
    def reserved_bytes(self) -> int:
        """Bytes the pool holds, in use or free."""

    @property
    def num_allocations(self) -> int:
        """Allocations (recorder) or segments (CUDA) so far; a replay must not change it."""

    def reserve(self, num_bytes: int) -> None:
        """Take about so much from the device now, in one piece, for captures to divide.

        Captures that take it bit by bit leave more unused at the ends of the pieces. A hint: no
        pool is larger afterwards than its graphs need, if ``num_bytes`` is what they keep.
        """

    def live(self) -> AddressRanges:
        """Addresses of the blocks in use now."""

    def reserved(self) -> AddressRanges:
        """Addresses of everything the pool holds."""

    def is_alias(self, storage: torch.UntypedStorage) -> bool:
        """Whether a graph replays with this storage, which keeps no block in use."""

    def poison(self) -> None:
        """Fill the whole pool with 0xFF bytes (a NaN in every floating dtype), in stream order."""


class Graph(Protocol):
    """A captured callable: the same work on the same addresses, as often as wanted."""

    label: str

    def replay(self) -> None:
        """Run the captured work again on the current stream.

        Results are in the tensors that the capture produced, valid until the next replay of a
        graph that writes the same addresses.
        """

    def writes(self) -> AddressRanges:
        """Addresses that a replay may write (exact for the recorder, else the whole pool)."""

    def release(self) -> None:
        """Drop the graph; replaying afterwards is an error."""


class Router(Protocol):
    """Chooses the pool of an operator's results in a capture."""

    scratch: Pool

    def goes_to_scratch(self, func: OpOverload) -> bool:
        """Whether ``func``, the next operator of the captured work, allocates from scratch."""


class GraphBackend(Protocol):
    """Makes pools and captures into them."""

    name: str
    device: torch.device
    memsets_kept: str
    """Why small memsets, which were to become kernels, stay what they are; empty: they do not."""

    def new_pool(self, label: str) -> Pool:
        """An empty pool of its own."""

    def capture(
        self,
        label: str,
        pool: Pool,
        generators: Sequence[torch.Generator] = (),
        router: Router | None = None,
    ) -> AbstractContextManager[Graph]:
        """Capture what runs inside the ``with`` block; allocations inside come from ``pool``.

        The graph can be replayed once the block has ended. External memory that the captured work
        writes is as before the block (nothing has run, or it was put back); so is the random
        state. Tensors made inside hold undefined values until the first replay.

        Args:
            label: names the graph in errors.
            pool: where allocations go.
            generators: random generators, besides the device's default, that the work draws from.
            router: sends the results of some operators to another pool.

        Raises:
            CaptureError: the work cannot be held by a graph. Nothing of the capture is left behind.
        """

    def on_capture_stream(self) -> AbstractContextManager[None]:
        """Run eager work on the stream that captures use (capture warmup)."""

    def preserve_random_state(
        self, generators: Sequence[torch.Generator] = ()
    ) -> AbstractContextManager[None]:
        """Leave the device's default random state, and ``generators``, as they are.

        Work inside draws random numbers that are as good as any.
        """

    def release_cached_memory(self) -> None:
        """Give back what the allocator keeps for later eager work, before pools are filled.

        With it, what matrix libraries keep to work in, unless a graph of anybody's may need it.
        """

    def take_workspaces(self) -> None:
        """Have matrix libraries take what they work in on the capture stream, in pieces alone."""

    def allocated_bytes(self) -> int:
        """Bytes of live tensors on the device; 0 where nobody counts them."""

    def divisible_bytes(self) -> int:
        """Of those, what could lie in a block that `Pool.reserve` took; small ones could not."""

    def free_bytes(self) -> int | None:
        """Bytes that new allocations could have, cached ones included; None: unknown."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def raw(self, tensor: torch.Tensor) -> AddressRanges:
        """The addresses of the storage behind ``tensor``."""
