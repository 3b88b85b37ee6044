"""Find the metrics that Megatron accumulates over a step in process-wide tensors."""

from __future__ import annotations

import torch

from chunkgraph.megatron.core.access import private_names
from chunkgraph.megatron.features.experts.state import expert_metrics

__all__ = ["running_metrics"]


def running_metrics() -> dict[str, torch.Tensor]:
    """Return the tensors, not copies, of routers' and multi-token prediction's metrics by name.

    Megatron creates a tensor when it first records the metric, so call this at every step.
    """
    (log,) = private_names(
        "megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper"
    )
    predicted = {
        f"multi-token prediction {name}": value
        for name, value in log.tracker.items()
        if isinstance(value, torch.Tensor)
    }
    return {**{f"experts {name}": v for name, v in expert_metrics().items()}, **predicted}
