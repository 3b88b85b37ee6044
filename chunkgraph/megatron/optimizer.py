"""The step of Megatron's optimizer, of which one graph holds the norm and clipping.

The graph holds Megatron's own step up to the inner optimizer, captured after an eager step. Where
Megatron reads a number from the device the capture keeps it there: the norm that scales gradients,
and the count of zeros. With a loss scale, Megatron's look for overflows stays in front of it, the
one read it keeps. The inner optimizer (Adam) and the copies of main to model parameters run
eagerly, for the host launches them while the graph runs: kernels that read learning rate and step
from the device are slower, and round differently. The gather of a distributed optimizer's
parameters follows, as it follows the eager step.

A step whose gradients and constants are not those of the graph runs eagerly. On a GPU it has the
same collectives in the same order, so ranks need not agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from chunkgraph.engine.agreement import agree_alone
from chunkgraph.graphs import GraphBackend
from chunkgraph.megatron.core.access import import_megatron, patch_attributes
from chunkgraph.megatron.site import Site
from chunkgraph.optimizer import SettledGradients, StepGraph

_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
_CLIPPING = "megatron.core.optimizer.clip_grads"
_KINDS = ("FP32Optimizer", "Float16OptimizerWithFloat16Params", "DistributedOptimizer")
_SETTINGS = {
    "optimizer_cpu_offload": "its state is on the host",
    "offload_optimizer_states": "its state moves to the host",
    "use_precision_aware_optimizer": "it keeps main parameters inside of Adam",
    "reuse_grad_buf_for_mxfp8_param_ag": "MXFP8 parameters share memory with gradients",
    "overlap_param_gather_with_optimizer_step": "it gathers parameters between two optimizers",
}


@dataclass(frozen=True)
class _HostNorm:
    """A norm that Megatron computes on the host, in double precision.

    Attributes:
        on_device: The norm in float64.
        read: Reads the norm as Megatron does, if ``on_device`` may differ in the last bit; the host
            waits for the device.
    """

    on_device: torch.Tensor
    read: Callable[[], float] | None = None


class Instead(TorchFunctionMode):
    """Call ``replacement`` in place of one method of tensors."""

    def __init__(self, method: Any, replacement: Callable[..., Any]) -> None:
        super().__init__()
        self._method, self._replacement = method, replacement

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = self._replacement if func is self._method else func
        return run(*args, **(kwargs or {}))


class MegatronOptimizerStep:
    """Replace the ``step`` of a Megatron optimizer with one that replays graphs.

    Args:
        optimizer: Result of ``get_megatron_optimizer``.
        site: The model that it trains.
        backend: Makes the graphs.

    Attributes:
        why_eager: Why all steps run eagerly, or "".
        always_succeeds: Whether no step can overflow or be skipped, on all ranks.
        gradients: The graph of gradients, norm and clipping; it counts captures and replays.
    """

    def __init__(self, optimizer: Any, site: Site, backend: GraphBackend) -> None:
        self._optimizer = optimizer
        self._all_parts = getattr(optimizer, "chained_optimizers", [optimizer])
        # The others have no parameters on this rank, but take part in collectives.
        self._parts = [p for p in self._all_parts if not getattr(p, "is_stub_optimizer", False)]
        self._model = [p for chunk in site.chunks for p in chunk.parameters() if p.requires_grad]
        self.why_eager = _why_eager(optimizer, self._parts)
        if not all(hasattr(p, "main_grad") for p in self._model):
            self.why_eager = self.why_eager or "gradients are not in the buffers of DDP"
        self._is_scaled = any(getattr(part, "grad_scaler", None) for part in self._parts)
        is_eager, agree = bool(self.why_eager), site.agree or agree_alone
        any_eager, may_fail = agree([int(is_eager), int(is_eager or self._is_scaled)])
        self.always_succeeds = not may_fail
        if any_eager and backend.name == "recorder":
            self.why_eager = self.why_eager or "that of another rank does"
        self._main = [p for part in self._parts for p in part.get_parameters()]
        self._settled = SettledGradients(self._main if self._is_scaled else [])
        self._prepared: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies: dict[torch.Tensor, torch.Tensor] = {}  # from main to model parameters
        self._begun: tuple[Any, list[Callable[[], Any]]] | None = None
        on_failure = site.options.on_failure
        self.gradients = StepGraph(
            "gradients", backend, self._facts, self._prepare, agree, on_failure
        )
        self._undo = ExitStack()
        self._eager_step = optimizer.step
        if not self.why_eager:
            self._undo.callback(patch_attributes(optimizer, {"step": self.step}))

    def step(self) -> tuple[bool, Any, Any]:
        """Step the optimizer; see ``step`` of Megatron's optimizers.

        Returns:
            Whether it was successful, the norm, and the count of zeros. After a replay the last two
            are tensors of one element, unless this release computes the norm on the host.
        """
        with torch.no_grad(), ExitStack() as prepared:
            if self._is_scaled:
                if self._optimizer.prepare_grads():
                    return False, None, None
                no_preparation = {"prepare_grads": lambda: False}
                prepared.callback(patch_attributes(self._optimizer, no_preparation))
            if self._begun is None:
                self.begin()
            if self._begun is None:
                result: tuple[bool, Any, Any] = self._eager_step()
                self.gradients.end_eager_step()
                return result
            ((success, norm, num_zeros), inner_steps), self._begun = self._begun, None
            for inner_step in inner_steps:
                inner_step()
            if self._is_scaled:  # which copies by a kernel of its own
                self._copy_parameters()
            elif self._copies:
                torch._foreach_copy_([*self._copies], [*self._copies.values()])
            self._gather_parameters()
            return success, _given(norm), _given(num_zeros)

    @torch.no_grad()
    def begin(self) -> None:
        """Launch the graph of this step, and prepare the inner optimizer, if it replays.

        Call it early, once all gradients are launched, if ``always_succeeds``. Parameters and the
        optimizer's state stay as they are up to `step`.
        """
        if self.gradients.is_ready():
            result = self.gradients.replay()
            for p, grad in self._prepared:
                p.grad = grad
            self._begun = result, [_prepared_step(part.optimizer) for part in self._parts]

    def withdraw(self) -> None:
        """Forget what `begin` has prepared; the gradients are lost."""
        self._begun = None

    def close(self) -> None:
        """Free the graphs, and restore Megatron's own step."""
        self._undo.close()
        self.gradients.release()
        self._prepared, self._copies = [], {}

    def _facts(self) -> Hashable:
        """Return the addresses and constants of the step; see `StepGraph`."""
        facts: list[Hashable] = [self._settled.settle()]
        for part in self._parts:
            facts += [part.config.clip_grad, part.config.log_num_zeros_in_grad]
        model: Any = self._model
        parameters = (p.data_ptr() for params in (model, self._main) for p in params)
        return *facts, *(p.main_grad.data_ptr() for p in model), *parameters

    def _prepare(self) -> tuple[bool, Any, Any]:
        """Run Megatron's step up to the inner optimizer, such that a graph can hold it."""
        with ExitStack() as stack:

            def patch(target: object, **replacements: Any) -> None:
                stack.callback(patch_attributes(target, replacements))

            for part in self._parts:
                patch(part.config, timers=None)
            if not _sums_together(self._optimizer):
                patch(self._optimizer, get_grad_norm=lambda: _norm_of(self._all_parts))
            patch(self._optimizer, step_with_ready_grads=lambda: True)
            patch(import_megatron(_OPTIMIZER), **_functions_on_device())
            result: tuple[bool, Any, Any] = self._eager_step()
        if not self._is_scaled:
            self._prepared = [(p, grad) for p in self._main if (grad := p.grad) is not None]
            self._copies = {}
            with Instead(torch.Tensor.copy_, self._copies.__setitem__):
                self._copy_parameters()
        return result

    def _copy_parameters(self) -> None:
        for part in self._parts:
            getattr(part, "_copy_main_params_to_model_params", lambda: None)()

    def _gather_parameters(self) -> None:
        """Gather the parameters of distributed optimizers, as their own step does at its end."""
        mixed = import_megatron(_OPTIMIZER).MixedPrecisionOptimizer
        distributed = import_megatron(_DISTRIBUTED).DistributedOptimizer
        undo = patch_attributes(mixed, {"step_with_ready_grads": lambda _: True})
        try:
            for part in self._all_parts:
                if isinstance(part, distributed):
                    part.step_with_ready_grads()
        finally:
            undo()


