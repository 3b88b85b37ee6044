"""A case of `run_cases` that measures variants of a bench one after the other in one process."""

from __future__ import annotations

from typing import Any

import torch

from chunkgraph.bench.measure import VariantRun
from chunkgraph.bench.summary import gathered_summary
from chunkgraph.bench.variants import make_variant


def run(config: Any, device: torch.device, case: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of each variant by name."""
    summaries = {}
    for name in case["variants"]:
        bench = VariantRun(config, device, make_variant(name, config))
        bench.measure_steps()
        bench.measure_host(1)
        bench.measure_costs()
        summaries[name] = gathered_summary(config, device, bench.measurement)
        bench.close()
    return summaries
