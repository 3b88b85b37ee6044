"""Handle host tensors that captured work reads: as constants of the graph, or by refusal.

A CUDA graph runs nothing on the host. A number that a forward computes on the host and passes to a
kernel is fixed in the graph. So is a tensor that it copies to the device; torch refuses such a
copy, because the host memory may be freed before a replay. Here the copy comes from memory that
persists. Host tensors that are created in the capture are constants. Host tensors from outside are
compared before every replay. Random draws on the host and writes to outside tensors, which no
replay repeats, are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs.failure import current_location, illegal_operation
from chunkgraph.graphs.operators import draws, storages_written, tensors_in

__all__ = ["HostConstants", "HostMemory", "OutsideTensor"]

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

    def hold(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Copy a dense tensor into this memory, with its dtype and strides.

        Equal constants share one copy.

        Returns:
            The copy; None if too little memory is left.
        """
        raw = _raw(tensor)
        key = (tensor.dtype, tensor.shape, tensor.stride(), raw.numpy().tobytes())
        if key not in self._copies:
            end = self._end + raw.numel()
            if end > self.bytes.numel():
                return None
            copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
            offset = self._end // tensor.element_size()
            copy.set_(self.bytes.untyped_storage(), offset, tensor.shape, tensor.stride())
            self._copies[key] = copy.copy_(tensor)
            self._end = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._copies[key]


class OutsideTensor:
    """A host tensor from outside that captured work read, with its value in the capture."""

    def __init__(self, tensor: torch.Tensor, description: str) -> None:
        self._tensor = tensor.detach()
        self._value = self._tensor.clone()
        self._description = description

    def check(self, label: str) -> None:
        """Compare the tensor with its captured value, before a replay.

        Raises:
            ReplayMismatchError: The tensor has changed since the capture.
        """
        if not torch.equal(_raw(self._tensor), _raw(self._value)):
            raise ReplayMismatchError(
                f"{label} read a host tensor in its capture that has changed since then: "
                f"{self._description}. A graph keeps the value that the host read. Keep the tensor "
                "on the device, or release the graphs and capture again."
            )


class HostConstants:
    """Handle the host tensors of one capture.

    Args:
        label: Name of the graph in errors.
        memory: Memory that constants are copied to the device from.
        device_type: Type of the device.

    Attributes:
        outside: Host tensors from outside that the capture read.
    """

    def __init__(self, label: str, memory: HostMemory, device_type: str = "cuda") -> None:
        self.outside: list[OutsideTensor] = []
        self._label = label
        self._memory = memory
        self._device_type = device_type
        # Storages that were created in the capture, or are compared before replays.
        self._registered: dict[int, StorageWeakRef] = {}

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the captured work.

        Raises:
            IllegalOperationError: A replay would not repeat the host work of ``func``.
        """
        inputs = tensors_in(*args, *kwargs.values())
        on_host = [t for t in inputs if t.device.type == "cpu"]
        written = storages_written(func, args, kwargs)
        if len(on_host) < len(inputs):
            for tensor in on_host:
                if not any(tensor is other for other in written):  # a copy to the host is a node
                    self._read(tensor, func)
            return self._run_on_device(func, args, kwargs)
        if not inputs and torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return func(*args, **kwargs)
        if draws(func):
            raise illegal_operation(
                str(func),
                "draws random numbers on the host, which a replay does not repeat",
                self._label,
            )
        if func is _aten.lift_fresh.default and args[0].untyped_storage().resizable():
            self._register(args[0])  # created by torch.tensor from Python numbers
        for tensor in written:
            if not self._is_registered(tensor):
                raise illegal_operation(
                    str(func), "writes host memory, which a replay does not repeat", self._label
                )
        for tensor in on_host:
            self._read(tensor, func)
        if func is _aten._to_copy.default and self._goes_to_device(kwargs):
            return self._copy_to_device(args[0], kwargs)
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            if tensor.device.type == "cpu":
                self._register(tensor)
        return out

    def _run_on_device(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func is _aten.copy_.default:
            target, source = args[:2]
            if source.device.type == "cpu" and target.device.type == self._device_type:
                options = {"device": target.device, "dtype": target.dtype}
                return func(target, self._copy_to_device(source, options))
        return func(*args, **kwargs)

    def _goes_to_device(self, kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == self._device_type

    def _copy_to_device(self, tensor: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Return the result of ``_to_copy`` for a constant, by work that a graph can hold."""
        device = options["device"]
        host = _aten._to_copy.default(tensor, **{**options, "device": "cpu", "pin_memory": None})
        target = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
        if host.numel() == 0:
            return target
        first = host.flatten()[:1]
        if first == first and torch.equal(_raw(host), _raw(first.expand(host.numel()).clone())):
            return target.fill_(first.item())
        source = self._memory.hold(host)
        if source is None:
            raise illegal_operation(
                "A copy from the host",
                "needs more bytes than the memory for constants has",
                self._label,
            )
        return target.copy_(source, non_blocking=True)

    def _read(self, tensor: torch.Tensor, func: OpOverload) -> None:
        if self._is_registered(tensor) or tensor.numel() == 0:
            return
        description = f"{func} of {tuple(tensor.shape)} {tensor.dtype} at {current_location()}"
        self.outside.append(OutsideTensor(tensor, description))
        self._register(tensor)

    def _register(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._registered[storage._cdata] = StorageWeakRef(storage)

    def _is_registered(self, tensor: torch.Tensor) -> bool:
        reference = self._registered.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a host tensor, in memory order if it is dense."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)
