"""A tensor on memory that is known by its address alone."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["tensor_at"]


class _RawBytes:
    """Device bytes for `torch.as_tensor`, which makes a view and takes no ownership."""

    def __init__(self, start: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (start, False),
            "version": 3,
        }


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """The bytes at ``address`` as a tensor (dtype uint8) that keeps nothing alive.

    Args:
        address: of memory of ``device`` that is there for as long as the tensor is used.
        num_bytes: at least 1.
        device: a CPU or a CUDA device.
    """
    if device.type == "cuda":
        return torch.as_tensor(_RawBytes(address, num_bytes), device=device)
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)
