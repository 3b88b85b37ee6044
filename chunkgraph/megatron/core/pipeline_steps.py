"""Megatron's own steps of a pipeline schedule: one forward, one backward, the end of a step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from chunkgraph.megatron.core.access import import_megatron, private_names

__all__ = ["MegatronSteps", "megatron_forward_backward"]

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def megatron_forward_backward() -> Any:
    """Return the forward-backward function that Megatron runs for this job."""
    return import_megatron("megatron.core.pipeline_parallel").get_forward_backward_func()


class _Functions(NamedTuple):
    forward_step: Callable[..., Any]
    backward_step: Callable[..., Any]
    get_model_type: Callable[..., Any]
    deallocate_output_tensor: Callable[..., Any]


def _functions() -> _Functions:
    return _Functions(
        *private_names(
            _SCHEDULES,
            "forward_step",
            "backward_step",
            "get_model_type",
            "deallocate_output_tensor",
        )
    )


@dataclass(frozen=True, kw_only=True)
class MegatronSteps:
    """Megatron's functions and arguments for one training step of a schedule.

    Attributes:
        models: Model chunks of this rank, wrappers included.
        config: Megatron's ModelParallelConfig.
        groups: Megatron's process groups.
        data: A data iterator for each chunk.
        forward_step_func: As Megatron's schedules take it.
        num_microbatches: Microbatches in the step.
        collect_non_loss_data: As Megatron's schedules take it.
        losses: What the last stage's loss function reports, by microbatch.
        functions: Megatron's functions, looked up once per step.
    """

    models: Sequence[nn.Module]
    config: Any
    groups: Any
    data: Sequence[Any]
    forward_step_func: Any
    num_microbatches: int
    collect_non_loss_data: bool
    losses: list[Any]
    functions: _Functions

    @classmethod
    def of(cls, keywords: dict[str, Any], groups: Any) -> MegatronSteps:
        """Take over the keywords of a forward-backward function, with its process groups."""
        models, data = _as_list(keywords["model"]), _as_list(keywords["data_iterator"])
        (config_of,) = private_names(_SCHEDULES, "get_model_config")
        return cls(
            models=models,
            config=config_of(models[0]),
            groups=groups,
            data=data if len(data) == len(models) else [*data] * len(models),
            forward_step_func=keywords["forward_step_func"],
            num_microbatches=keywords["num_microbatches"],
            collect_non_loss_data=keywords.get("collect_non_loss_data", False),
            losses=[],
            functions=_functions(),
        )

    def forward(
        self, chunk: int, microbatch: int, received: torch.Tensor | None, *, is_last: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one forward; return the output, or the loss, and the number of tokens."""
        output, num_tokens = self.functions.forward_step(
            self.forward_step_func,
            self.data[chunk],
            self.models[chunk],
            self.num_microbatches,
            received,
            self.losses,
            self.config,
            cp_group_size=self.groups.cp.size(),
            collect_non_loss_data=self.collect_non_loss_data,
            is_first_microbatch=microbatch == 0,
            current_microbatch=microbatch,
            vp_stage=chunk if len(self.models) > 1 else None,
            is_last_stage=is_last,
        )
        return output, num_tokens

    def backward(
        self,
        received: torch.Tensor | None,
        output: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run one backward; return the input's gradient, None on the first stage."""
        grad: torch.Tensor | None = self.functions.backward_step(
            received, output, output_grad, *self.model_type, self.config
        )
        return grad

    @functools.cached_property
    def model_type(self) -> tuple[Any, ...]:
        """Return the argument that only older releases take."""
        parameters = inspect.signature(self.functions.backward_step).parameters
        is_taken = "model_type" in parameters
        return (self.functions.get_model_type(self.models[0]),) if is_taken else ()

    def free_output(self, output: torch.Tensor) -> None:
        """Free an output that was sent, where Megatron is configured to."""
        self.functions.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def received_shape(self, keywords: dict[str, Any]) -> tuple[int, ...]:
        """Return the shape of what stages exchange."""
        (shapes_of,) = private_names(_SCHEDULES, "get_tensor_shapes")
        (shape,) = shapes_of(
            seq_length=keywords["seq_length"],
            micro_batch_size=keywords["micro_batch_size"],
            decoder_seq_length=keywords.get("decoder_seq_length"),
            config=self.config,
            tp_group=self.groups.tp,
            cp_group=self.groups.cp,
        )
        return tuple(shape)

    def begin(self, *, is_last_rank: bool) -> Any:
        """Prepare deferred gradients of the output layer; return what `finish` needs."""
        if self.config.finalize_model_grads_func is None:
            return None
        (clear,) = private_names(_SCHEDULES, "clear_embedding_activation_buffer")
        return clear(self.config, list(self.models), is_last_rank)

    def finish(
        self,
        embedding: Any,
        num_tokens: torch.Tensor,
        *,
        is_last_rank: bool,
        force_all_reduce: bool,
    ) -> None:
        """Compute deferred gradients and reduce all of them over the job."""
        config = self.config
        if config.finalize_model_grads_func is None:
            return
        (finish_embedding,) = private_names(_SCHEDULES, "finish_embedding_wgrad_compute")
        finish_embedding(config, embedding, is_last_rank, self.groups.tp)
        config.finalize_model_grads_func(
            list(self.models),
            num_tokens if config.calculate_per_token_loss else None,
            pg_collection=self.groups,
            force_all_reduce=force_all_reduce,
        )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
