"""Measures schedules of torch with and without graphs: CONFIG RESULT SCHEDULES OVERRIDE...

After each step it evaluates, unless torch cannot: backwards in a V send gradients in any case.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.bench.choice import torch_schedule
from chunkgraph.bench.summary import gathered_summary
from chunkgraph.bench.torch_run import TorchRun
from chunkgraph.schedules import Placement
from chunkgraph.settings import load_config
from chunkgraph.trainer.setup import rank_process


class EvaluatingRun(TorchRun):
    """Collects the losses of evaluations between steps, on the rank of the last stage."""

    def __init__(self, config: Any, device: torch.device, name: str) -> None:
        super().__init__(config, device, name)
        self._evaluates = torch_schedule(name).placement is Placement.LOOP
        self.eval_losses: list[str] = []

    def run_step(self, kind: str, *, announces_next: bool = False) -> Any:
        step = super().run_step(kind, announces_next=announces_next)
        if self._evaluates:
            self._evaluate(step.num_microbatches)
        return step

    def _evaluate(self, count: int) -> None:
        x, target = self._batch[:, :count].unbind()
        losses: list[torch.Tensor] = []
        arguments = [x] if self._is_first else []
        keywords = {"target": target, "losses": losses} if self._is_last else {}
        with torch.no_grad():
            if self.graphed is None:
                self.make(count).eval(*arguments, return_outputs=False, **keywords)
                self._eager = None  # the stages are set up for evaluation
            else:
                options = {"num_microbatches": count, "return_outputs": False}
                self.graphed.eval(*arguments, **options, **keywords)
        self.eval_losses += [loss.item().hex() for loss in losses]


def main(config_path: str, result_path: str, schedules: str, *overrides: str) -> int:
    """Write the summary of each variant by name."""
    config = load_config(config_path, list(overrides))
    names = ["eager", "chunk"]
    names += [f"{kind}_{name}" for name in schedules.split(",") for kind in ("eager", "chunk")]
    summaries = {}
    with rank_process(config) as device:
        for name in names:
            run = EvaluatingRun(config, device, name)
            run.measure_steps()
            run.measure_costs()
            summaries[name] = gathered_summary(config, device, run.measurement)
            evaluations: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(evaluations, run.eval_losses)
            summaries[name]["eval_losses"] = [*chain(*evaluations)]
            counters = run.graphed and run.graphed.graphs.counters
            summaries[name]["capture_sessions"] = counters and counters.capture_sessions
            summaries[name]["replayed_steps"] = counters and counters.replayed_steps
            run.close()
        if dist.get_rank() == 0:
            Path(result_path).write_text(json.dumps(summaries), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
