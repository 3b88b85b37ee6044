"""What Megatron adds up over a step in tensors of the process, in graphs and outside of them."""

from __future__ import annotations

import torch

from chunkgraph.megatron.core.access import private_names
from chunkgraph.megatron.features.experts.state import expert_metrics

__all__ = ["running_metrics"]


def running_metrics() -> dict[str, torch.Tensor]:
    """The metrics of routers and of multi-token prediction, by name: the tensors themselves.

    Megatron makes them when they are first recorded, so ask anew at every step.
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
