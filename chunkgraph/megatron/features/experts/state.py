"""Keep Megatron's Python state of mixture of experts in step with graphs.

Megatron scales the gradients of auxiliary losses by one process-wide tensor, which the schedule
writes in place, and adds up metrics in process-wide tensors, which it clears in place. Graphs can
use both as long as the tensors remain the captured ones.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from chunkgraph.errors import ReplayMismatchError
from chunkgraph.megatron.core.access import private_names

_UTILS = "megatron.core.transformer.moe.moe_utils"
_LOGGING = "megatron.core.transformer.moe.moe_logging"
_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def routers_of(modules: Sequence[Any]) -> list[Any]:
    """Return the routers among ``modules``, each once, in order."""
    (router,) = private_names("megatron.core.transformer.moe.router", "Router")
    return list(dict.fromkeys(m for m in modules if isinstance(m, router)))


class ExpertState:
    """Loss scale and metrics of the routers in the graphs of one rank.

    The constructor creates the entries of the routers' metrics, so that no graph creates them.

    Args:
        routers: The captured routers; at least one.

    Attributes:
        buffers: Tensors to which the routers add their metrics.
    """

    def __init__(self, routers: Sequence[Any]) -> None:
        (self._scaler,) = private_names(_UTILS, "MoEAuxLossAutoScaler")
        self._device = routers[0].weight.device
        self._scale: torch.Tensor | None = None
        for router in routers:
            # A half-precision wrapper cast the biases; the first forward would cast them back.
            getattr(router, "_maintain_float32_expert_bias", lambda: None)()
            for name in _metric_names(router):
                _make_metric(name, router.config, self._device)
        self._metrics = expert_metrics()
        self.buffers = tuple(self._metrics.values())

    def capture(self) -> None:
        """Record the scale that graphs capture, before the capture.

        Raises:
            ReplayMismatchError: See `check`.
        """
        self.check()
        if self._scaler.main_loss_backward_scale is None:
            self._scaler.main_loss_backward_scale = torch.ones(1, device=self._device)
        self._scale = self._scaler.main_loss_backward_scale

    def check(self) -> None:
        """Check that Megatron still reads the metrics to which graphs add.

        Raises:
            ReplayMismatchError: The metrics were replaced since the graphs were attached.
        """
        now = expert_metrics()
        lost = [name for name, value in self._metrics.items() if now.get(name) is not value]
        if lost:
            raise ReplayMismatchError(
                f"The metrics {', '.join(lost)} of the experts were replaced since the graphs were "
                "attached: graphs would add to the old ones. Clear them in place, as Megatron "
                "does, or attach again."
            )

    def before_backward(self) -> None:
        """Copy Megatron's scale to the captured tensor, if Megatron has replaced it."""
        scale = self._scaler.main_loss_backward_scale
        if scale is not self._scale and scale is not None:
            assert self._scale is not None
            self._scale.copy_(scale)


def take_expert_metrics() -> dict[str, tuple[float, ...]]:
    """Return this rank's sums of every metric by layer since the last call, and clear them."""
    sums = {name: tuple(value.tolist()) for name, value in expert_metrics().items()}
    for value in expert_metrics().values():
        value.zero_()
    return sums


def forget_expert_metrics() -> None:
    """Drop all metrics: Megatron sizes them by the number of layers that first recorded them."""
    _tracker().clear()


def _metric_names(router: Any) -> list[str]:
    coefficient = getattr(router, "get_aux_loss_coeff", None)
    names = [
        name for kind, name in _LOSSES.items() if coefficient is not None and coefficient(kind) > 0
    ]
    if getattr(router.config, "moe_z_loss_coeff", None) is not None:
        names.append("z_loss")
    return names


def _tracker() -> Any:
    """Return the entries by name: objects in later releases, dicts in earlier ones."""
    if _has_entries():
        (get_tracker,) = private_names(_LOGGING, "get_moe_metrics_tracker")
        return get_tracker().metrics
    (get_tracker,) = private_names(_UTILS, "get_moe_layer_wise_logging_tracker")
    return get_tracker()


@functools.cache
def _has_entries() -> bool:
    """Return whether metrics have entry objects; cached, as Python searches for modules on disk."""
    return importlib.util.find_spec(_LOGGING) is not None


def expert_metrics() -> dict[str, torch.Tensor]:
    """Return the tensors (not copies) to which routers add their metrics, by name."""
    return {
        name: entry["values"] if isinstance(entry, dict) else entry.values
        for name, entry in _tracker().items()
    }


def scale_expert_metrics(factor: float, global_factor: float) -> None:
    """Scale in place the sums of the routers' metrics.

    Args:
        factor: Factor for metrics that a rank sums over its own microbatches.
        global_factor: Factor for the loss over all ranks' microbatches of a turn.
    """
    for name, values in expert_metrics().items():
        values.mul_(global_factor if name == _LOSSES["global_aux_loss"] else factor)


def _make_metric(name: str, config: Any, device: torch.device) -> None:
    tracker = _tracker()
    if name in tracker:
        return
    values = torch.zeros(config.num_layers + (config.mtp_num_layers or 0), device=device)
    if _has_entries():
        (entry,) = private_names(_LOGGING, "MetricEntry")
        tracker[name] = entry(values=values)
    else:
        groups = {"reduce_group": None, "avg_group": None, "reduce_group_has_dp": False}
        tracker[name] = {"values": values, **groups}
