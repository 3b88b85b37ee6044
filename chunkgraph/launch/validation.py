"""Megatron's checks of losses and gradients, which the host reads together, once a step.

With ``--check-for-nan-in-loss-and-grad`` the host waits for the device at each loss, and at the
norm of each bucket of gradients. `StepChecks` keeps them on the device until Megatron decides
whether the step runs again. Then the host launches all of the optimizer's step that changes no
parameter, and waits for the checks while the device still works on it. If one fails on any rank,
Megatron makes all again, one by one, so that messages, reruns, checkpoints and exit codes are its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.megatron.core.access import import_megatron, patch_attributes
from chunkgraph.megatron.optimizer import MegatronOptimizerStep


class StepChecks:
    """Postpone the checks of Megatron's rerun state machine for NaN and Inf to the step's end.

    Checks of the first iteration, of steps that run again and with injected errors are Megatron's.
    So are a script's own, such as for spiky losses; before them the host makes postponed ones.

    Args:
        optimizer: The step of the optimizer, which begins while the host waits.
    """

    def __init__(self, optimizer: MegatronOptimizerStep) -> None:
        self._optimizer = optimizer
        module = import_megatron("megatron.core.rerun_state_machine")
        self._modes, self._states = module.RerunMode, module.RerunState
        self._machine = machine = module.get_rerun_state_machine()
        self._validate = machine.validate_result
        self._decide = machine.should_run_forward_backward
        self._values: list[torch.Tensor] = []
        self._checks: list[Callable[[], None]] = []
        names = ("validate_result", "should_run_forward_backward")
        self.close = patch_attributes(machine, {name: getattr(self, name) for name in names})

    def validate_result(
        self, result: Any, rejection_func: Any, message: str, *args: Any, **kwargs: Any
    ) -> None:
        """Check a result now or at the end of the step; see Megatron's ``validate_result``."""
        machine = self._machine
        if (
            rejection_func in (torch.isnan, torch.isinf)
            and isinstance(result, torch.Tensor)
            and result.numel() == 1
            and self._may_postpone()
            and machine.first_iteration_complete
        ):
            value, dtype = result.detach().to(torch.float64, copy=True), result.dtype
            self._values.append(value.reshape(()))  # schedules divide losses in place
            self._checks.append(
                lambda: self._validate(value.to(dtype), rejection_func, message, *args, **kwargs)
            )
            return
        self._make_postponed()
        self._validate(result, rejection_func, message, *args, **kwargs)

    def should_run_forward_backward(self, data_iterator: Any) -> bool:
        """Return whether the step runs (again); see Megatron's method of this name."""
        if self._may_postpone():
            flag, is_sent = self._failure()  # first: all ranks reduce it before the norm
            if self._optimizer.always_succeeds:
                self._optimizer.begin()
            is_sent.synchronize()
            if not flag:
                self._values, self._checks = [], []
                self._machine.state = self._states.NOT_RUNNING_YET
                return False
        self._optimizer.withdraw()
        self._make_postponed()
        return bool(self._decide(data_iterator))

    def _may_postpone(self) -> bool:
        """Return whether this is the first run of a step, alike on all ranks."""
        machine = self._machine
        return (
            machine.state == self._states.INITIAL_RUN
            and machine.mode != self._modes.REPORT_DETERMINISM_STATS
            and not machine.error_injector.should_inject_errors
        )

    def _failure(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Send the host whether a check failed, if Megatron runs steps again, on any rank."""
        machine = self._machine
        flag = torch.full((1,), machine.rerun_requested, dtype=torch.int32, device="cuda")
        if self._values:
            flag.add_(torch.stack(self._values).isfinite().all().logical_not())
        if machine.mode != self._modes.DISABLED:
            dist.all_reduce(flag)
        sent, is_sent = flag.to("cpu", non_blocking=True), torch.cuda.Event()
        is_sent.record()
        return sent, is_sent

    def _make_postponed(self) -> None:
        """Make the postponed checks, for which the host waits."""
        checks, self._checks, self._values = self._checks, [], []
        for check in checks:
            check()