def _prepared_step(inner: Any) -> Callable[[], Any]:
    """Return what is left of an inner optimizer's step.

    For Adam of Transformer Engine or APEX these are its kernels. The loop over parameters in front
    of them takes the host longer than the graph takes the device.
    """
    is_adam = type(inner).__name__ == "FusedAdam" and not inner.capturable
    hooks = [value for name, value in vars(inner).items() if name.endswith("_hooks")]
    if not is_adam or inner.master_weights or any(hooks):
        return inner.step
    kernels: list[tuple[Any, ...]] = []
    launch, before = inner.multi_tensor_adam, [g.get("step") for g in inner.param_groups]
    with ExitStack() as undo:
        later = {"multi_tensor_adam": lambda *args: kernels.append(args)}
        undo.callback(patch_attributes(inner, later))
        inner.step()
    groups = [g for g, n in zip(inner.param_groups, before, strict=True) if g.get("step") != n]
    for group in groups:
        group["step"] -= 1

    def step() -> None:
        for group in groups:
            group["step"] += 1
        for args in kernels:
            launch(*args)

    return step


def _why_eager(optimizer: Any, parts: Sequence[Any]) -> str:
    """Return why no graph can hold the step of a Megatron optimizer; "" if one can."""
    chained = import_megatron(_OPTIMIZER).ChainedOptimizer
    if not parts:
        return "this rank trains no parameter"
    for part in parts:
        config, ddp = part.config, getattr(part, "ddp_config", None)
        if type(part).__name__ not in _KINDS or type(optimizer) not in (type(part), chained):
            return f"{type(part).__name__} is not supported"
        for name, why in _SETTINGS.items():
            if getattr(config, name, False):
                return f"{name}: {why}"
        if math.isfinite(getattr(config, "grad_norm_skip_threshold", math.inf)):
            return "grad_norm_skip_threshold: the host reads the norm"
        for name in ("use_megatron_fsdp", "fp8_param_gather", "fp4_param_gather"):
            if getattr(ddp, name, False):
                return f"{name}: it casts parameters in code of its own"
    params = [p for part in parts for p in part.get_parameters()]
    has_groups = any(getattr(p, "grad_norm_group", None) for p in params)
    if has_groups and not _sums_together(optimizer):
        return "separate norms over several groups of ranks are added on the host"
    return ""


