"""Emulate, on a CPU host, Megatron's small tensors that stay on the host next to a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["HostTorch", "has_gpu", "host_full"]


def has_gpu() -> bool:
    """Return whether there is a real GPU; a CPU host makes torch report one without a GPU."""
    return torch.cuda.is_available() and issubclass(torch.cuda.Stream, torch.Stream)


class _HostTensor(torch.Tensor):
    """A tensor that lies on the host on a machine with a GPU, where reading it is allowed."""

    def item(self) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return super().item()

    def tolist(self) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return super().tolist()

    def detach(self) -> _HostTensor:
        return self


def host_full(shape: tuple[int, ...], value: int) -> torch.Tensor:
    """Return an int64 host tensor of ``shape`` filled with ``value``; captures do not see it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        tensor = torch.full(shape, value, dtype=torch.long, device="cpu")
        return tensor if has_gpu() else tensor.as_subclass(_HostTensor)


class HostTorch:
    """Replace the name ``torch`` in one of Megatron's modules on a CPU host.

    Next to a GPU, tensors made without a device lie on the host, and Megatron reads them there. A
    CUDA graph does not see this; the recorder would report a read of device memory.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call `torch.tensor`, outside of the capture if no device is named."""
        return self._create(torch.tensor, args, kwargs)

    def full(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call `torch.full`, outside of the capture if no device is named."""
        return self._create(torch.full, args, kwargs)

    @staticmethod
    def _create(make: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if "device" in kwargs:
            return make(*args, **kwargs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return make(*args, **kwargs).as_subclass(_HostTensor)
