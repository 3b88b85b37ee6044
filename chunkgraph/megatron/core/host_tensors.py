"""Small tensors of Megatron's that are on the host on a machine with a GPU, on a CPU host."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["TorchOfTheHost", "has_gpu", "host_full"]


def has_gpu() -> bool:
    """Whether Megatron runs on GPUs: a CPU host may tell it so where there are none."""
    return torch.cuda.is_available() and not isinstance(torch.cuda.current_device(), torch.device)


class _HostTensor(torch.Tensor):
    """A tensor that would be on the host on a machine with a GPU, and is free to be read there."""

    def item(self) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return super().item()

    def tolist(self) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return super().tolist()

    def detach(self) -> _HostTensor:
        return self


def host_full(shape: tuple[int, ...], value: int) -> torch.Tensor:
    """A tensor of whole numbers on the host, which no capture sees."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        made = torch.full(shape, value, dtype=torch.long, device="cpu")
        return made if has_gpu() else made.as_subclass(_HostTensor)


class TorchOfTheHost:
    """The name ``torch`` in a module of Megatron's on a CPU host.

    Tensors made without a device are on the host, and read there again: a CUDA graph does not see
    that, and the recorder would take it for a read of device memory.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A tensor outside of the capture."""
        return self._made(torch.tensor, args, kwargs)

    def full(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A tensor outside of the capture."""
        return self._made(torch.full, args, kwargs)

    @staticmethod
    def _made(make: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if "device" in kwargs:
            return make(*args, **kwargs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return make(*args, **kwargs).as_subclass(_HostTensor)