def _sums_together(optimizer: Any) -> bool:
    """Return whether all parts of an optimizer sum their norm over the same ranks."""
    parts = getattr(optimizer, "chained_optimizers", ())
    return len(parts) < 2 or optimizer.grads_states_parallel_group_is_shared()


def _functions_on_device() -> dict[str, Callable[..., Any]]:
    """Return replacements of Megatron's functions that keep norm and count on the device."""
    clipping = import_megatron(_CLIPPING)

    def kept_reads(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result, and the tensors that were to be read."""
        tensors: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor.reshape(()))
            return tensors[-1].double()

        with Instead(torch.Tensor.item, keep):
            return function(*args, **kwargs), tensors

    def get_grad_norm_fp32(*args: Any, **kwargs: Any) -> Any:
        norm, squares = kept_reads(clipping.get_grad_norm_fp32, *args, **kwargs)
        if not squares:
            return norm
        return _HostNorm(squares[0].double().sqrt(), lambda: squares[0].item() ** 0.5)

    def count_zeros_fp32(*args: Any, **kwargs: Any) -> torch.Tensor:
        _, counts = kept_reads(clipping.count_zeros_fp32, *args, **kwargs)
        return counts[-1]

    def clip_grad_by_total_norm_fp32(
        parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        if not isinstance(total_norm, _HostNorm):
            clipping.clip_grad_by_total_norm_fp32(parameters, max_norm, total_norm, *args, **kwargs)
            return
        scale = max_norm / (total_norm.on_device + 1.0e-6)
        grads = [p.grad for p in parameters if p.grad is not None]
        # Megatron scales nothing by 1 or more, nor by NaN.
        torch._foreach_mul_(grads, torch.where(scale < 1.0, scale, 1.0).float())

    functions = (get_grad_norm_fp32, count_zeros_fp32, clip_grad_by_total_norm_fp32)
    return {function.__name__: function for function in functions}


def _norm_of(parts: Sequence[Any]) -> _HostNorm:
    """Return the norm of parts that sum over different ranks, which Megatron adds on the host."""
    norms = [part.get_grad_norm() for part in parts]
    on_device = [n.on_device if isinstance(n, _HostNorm) else n.reshape(()) for n in norms]

    def read() -> float:
        return math.sqrt(sum([norm.read() ** 2 for norm in norms]))

    total: Any = sum([norm**2 for norm in on_device])
    is_exact = not any(isinstance(norm, _HostNorm) for norm in norms)
    return _HostNorm(total.double().sqrt(), None if is_exact else read)


def _given(value: Any) -> Any:
    """Return a value that the next replay does not change."""
    if isinstance(value, _HostNorm):
        return value.on_device.clone() if value.read is None else value.read()
    return value.clone() if isinstance(value, torch.Tensor) else value
