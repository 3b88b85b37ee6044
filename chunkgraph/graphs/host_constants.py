"""Tensors of the host that captured work reads: constants of the graph, or refused.

A CUDA graph runs nothing on the host. A number that a forward makes there and gives to a kernel is
that number for good, and so is a tensor that it copies to the device, which torch refuses because
the host memory may be gone at a replay. Here the copy comes from memory that stays. What the host
makes from nothing, or from Python numbers, is a constant. Host tensors from outside are compared
before every replay; random draws and writes to them, which no replay repeats, are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs.legality import illegal_operation
from chunkgraph.graphs.location import current_location
from chunkgraph.graphs.random_state import draws
from chunkgraph.graphs.recording import storages_written, tensors_in

__all__ = ["HostConstants", "HostMemory", "OutsideTensor"]

_aten = torch.ops.aten
_ALIGNMENT = 256
_ARENA_BYTES = 16 << 20


class HostMemory:
    """Host memory that graphs copy their constants from, made before a capture.

    Args:
        is_pinned: whether the device reads it by itself, as it must in a graph; False: in tests.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self.bytes = torch.empty(
            _ARENA_BYTES, dtype=torch.uint8, device="cpu", pin_memory=is_pinned
        )
        self._end = 0
        self._known: dict[tuple[Any, ...], torch.Tensor] = {}

    def hold(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor with the values, type and strides of ``tensor``, which is dense, in this memory.

        Equal constants share it. None: there is too little left.
        """
        raw = _raw(tensor)
        key = (tensor.dtype, tensor.shape, tensor.stride(), raw.numpy().tobytes())
        if key not in self._known:
            end = self._end + raw.numel()
            if end > self.bytes.numel():
                return None
            held = torch.empty(0, dtype=tensor.dtype, device="cpu")
            offset = self._end // tensor.element_size()
            held.set_(self.bytes.untyped_storage(), offset, tensor.shape, tensor.stride())
            self._known[key] = held.copy_(tensor)
            self._end = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._known[key]


class OutsideTensor:
    """A host tensor from outside that captured work has read, with its value then."""

    def __init__(self, tensor: torch.Tensor, what: str) -> None:
        self._tensor = tensor.detach()
        self._value = self._tensor.clone()
        self._what = what

    def check(self, label: str) -> None:
        """Compare, before a replay.

        Raises:
            ReplayMismatchError: it has changed since the capture.
        """
        if not torch.equal(_raw(self._tensor), _raw(self._value)):
            raise ReplayMismatchError(
                f"{label} has read a tensor on the host in its capture, which has changed since: "
                f"{self._what}. A graph keeps what the host read. Keep the tensor on the device, "
                "or release the graphs and capture again."
            )


class HostConstants:
    """What one capture does with tensors of the host.

    Args:
        label: of the capture, for errors.
        memory: what constants are copied to the device from.
        device_type: of the device.
    """

    def __init__(self, label: str, memory: HostMemory, device_type: str = "cuda") -> None:
        self.outside: list[OutsideTensor] = []
        self._label = label
        self._memory = memory
        self._device_type = device_type
        self._known: dict[int, StorageWeakRef] = {}  # storages made in here, or compared

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the captured work.

        Raises:
            IllegalOperationError: a replay would not do on the host what ``func`` does.
        """
        given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        on_host = [t for t in given if t.device.type == "cpu"]
        written = storages_written(func, args, kwargs)
        if len(on_host) < len(given):
            for tensor in on_host:
                if not any(tensor is other for other in written):  # a copy to the host is a node
                    self._read(tensor, func)
            return self._run_on_device(func, args, kwargs)
        if not given and torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return func(*args, **kwargs)
        if draws(func):
            raise illegal_operation(
                str(func), "draws on the host what a replay would not draw again", self._label
            )
        if func is _aten.lift_fresh.default and args[0].untyped_storage().resizable():
            self._add(args[0])  # of torch.tensor: a copy of Python's numbers
        for tensor in written:
            if not self._knows(tensor):
                raise illegal_operation(
                    str(func), "writes host memory, which a replay would not", self._label
                )
        for tensor in on_host:
            self._read(tensor, func)
        if func is _aten._to_copy.default and self._goes_to_device(kwargs):
            return self._on_device(args[0], kwargs)
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            if tensor.device.type == "cpu":
                self._add(tensor)
        return out

    def _run_on_device(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func is _aten.copy_.default:
            target, source = args[:2]
            if source.device.type == "cpu" and target.device.type == self._device_type:
                copied = self._on_device(source, {"device": target.device, "dtype": target.dtype})
                return func(target, copied)
        return func(*args, **kwargs)

    def _goes_to_device(self, kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == self._device_type

    def _on_device(self, tensor: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """What ``_to_copy`` gives for a constant, by work that a graph can hold."""
        device = options["device"]
        host = _aten._to_copy.default(tensor, **{**options, "device": "cpu", "pin_memory": None})
        made = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
        if host.numel() == 0:
            return made
        first = host.flatten()[:1]
        if first == first and torch.equal(_raw(host), _raw(first.expand(host.numel()).clone())):
            return made.fill_(first.item())
        held = self._memory.hold(host)
        if held is None:
            raise illegal_operation(
                "A copy from the host", "has more bytes than are kept for constants", self._label
            )
        return made.copy_(held, non_blocking=True)

    def _read(self, tensor: torch.Tensor, func: OpOverload) -> None:
        if self._knows(tensor) or tensor.numel() == 0:
            return
        what = f"{func} of {tuple(tensor.shape)} {tensor.dtype} at {current_location()}"
        self.outside.append(OutsideTensor(tensor, what))
        self._add(tensor)

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage)

    def _knows(self, tensor: torch.Tensor) -> bool:
        reference = self._known.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a host tensor, in the order of its memory if it is dense."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)
