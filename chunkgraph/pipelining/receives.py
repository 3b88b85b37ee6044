"""`ReceivingStage`: a stage whose receive buffers exist only from a receive to its use."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from chunkgraph.engine.capture.grad_memory import use_count

__all__ = ["ReceiveMemory", "ReceivingStage"]

_META = torch.device("meta")


class ReceiveMemory:
    """Memory of receive buffers, which new receives use again as soon as nothing refers to it.

    NCCL records its stream on every buffer, so the CUDA allocator reuses a freed one only after the
    device has passed all transfers posted until then, and the host may be a step ahead. A receive
    need not wait for the device: its stream waits for the one that it is posted on. So this one
    must have waited for the last receive into the buffer, and run everything that reads it.
    """

    def __init__(self) -> None:
        self._storages: dict[tuple[torch.device, int], list[torch.UntypedStorage]]
        self._storages = defaultdict(list)

    @property
    def num_buffers(self) -> int:
        """Return the number of buffers, in use or not."""
        return sum(map(len, self._storages.values()))

    def empty_like(self, buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a new tensor like ``buffer`` on memory that nothing refers to."""
        num_bytes = buffer.untyped_storage().nbytes()
        storages = self._storages[device, num_bytes]
        if _ALONE not in (references := _references(storages)):
            storages.append(torch.UntypedStorage(num_bytes, device=device))
            references.append(_ALONE)
        storage = storages[references.index(_ALONE)]
        tensor = torch.empty(0, dtype=buffer.dtype, device=device)
        tensor.set_(storage, 0, buffer.shape, buffer.stride())
        return tensor.requires_grad_(buffer.requires_grad)

    def leave_used(self) -> None:
        """Leave the buffers that something refers to at the end of a step."""
        for storages in self._storages.values():
            pairs = zip(storages, _references(storages), strict=True)
            storages[:] = [storage for storage, references in pairs if references == _ALONE]

    def clear(self) -> None:
        """Leave all buffers to their users, if any."""
        self._storages.clear()


def _references(storages: Sequence[torch.UntypedStorage]) -> list[tuple[int, int]]:
    """Return how many references each storage has: from Python, and from tensors."""
    return [(sys.getrefcount(storage), use_count(storage._cdata)) for storage in storages]


_ALONE = _references([torch.UntypedStorage(0, device="cpu")])[0]


class ReceivingStage(PipelineStage):
    """A `PipelineStage` that allocates a receive buffer when it posts the receive.

    Torch before 2.15 keeps a buffer for every microbatch, and on it the input gradient of the last
    step. Here a tensor on the meta device takes the place of a buffer that is not in use. Torch
    2.15 allocates and drops buffers itself; it has None there.
    """

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return the receives of a microbatch's inputs."""
        _allocate(self.args_recv_info[fwd_chunk_id], self.new_buffer)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the receives of a microbatch's output gradients."""
        if self.has_backward:
            _allocate(self.grad_recv_info[bwd_chunk_id], self.new_buffer)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        """Take a microbatch's output gradients from the next stage, which is on this rank."""
        if any(grad is None for grad in next_stage_bwd_outputs):
            _allocate(self.grad_recv_info[mb_index], self.new_buffer)  # torch sets them to zero
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a microbatch, which takes its inputs from the buffers."""
        infos: Sequence[Any] = () if self.is_first else self.args_recv_info[fwd_chunk_id]
        unused = [_like(info.buffer, _META) for info in infos]
        try:
            for index, info in enumerate(infos):
                info.buffer = self.landed(index, info.buffer)
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            for info, buffer in zip(infos, unused, strict=True):
                if info.buffer is not None:  # torch 2.15 has taken it
                    info.buffer = buffer

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the backward of a microbatch, which takes its output gradients from the buffers."""
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _free(self.grad_recv_info.get(bwd_chunk_id, ()))
        return result

    def new_buffer(self, unused: torch.Tensor) -> torch.Tensor:
        """Return memory for a receive, like an unused buffer."""
        return _like(unused, self.device)

    def landed(self, index: int, received: torch.Tensor) -> torch.Tensor:
        """Return the memory that the forward reads input ``index`` from: what was received."""
        del index
        return received

    def free_buffers(self) -> None:
        """Drop all buffers: torch allocates those of a new schedule before its first step."""
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            _free(infos)


def _allocate(infos: Iterable[Any], new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Allocate the buffers that are not in use."""
    for info in infos:
        buffer = getattr(info, "buffer", None)  # the first stage's inputs have none
        if buffer is not None and buffer.is_meta:
            info.buffer = new(buffer)


def _free(infos: Iterable[Any]) -> None:
    """Drop the buffers; their users keep them."""
    for info in infos:
        buffer = getattr(info, "buffer", None)
        if buffer is not None and not buffer.is_meta:
            info.buffer = _like(buffer, _META)


def _like(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)
