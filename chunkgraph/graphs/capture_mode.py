"""Intercept the operators of a CUDA capture: refuse some, and make host tensors constants.

A CUDA graph runs nothing on the host. A number that a forward computes on the host and passes to a
kernel is fixed in the graph. So is a tensor that it copies to the device; torch refuses such a
copy, because the host memory may be freed before a replay. Here the copy comes from memory that
persists. Random draws on the host, which no replay repeats, are refused. A host tensor that a
forward writes is like any Python state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from chunkgraph.errors import IllegalOperationError
from chunkgraph.graphs.failure import check_backward, illegal_operation
from chunkgraph.graphs.operators import OperatorMode, tensors_in
from chunkgraph.graphs.random_state import CapturedGenerator, draws

_aten = torch.ops.aten
_ALIGNMENT = 256
_ARENA_BYTES = 16 << 20


class HostMemory:
    """Host memory that graphs copy their constants from, allocated before a capture.

    Args:
        is_pinned: Whether the memory is pinned, as graphs require; False for tests.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self.bytes = torch.empty(
            _ARENA_BYTES, dtype=torch.uint8, device="cpu", pin_memory=is_pinned
        )
        self._end = 0
        self._copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def hold(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """Return a copy of a dense tensor in this memory; equal constants share one copy.

        Raises:
            IllegalOperationError: Too little memory is left; the message has the graph's ``label``.
        """
        raw = _raw(tensor)
        key = (tensor.dtype, tensor.shape, tensor.stride(), raw.numpy().tobytes())
        if key not in self._copies:
            end = self._end + raw.numel()
            if end > self.bytes.numel():
                what = "needs more bytes than the memory for constants has"
                raise illegal_operation("A copy from the host", what, label)
            copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
            offset = self._end // tensor.element_size()
            copy.set_(self.bytes.untyped_storage(), offset, tensor.shape, tensor.stride())
            self._copies[key] = copy.copy_(tensor)
            self._end = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._copies[key]


class CaptureMode(OperatorMode):
    """The dispatch mode of one capture.

    Args:
        label: Name of the graph in errors.
        memory: Memory that constants are copied to the device from.
        generator: Replaces the device's default generator.
        device_type: Type of the device; another one for tests.
    """

    def __init__(
        self,
        label: str,
        memory: HostMemory,
        generator: CapturedGenerator,
        device_type: str = "cuda",
    ) -> None:
        super().__init__()
        self._label, self._memory, self._generator = label, memory, generator
        self._device_type = device_type

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the captured work.

        Raises:
            IllegalOperationError: A replay would not repeat the work of ``func``.
        """
        check_backward(func, args, self._label)
        self._generator.draw(func, args, kwargs)
        inputs = tensors_in(*args, *kwargs.values())
        device = kwargs.get("device")
        if any(tensor.device.type != "cpu" for tensor in inputs):
            if func is _aten.copy_.default and self._goes_to_device(args[1], args[0].device):
                args = (args[0], self._copy(args[1], args[0].device, {"dtype": args[0].dtype}))
            return func(*args, **kwargs)
        if not inputs and torch.device(device or "cpu").type != "cpu":
            return func(*args, **kwargs)
        if draws(func):
            raise self._refused(str(func), "draws random numbers on the host")
        if func is _aten._to_copy.default and self._goes_to_device(args[0], device):
            return self._copy(args[0], device, kwargs)
        return func(*args, **kwargs)

    def _goes_to_device(self, tensor: torch.Tensor, device: Any) -> bool:
        to_device = device is not None and torch.device(device).type == self._device_type
        return to_device and tensor.device.type == "cpu"

    def _copy(self, tensor: torch.Tensor, device: Any, options: dict[str, Any]) -> torch.Tensor:
        """Return the result of ``_to_copy`` for a constant, by work that a graph can hold."""
        host = _aten._to_copy.default(tensor, **{**options, "device": "cpu", "pin_memory": None})
        target = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
        if host.numel() == 0:
            return target
        first = host.flatten()[:1]
        if first == first and torch.equal(_raw(host), _raw(first.expand(host.numel()).clone())):
            return target.fill_(first.item())
        return target.copy_(self._memory.hold(host, self._label), non_blocking=True)

    def _refused(self, what: str, why: str) -> IllegalOperationError:
        return illegal_operation(what, f"{why}, which a replay does not repeat", self._label)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a host tensor, in memory order if it is dense."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)
