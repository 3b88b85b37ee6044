"""What a captured step of an optimizer reads besides parameters: numbers, and where tensors lie.

A graph holds numbers of Python as constants. The learning rate changes in most steps, and
Transformer Engine's step count in all, so a captured step reads both from the device. Between steps
the optimizer keeps them as Python numbers: schedulers, logs and checkpoints see what they see
without graphs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["OptimizerState", "SettledGradients"]

_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_MOST_MOVES = 2
"""A gradient that has moved more often is copied to memory of its own."""


def _is_of_transformer_engine(kind: type) -> bool:
    return kind.__name__ == "FusedAdam" and kind.__module__.startswith("transformer_engine.")


def _problems(optimizer: Any) -> Iterator[str]:
    """Yield the reasons why no graph can hold a step of ``optimizer``."""
    kind, groups = type(optimizer), optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    if _is_of_transformer_engine(kind):
        names = ["exp_avg_dtype", "exp_avg_sq_dtype"]
        names += ["master_weight_dtype"] if optimizer.master_weights else []
        if any(getattr(optimizer, name, torch.float32) is not torch.float32 for name in names):
            yield "FusedAdam has a capturable kernel for state in float32 only"
        if getattr(optimizer, "store_param_remainders", False):
            yield "FusedAdam has no capturable kernel with store_param_remainders"
        if any(p.numel() >= 2**31 - 1 for p in params):
            yield "FusedAdam has no capturable kernel for 2**31 elements"
    elif kind in _OF_TORCH:
        needs = "fused=True" if kind is torch.optim.SGD else "fused=True or capturable=True"
        if not all(group.get("fused") or group.get("capturable") for group in groups):
            yield f"{kind.__name__} without {needs} reads its numbers on the host"
        if any(isinstance(v, torch.Tensor) for group in groups for v in group.get("betas", ())):
            yield f"{kind.__name__} reads tensors in betas on the host"
    else:
        yield f"{kind.__module__.partition('.')[0]}'s {kind.__name__} is not supported"
    if any(isinstance(p, DTensor) or type(p.data) is not torch.Tensor for p in params):
        yield "parameters are not plain tensors: they are sharded or quantized"
    if len({p.device for p in params}) > 1:
        yield "parameters are on several devices"
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(getattr(optimizer, name, None) for name in hooks):
        yield "a hook on the optimizer's step runs in Python, which a replay does not"


class OptimizerState:
    """The numbers and tensors of an optimizer of torch (Adam, AdamW, SGD) or Transformer Engine.

    Args:
        optimizer: One for which `problem_of` returns "".
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._is_of_te = _is_of_transformer_engine(type(optimizer))
        self._keys = ("lr", "step") if self._is_of_te else ("lr",)
        # Device tensors by (number of the group, key), and the numbers that they hold.
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        self._values: dict[tuple[int, str], Any] = {}

    @staticmethod
    def problem_of(optimizer: Any) -> str:
        """Return why no graph can hold a step of ``optimizer``; "" if one can."""
        return next(_problems(optimizer), "")

    @property
    def groups(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the groups that have parameters, with their numbers."""
        return ((i, g) for i, g in enumerate(self.optimizer.param_groups) if g["params"])

    def facts(self) -> Hashable:
        """Return the constants of a step, and the addresses of parameters and state."""
        constants = [key for key in self.optimizer.defaults if key not in self._keys]
        facts: list[Hashable] = []
        state = self.optimizer.state
        for _, group in self.groups:
            facts += [repr(group.get(key)) for key in constants]
            for p in group["params"]:
                facts.append(p.data_ptr())
                of_param = state.get(p, {}).values()
                facts += [v.data_ptr() for v in of_param if isinstance(v, torch.Tensor)]
        return tuple(facts)

    def write(self) -> None:
        """Write the numbers of the groups to the device, without waiting for it.

        Call it before a capture: tensors that a capture creates belong to its graph.
        """
        for i, group in self.groups:
            for key in self._keys:
                value, tensor = group.get(key, 0), self._tensor(i, key, group)
                if isinstance(value, torch.Tensor):
                    tensor.copy_(value, non_blocking=True)
                    self._values.pop((i, key), None)
                elif self._values.get((i, key)) != value:
                    tensor.fill_(value)
                    self._values[i, key] = value

    @contextmanager
    def on_device(self, *, captures: bool = False) -> Iterator[None]:
        """Let steps in this block read the numbers from the device; see `write`.

        Args:
            captures: Whether a step in this block is captured.
        """
        kept = [(group, dict(group)) for _, group in self.groups]
        try:
            for i, group in self.groups:
                for key in self._keys:
                    group[key] = self._tensor(i, key, group)
                if captures and "capturable" in group:
                    group["capturable"] = True
            if self._is_of_te:
                self.optimizer.capturable = True
            yield
        finally:
            if self._is_of_te:
                self.optimizer.capturable = False
            for group, before in kept:
                group.update(before)

    def end_replay(self) -> None:
        """Count the step that a graph has counted on the device."""
        if "step" in self._keys:
            for i, group in self.groups:
                group["step"] += 1
                self._values[i, "step"] = group["step"]

    def _tensor(self, i: int, key: str, group: dict[str, Any]) -> torch.Tensor:
        """Return the tensor of a number, in the type that the optimizer's kernels read."""
        if (i, key) not in self._tensors:
            device = group["params"][0].device
            if key == "step":
                tensor = torch.zeros(1, dtype=torch.int32, device=device)
            else:  # kernels on the CPU read a double
                dtype = torch.float64 if device.type == "cpu" else torch.float32
                tensor = torch.zeros((), dtype=dtype, device=device)
            self._tensors[i, key] = tensor
        return self._tensors[i, key]


class SettledGradients:
    """The gradients of parameters at addresses that a graph can read.

    Autograd may put a gradient elsewhere in every step. One that has moved often is copied to
    memory of its own before the step, and becomes the parameter's gradient there. Others stay where
    they are, as those that replays of chunks add to; no reference to them is kept.

    Args:
        parameters: The parameters of the optimizer, in order.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._last: list[int | None] = [None] * len(parameters)
        self._num_moves = [0] * len(parameters)
        self._own: dict[int, torch.Tensor] = {}

    def settle(self) -> Hashable:
        """Copy gradients that move to memory of their own; return the addresses of all."""
        moved: list[tuple[int, torch.Tensor]] = []
        facts: list[int | None] = []
        for i, p in enumerate(self._parameters):
            address = None if (grad := p.grad) is None else grad.data_ptr()
            if grad is not None and address != self._last[i]:
                self._num_moves[i] += 1
                if i in self._own or self._num_moves[i] > _MOST_MOVES:
                    own = self._own.setdefault(i, torch.empty_like(grad))
                    moved.append((i, grad))
                    address = own.data_ptr()
                self._last[i] = address
            facts.append(address)
        if moved:
            torch._foreach_copy_([self._own[i] for i, _ in moved], [grad for _, grad in moved])
        for i, _ in moved:
            self._parameters[i].grad = self._own[i].detach()
        return tuple(facts)
