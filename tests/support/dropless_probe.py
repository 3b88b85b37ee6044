"""A case of `run_cases`: experts whose room is too small in many of its random steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from gathering import of_ranks
from hybrid_ep_stand_in import hybrid_ep
from in_process import Trained

from chunkgraph.engine import CaptureOptions
from chunkgraph.megatron.features.experts import room
from chunkgraph.megatron.features.experts.feature import dropped_tokens


def run(config: Any, device: torch.device, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Train twice, eagerly and with graphs whose room is below the need of every step.

    Args:
        config: configuration of the run.
        device: device of the model.
        case: ``num_steps``; ``budget``: the room that the user gives. The dispatcher ``flex`` is
            HybridEP, on a CPU its stand-in.

    Returns:
        By rank: ``differing``: steps and names of unequal values; ``reruns``: steps that ran
        again; ``recaptures``, ``replays`` and ``dropped`` tokens.
    """
    is_flex = config.moe.moe_token_dispatcher_type == "flex"
    with hybrid_ep(is_on=is_flex and device.type == "cpu"):
        return _trained(config, device, case)


def _trained(config: Any, device: torch.device, case: dict[str, Any]) -> list[dict[str, Any]]:
    eager = _Model(device, config, None, seed=config.train.seed)
    alone = {"num_slots": [1]} if config.pipeline.pipeline_model_parallel_size == 1 else {}
    options = CaptureOptions(verify=config.capture.verify)
    graphs = _Model(device, config, None, seed=config.train.seed)
    if "budget" in case:  # Megatron's check of it asks for fused operations
        graphs.set_budget(case["budget"])
    differing, reruns = [], []
    with mock.patch.multiple(room, _MARGIN=-0.2, _MOST_DOUBLED=0):
        graphs.attach(options=options, stash=config.stash, **alone)
        counters = graphs.graphs.counters
        for step in range(case["num_steps"]):
            bias = _random(config, step)
            results = [model.run(step, bias) for model in (eager, graphs)]
            reruns += [step] * (counters.overflow_reruns["expert capacity"] - len(reruns))
            names = [
                n for n, value in results[0].items() if not _are_same(value, results[1][n], device)
            ]
            differing += [f"step {step}: {name}" for name in names]
    mine = {
        "differing": differing,
        "reruns": reruns,
        "recaptures": len(counters.recaptures),
        "replays": counters.replays,
        "dropped": sum(dropped_tokens(graphs.graphs, wait=True).values()),
    }
    return of_ranks(mine)


def _are_same(eager: torch.Tensor, graphs: torch.Tensor, device: torch.device) -> bool:
    """Compare the bits, of a GPU up to rounding: eager experts have other kernels there."""
    if device.type == "cpu":
        return torch.equal(eager, graphs)
    difference, size = (x.double().norm().item() for x in (eager - graphs, eager))
    return difference <= 0.02 * size


class _Model(Trained):
    """A model whose routers prefer other experts in every step."""

    def set_budget(self, budget: float) -> None:
        """Give the experts of a rank room for ``budget`` times the rows of its tokens."""
        for module in (m for chunk in self.chunks for m in chunk.modules()):
            if hasattr(module, "token_dispatcher"):
                module.config.moe_expert_rank_capacity_factor = budget
                module.token_dispatcher._comm_manager.moe_expert_rank_capacity_factor = budget

    def run(self, step: int, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run a step; return its losses, gradients, buffers and metrics."""
        for module in (m for chunk in self.chunks for m in chunk.modules()):
            if getattr(module, "expert_bias", None) is not None:
                module.expert_bias.copy_(bias)
        return self.results(
            step, (1 + step % 2) * self.config.pipeline.pipeline_model_parallel_size
        )


def _random(config: Any, step: int) -> torch.Tensor:
    """Return the experts' bias: none, a random one, for one expert, or for one rank's."""
    random = torch.Generator().manual_seed(step)
    num_experts = config.moe.num_moe_experts
    num_local = num_experts // config.pipeline.expert_model_parallel_size
    bias = torch.randn(num_experts, generator=random) * (0.0, 0.3, 0.0, 0.3)[step % 4]
    one = int(torch.randint(num_experts, (), generator=random))
    if step % 4 == 2:
        bias[one] += 10.0
    elif step % 4 == 3:
        # No other rank gets a row if this rank's experts are enough for all tokens.
        first = one // num_local * num_local
        bias[first : first + num_local] += 10.0
    return bias
