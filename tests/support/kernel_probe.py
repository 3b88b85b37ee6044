"""A case of `run_cases`: experts without a capacity, with eager, graphs' and captured products."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from chunkgraph.megatron.features.experts.dropless import Dropless
from chunkgraph.megatron.features.experts.room import Room
from chunkgraph.megatron.features.experts.rows_in_use import moe_layers_of
from chunkgraph.megatron.site import config_of
from chunkgraph.trainer.compare import run_eager, train


def run(config: Any, device: torch.device, case: dict[str, Any]) -> dict[str, Any]:
    """Train three times from the same seed.

    Args:
        config: The run.
        device: Device of the model.
        case: ``transformer_options``.

    Returns:
        The results of graphs against eager training with the same products, and ``unmodified``:
        loss and gradient norm of each step of unmodified eager training.
    """
    options = {"transformer_options": case.get("transformer_options") or {}}
    unmodified = run_eager(config, device, **options)
    with ExitStack() as stack:

        def use_products_of_graphs(chunk: nn.Module) -> None:
            dropless = Dropless(moe_layers_of(list(chunk.modules())), Room(config_of(chunk)))
            stack.enter_context(dropless.on_device())

        same = run_eager(config, device, **options, prepare=use_products_of_graphs)
    results = asdict(train(config, device, eager=same, **options))
    steps = [[step.loss, step.grad_norm] for step in unmodified.steps]
    return {**results, "unmodified": steps}
