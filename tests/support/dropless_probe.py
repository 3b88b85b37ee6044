"""A case of `run_cases`: experts whose room is too small in many of its random steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hybrid_ep_stand_in import hybrid_ep

from chunkgraph.data import PackedText
from chunkgraph.engine import CaptureOptions
from chunkgraph.megatron import attach
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.experts import dropless
from chunkgraph.megatron.features.experts.state import forget_expert_metrics, take_expert_metrics
from chunkgraph.trainer.batches import sequence_batches
from chunkgraph.trainer.forward_step import forward_step
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import seed_everything


def run(config: Any, device: torch.device, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Train twice, eagerly and with graphs whose room is below the need of every step.

    Args:
        config: configuration of the run.
        device: device of the model.
        case: ``num_steps``; ``is_growing``: whether the load of the first rank's experts grows
            from step to step, with room for little more than the last load; ``budget``: the room
            that the user gives. The dispatcher ``flex`` is HybridEP's stand-in.

    Returns:
        By rank: ``differing``: steps and names of unequal values; ``reruns``: steps that ran
        again; ``recaptures``, ``replays`` and ``dropped`` tokens; ``dispatch`` of the last capture.
    """
    with hybrid_ep(is_on=config.moe.moe_token_dispatcher_type == "flex"):
        return _trained(config, device, case)


def _trained(config: Any, device: torch.device, case: dict[str, Any]) -> list[dict[str, Any]]:
    eager = _Model(config, device, None)
    alone = {"num_slots": [1]} if config.pipeline.pipeline_model_parallel_size == 1 else {}
    graphs = _Model(config, device, alone, case.get("budget"))
    differing, reruns = [], []
    preferred = _growing if case.get("is_growing") else _random
    margin = 0.02 if case.get("is_growing") else -0.2
    counters = graphs.graphs.counters
    with mock.patch.multiple(dropless, _MARGIN=margin, _MOST_DOUBLED=0):
        for step in range(case["num_steps"]):
            bias = preferred(config, step)
            results = [model.step(step, bias) for model in (eager, graphs)]
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
        "dispatch": graphs.graphs.expert_dispatch,
        "dropped": sum(graphs.graphs.dropped_tokens(wait=True).values()),
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def _are_same(eager: torch.Tensor, graphs: torch.Tensor, device: torch.device) -> bool:
    """Compare the bits, of a GPU up to rounding: eager experts have other kernels there."""
    if device.type == "cpu":
        return torch.equal(eager, graphs)
    difference, size = (x.double().norm().item() for x in (eager - graphs, eager))
    return difference <= 0.02 * size


class _Model:
    """A model whose routers prefer other experts in every step."""

    def __init__(
        self,
        config: Any,
        device: torch.device,
        graphs: dict[str, Any] | None,
        budget: float | None = None,
    ) -> None:
        forget_expert_metrics()
        seed_everything(config.train.seed, device)
        self._config, self._device = config, device
        self._chunks: Any = build_model(config, device)
        self._text = PackedText.from_file(None, seq_length=config.model.seq_length, seed=1)
        schedule = import_megatron("megatron.core.pipeline_parallel")
        self._train = schedule.get_forward_backward_func()
        self._metrics: Any = None
        self.graphs: Any = None
        if budget is not None:  # Megatron's check of it asks for fused operations
            for module in (m for chunk in self._chunks for m in chunk.modules()):
                if hasattr(module, "token_dispatcher"):
                    module.config.moe_expert_rank_capacity_factor = budget
                    module.token_dispatcher._comm_manager.moe_expert_rank_capacity_factor = budget
        if graphs is not None:
            options = CaptureOptions(verify=config.capture.verify)
            self.graphs = attach(self._chunks, options=options, **graphs)
            self._train = self.graphs.wrap_forward_backward(self._train)

    def step(self, step: int, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run a step; return its losses, gradients, buffers and metrics."""
        for module in (m for chunk in self._chunks for m in chunk.modules()):
            if getattr(module, "expert_bias", None) is not None:
                module.expert_bias.copy_(bias)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        pipeline = self._config.pipeline
        count = (1 + step % 2) * pipeline.pipeline_model_parallel_size
        data = [
            sequence_batches(self._config, self._text, step, count, self._device)
            for _ in self._chunks
        ]
        losses = self._train(
            forward_step_func=forward_step,
            data_iterator=data,
            model=self._chunks,
            num_microbatches=count,
            seq_length=self._config.model.seq_length,
            micro_batch_size=self._config.train.micro_batch_size,
            forward_only=False,
        )
        results = {}
        for index, chunk in enumerate(self._chunks):
            grads = {n: p.main_grad for n, p in chunk.named_parameters()}
            for name, value in {**grads, **dict(chunk.named_buffers())}.items():
                results[f"chunk {index}: {name}"] = value.clone()
        results["losses"] = torch.tensor([float(loss["lm loss"]) for loss in losses])
        results.update({n: torch.tensor(v) for n, v in take_expert_metrics().items()})
        return results


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


def _growing(config: Any, step: int) -> torch.Tensor:
    """Return a bias for the first rank's experts."""
    bias = torch.zeros(config.moe.num_moe_experts)
    bias[: len(bias) // config.pipeline.expert_model_parallel_size] = 0.008 * step
    return bias
