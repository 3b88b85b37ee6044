"""The step of Megatron's optimizer as one graph: equal to Megatron's own to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping
from in_process import EXPERTS, Trained

from chunkgraph.megatron.core.access import import_megatron

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(120)]

COUNTS = (2, 1, 3, 2, 2, 1)


class Training:
    """A model with Megatron's optimizer and scheduler, eager or in graphs.

    Args:
        graphed: Whether chunks and optimizer are captured.
        options: Of Megatron's `OptimizerConfig`.
        dtype: Of the parameters.
        ddp: Options of DDP.
        moe: Settings of experts.
    """

    def __init__(
        self,
        device: torch.device,
        make_config: Callable[..., dict[str, Any]],
        *,
        graphed: bool,
        options: dict[str, Any],
        dtype: str = "bfloat16",
        ddp: dict[str, Any] | None = None,
        moe: dict[str, Any] | None = None,
    ) -> None:
        is_distributed = options.get("use_distributed_optimizer", False)
        config = config_from_mapping(
            make_config(
                model={
                    "params_dtype": dtype,
                    "untie_embeddings_and_output_weights": False,
                    "swiglu": True,
                },
                train={"use_distributed_optimizer": is_distributed},
                moe=moe or {},
            )
        )
        self.trained = Trained(device, config, {} if graphed else None, ddp_options=ddp or {})
        self.optimizer = self._new_optimizer(options, dtype)
        scheduler = import_megatron("megatron.core.optimizer_param_scheduler")
        self.scheduler = scheduler.OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-4,
            lr_warmup_steps=2,
            lr_decay_steps=20,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=20,
            wd_incr_style="constant",
        )
        self.captured: Any = None
        if graphed:
            self.captured = self.trained.graphs.capture_optimizer(self.optimizer)

    def _new_optimizer(self, options: dict[str, Any], dtype: str) -> Any:
        optimizers = import_megatron("megatron.core.optimizer")
        optimizer = optimizers.get_megatron_optimizer(
            optimizers.OptimizerConfig(
                **{
                    "optimizer": "adam",
                    "lr": 1e-2,
                    "min_lr": 1e-4,
                    "weight_decay": 0.1,
                    "bf16": dtype == "bfloat16",
                    "params_dtype": getattr(torch, dtype),
                    "clip_grad": 1.0,
                    "log_num_zeros_in_grad": True,
                    **options,
                }
            ),
            self.trained.chunks,
        )
        self.inner = [part.optimizer for part in optimizer.chained_optimizers]
        self.trained.chunks[0].config.grad_scale_func = optimizer.scale_loss
        return optimizer

    def step(self, step: int, *, spoil: Callable[[Any], None] = lambda _: None) -> list[Any]:
        """Train a step; return losses, norm, count of zeros, success and learning rate."""
        self.optimizer.zero_grad()
        losses = self.trained.step(step, COUNTS[step % len(COUNTS)])
        spoil(self.trained.chunks[0])
        rate = self.optimizer.param_groups[0]["lr"]
        success, norm, num_zeros = self.optimizer.step()
        if success:
            self.scheduler.step(increment=1)
        numbers = [None if value is None else float(value) for value in (norm, num_zeros)]
        return [*losses, *numbers, success, rate]

    def steps(self, first: int, last: int, **options: Any) -> list[list[Any]]:
        return [self.step(step, **options) for step in range(first, last)]

    def tensors(self) -> list[torch.Tensor]:
        """Return parameters of the model and of the optimizer, and its state."""
        tensors = [p for chunk in self.trained.chunks for p in chunk.parameters()]
        for inner in self.inner:
            for group in inner.param_groups:
                for p in group["params"]:
                    tensors.append(p)
                    tensors += [t for _, t in sorted(inner.state[p].items())]
        return [t.detach().clone() for t in tensors]


def is_equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(mine, theirs, strict=True)
    )


CASES: dict[str, dict[str, Any]] = {
    "bf16": {"options": {}},
    "bf16_distributed": {"options": {"use_distributed_optimizer": True}},
    "bf16_gradients": {"options": {}, "ddp": {"grad_reduce_in_fp32": False}},
    "bf16_gradients_distributed": {
        "options": {"use_distributed_optimizer": True},
        "ddp": {"grad_reduce_in_fp32": False},
    },
    "rarely_clipped": {"options": {"clip_grad": 1.8}},
    "not_clipped": {"options": {"clip_grad": 0.0, "log_num_zeros_in_grad": False}},
    "fp32": {"options": {}, "dtype": "float32"},
    "experts": {"options": {}, "moe": EXPERTS},
    "experts_distributed": {"options": {"use_distributed_optimizer": True}, "moe": EXPERTS},
}


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_eager_ones(one_rank: Any, make_config: Any, name: str) -> None:
    case = CASES[name]
    eager = Training(one_rank, make_config, graphed=False, **case)
    expected = eager.steps(0, 8)
    graphed = Training(one_rank, make_config, graphed=True, **case)
    assert graphed.captured.why_eager == ""
    assert graphed.steps(0, 8) == expected
    assert is_equal(graphed.tensors(), eager.tensors())
    assert graphed.captured.graph.num_captures == 1
    assert graphed.captured.graph.num_replays == 7
    norms = [values[-4] for values in expected]
    assert name == "not_clipped" or len(set(norms)) == len(norms)
