"""A Megatron model in this process, trained step by step: eagerly or with graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expert_cases
import torch

from chunkgraph import megatron
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.experts.state import forget_expert_metrics, take_expert_metrics
from chunkgraph.trainer.batches import SequenceBatches
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import seed_everything
from chunkgraph.trainer.trained_model import forward_step

# With four experts, of which each token has two, and room for all tokens.
EXPERTS = {**expert_cases.EXPERTS, "moe_expert_capacity_factor": 2.0}


_attached: list[Any] = []


def attach(*args: Any, **options: Any) -> Any:
    """Attach graphs, in a test to its end."""
    _attached.append(megatron.attach(*args, **options))
    return _attached[-1]


def detach_all() -> None:
    """Detach all graphs, the newest first; a second time changes nothing."""
    while _attached:
        _attached.pop().detach()


def block_of(chunks: list[Any]) -> Any:
    """Return the transformer block of the first chunk."""
    return next(
        m for m in chunks[0].modules() if hasattr(m, "set_input_tensor") and hasattr(m, "layers")
    )


class Trained:
    """A model from the same seed every time.

    Args:
        device: device of this rank.
        config: configuration of the run.
        graphs: arguments of `attach`; None trains eagerly.
        seed: of the model.
        model_options: see `build_model`.
    """

    def __init__(
        self,
        device: Any,
        config: Any,
        graphs: dict[str, Any] | None,
        *,
        seed: int = 1,
        **model_options: Any,
    ) -> None:
        forget_expert_metrics()
        seed_everything(seed, device)
        self.device, self.config = device, config
        self.chunks: Any = build_model(config, device, **model_options)
        self.train = import_megatron("megatron.core.pipeline_parallel").get_forward_backward_func()
        self.graphs: Any = None
        if graphs is not None:
            self.attach(**graphs)

    def attach(self, **graphs: Any) -> None:
        """Train with graphs from now on."""
        self.graphs = attach(self.chunks, **graphs)
        self.train = self.graphs.wrap_forward_backward(self.train)

    def step(
        self,
        step: int,
        count: int,
        *,
        forward: Callable[..., Any] = forward_step,
        clears: bool = True,
        **options: Any,
    ) -> list[float]:
        """Run a step and return its losses; ``clears``: without the gradients of earlier steps."""
        for chunk in self.chunks if clears else ():
            chunk.zero_grad_buffer()
        seq_length = self.config.model.seq_length
        batches = SequenceBatches(self.config.replace(train={"seed": 1}), self.device)
        losses = self.train(
            forward_step_func=forward,
            data_iterator=[batches.step(step, count) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=count,
            seq_length=seq_length,
            micro_batch_size=self.config.train.micro_batch_size,
            **{"forward_only": False, **options},
        )
        return [float(loss["lm loss"]) for loss in losses]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of gradients and buffers."""
        return {
            f"chunk {index}: {name}": value.clone()
            for index, chunk in enumerate(self.chunks)
            for name, value in [
                *((name, p.main_grad) for name, p in chunk.named_parameters()),
                *chunk.named_buffers(),
            ]
        }

    def results(self, step: int, count: int, **options: Any) -> dict[str, torch.Tensor]:
        """Run a step; return its losses, gradients, buffers and metrics of experts."""
        losses = torch.tensor(self.step(step, count, **options))
        metrics = {name: torch.tensor(value) for name, value in take_expert_metrics().items()}
        return {"losses": losses, **self.tensors(), **metrics}
