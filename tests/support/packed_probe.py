"""A case of `run_cases`: replayed steps on packed documents in which any host read is an error."""

from __future__ import annotations

from typing import Any

import torch

from chunkgraph.trainer.trained_model import TrainedModel


def run(config: Any, device: torch.device, case: dict[str, Any]) -> dict[str, Any]:
    """Run the case; return the number of replays and the loss of each step."""
    model = TrainedModel(config, device, transformer_options=case.get("transformer_options"))
    graphs = model.attach_graphs()
    schedule = model.schedule

    def watched(**keywords: Any) -> Any:
        if device.type == "cuda" and graphs.engine.report is not None:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return schedule(**keywords)
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    model.schedule = watched
    try:
        losses = [
            model.run_step(step, model.draw(step), announces_next=False).loss
            for step in range(len(config.train.num_microbatches))
        ]
        return {"replays": graphs.counters.replays, "losses": losses}
    finally:
        model.close()
