"""`CudaAllocations`: the allocations on one stream, from the history of the caching allocator."""

from __future__ import annotations

from typing import Any, Self

import torch

from chunkgraph.graphs.allocations import Allocation

__all__ = ["CudaAllocations"]


class CudaAllocations:
    """An `AllocationLog`. It stays empty if the user records the allocator's history meanwhile.

    Args:
        stream: The stream of the allocations.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._is_recording = False
        self._num_before = 0

    def __enter__(self) -> Self:
        if not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history("all", context=None)
            self._is_recording = True
            self._num_before = len(self._trace())
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_recording:
            self._is_recording = False
            torch.cuda.memory._record_memory_history(None)

    def num_events(self) -> int:
        """See `AllocationLog`."""
        return len(self._events())

    def allocations(self) -> list[Allocation]:
        """See `AllocationLog`."""
        begun: dict[int, tuple[int, int]] = {}
        allocations: list[Allocation] = []
        for number, event in enumerate(self._events()):
            address = event["addr"]
            if event["action"] == "alloc" and event["stream"] == self._stream.cuda_stream:
                begun[address] = event["size"], number
            elif event["action"] == "free_requested" and address in begun:
                allocations.append(Allocation(*begun.pop(address), number))
        return allocations + [Allocation(*place, None) for place in begun.values()]

    def _events(self) -> list[dict[str, Any]]:
        return self._trace()[self._num_before :] if self._is_recording else []

    def _trace(self) -> list[dict[str, Any]]:
        return torch.cuda.memory._snapshot()["device_traces"][self._stream.device_index]
