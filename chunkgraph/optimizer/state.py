"""What a captured step of an optimizer reads besides parameters: numbers, and where tensors lie.

A graph holds numbers of Python as constants. The learning rate changes in most steps, so a captured
step reads it from the device. Between steps the optimizer keeps what its user gave it, which
schedulers, logs and checkpoints see as without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import optimizer as torch_optimizer

from chunkgraph._text import shown

_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_reference: Callable[[torch.UntypedStorage], Any] = StorageWeakRef
_MOST_MOVES = 2
"""A gradient that has moved more often is copied to memory of its own."""


def _hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the hooks on the steps of ``optimizer`` and of all, but not those of torch's profiler.

    With ``KINETO_USE_DAEMON=1`` it counts the steps of all optimizers.
    """
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    of_all = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    hooks = [hook for registered in (*own, *of_all) for hook in registered.values()]
    return [hook for hook in hooks if getattr(hook, "__module__", "") != "torch.profiler"]


def _problems(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield the reasons why no graph can hold a step of ``optimizer``."""
    kind, groups = type(optimizer), optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    if kind not in _OF_TORCH:
        yield f"{kind.__module__.partition('.')[0]}'s {kind.__name__} is not supported"
    needs = "fused=True" if kind is torch.optim.SGD else "fused=True or capturable=True"
    if not all(group.get("fused") or group.get("capturable") for group in groups):
        yield f"{kind.__name__} without {needs} reads its numbers on the host"
    if any(isinstance(v, torch.Tensor) for group in groups for v in group.get("betas", ())):
        yield f"{kind.__name__} reads tensors in betas on the host"
    if any(isinstance(p, DTensor) for p in params):
        yield "parameters are sharded (DTensor)"
    if (num_devices := len({p.device for p in params})) != 1:
        yield f"its parameters are on {num_devices} devices"
    if hooks := _hooks(optimizer):
        yield f"a hook on the optimizer's step ({shown(hooks[0])}) runs in Python, not in a replay"


class OptimizerState:
    """The learning rates and tensors of torch's Adam, AdamW or SGD.

    Args:
        optimizer: One for which `problem_of` returns "".
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        groups = optimizer.param_groups
        self._device = next(p.device for group in groups for p in group["params"])
        # By number of the group, on the device, and the numbers that they hold.
        self._rates: dict[int, torch.Tensor] = {}
        self._values: dict[int, Any] = {}

    @staticmethod
    def problem_of(optimizer: torch.optim.Optimizer) -> str:
        """Return why no graph can hold a step of ``optimizer``; "" if one can."""
        return next(_problems(optimizer), "")

    def facts(self) -> Hashable:
        """Return the constants of a step, its hooks, and the addresses of parameters and state."""
        constants = [key for key in self.optimizer.defaults if key != "lr"]
        facts: list[Hashable] = [len(_hooks(self.optimizer))]
        state: Any = self.optimizer.state
        for group in self.optimizer.param_groups:
            facts += [repr(group.get(key)) for key in constants]
            for p in group["params"]:
                facts.append(p.data_ptr())
                of_param = state.get(p, {}).values()
                facts += [v.data_ptr() for v in of_param if isinstance(v, torch.Tensor)]
        return tuple(facts)

    def write(self) -> None:
        """Write the learning rates to the device, without waiting for it.

        Call it before a capture: tensors that a capture creates belong to its graph.
        """
        for i, group in enumerate(self.optimizer.param_groups):
            rate, tensor = group["lr"], self._rate(i)
            if isinstance(rate, torch.Tensor):
                tensor.copy_(rate, non_blocking=True)
                self._values.pop(i, None)
            elif self._values.get(i) != rate:
                tensor.fill_(rate)
                self._values[i] = rate

    @contextmanager
    def on_device(self, *, captures: bool = False) -> Iterator[None]:
        """Let steps in this block read the learning rates from the device; see `write`.

        Args:
            captures: Whether a step in this block is captured.
        """
        kept = [(group, dict(group)) for group in self.optimizer.param_groups]
        try:
            for i, (group, _) in enumerate(kept):
                group["lr"] = self._rate(i)
                if captures and "capturable" in group:
                    group["capturable"] = True  # fused kernels are, but torch asks for it
            yield
        finally:
            for group, before in kept:
                group.update(before)

    def _rate(self, i: int) -> torch.Tensor:
        """Return the tensor of a learning rate, in the type that kernels read."""
        if i not in self._rates:
            dtype = torch.float64 if self._device.type == "cpu" else torch.float32
            self._rates[i] = torch.zeros((), dtype=dtype, device=self._device)
        return self._rates[i]


class SettledGradients:
    """The gradients of parameters at addresses that a graph can read.

    Autograd may make a new gradient in every step, elsewhere or at the same address. One that has
    moved often is copied to memory of its own before the step, and becomes the parameter's gradient
    there. Others stay where they are, as those that replays of chunks add to; no reference to them
    is kept.

    Args:
        parameters: The parameters of the optimizer, in order.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._last: list[StorageWeakRef | None] = [None] * len(parameters)
        self._num_moves = [0] * len(parameters)
        self._own: dict[int, torch.Tensor] = {}

    def settle(self) -> Hashable:
        """Copy gradients that move to memory of their own; return the addresses of all."""
        moved: list[tuple[int, torch.Tensor]] = []
        facts: list[Hashable] = []
        for i, p in enumerate(self._parameters):
            if (grad := p.grad) is None:
                facts.append(None)
                continue
            storage = _reference(grad.untyped_storage())
            if (last := self._last[i]) is None or storage != last:
                self._num_moves[i] += 1
                if i in self._own or self._num_moves[i] > _MOST_MOVES:
                    own = self._own.setdefault(i, torch.empty_like(grad))
                    moved.append((i, grad))
                    grad, storage = own, _reference(own.untyped_storage())
                self._last[i] = storage
            facts += [grad.data_ptr(), storage.cdata]
        if moved:
            torch._foreach_copy_([self._own[i] for i, _ in moved], [grad for _, grad in moved])
        for i, _ in moved:
            self._parameters[i].grad = self._own[i].detach()
        return tuple(facts)
