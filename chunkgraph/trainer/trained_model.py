"""Train a model on this rank, step by step: its optimizer, its microbatches, and their loss."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chunkgraph.engine import CaptureOptions
from chunkgraph.engine.observer import Counters
from chunkgraph.megatron.attachment import MegatronChunkGraphs, attach, config_of, eager_driver
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.contexts import follow_groups
from chunkgraph.megatron.features.experts.padding import keep_padding_from_experts
from chunkgraph.megatron.features.experts.state import forget_expert_metrics, take_expert_metrics
from chunkgraph.megatron.receive import receiving_lengths
from chunkgraph.settings import Config
from chunkgraph.trainer.batches import Batch, PackedBatches, SequenceBatches
from chunkgraph.trainer.model import build_model, build_optimizer, zero_gradients
from chunkgraph.trainer.results import StepRecord
from chunkgraph.trainer.setup import seed_everything


def forward_step(
    data: Iterator[dict[str, Any]], chunk: nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    """Run a microbatch through ``chunk``.

    Args:
        data: microbatches, as dictionaries: ``tokens``, ``labels`` and ``position_ids``, int64
            [b, s]; ``is_counted``, bool [b, s], True where the label counts; ``attention_mask``,
            ``packed_seq_params`` and ``padding_mask`` as Megatron's models take them, if any; and
            ``num_counted`` or ``loss_scale``, see `_loss`.
        chunk: one of Megatron's models, wrapped or not.

    Returns:
        The chunk's output, and its loss function.
    """
    batch = next(data)
    # Releases without experts on packed sequences do not have the argument.
    padding = {"padding_mask": batch["padding_mask"]} if "padding_mask" in batch else {}
    output = chunk(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=batch.get("attention_mask"),
        labels=batch["labels"],
        packed_seq_params=batch.get("packed_seq_params"),
        **padding,
    )
    return output, partial(_loss, batch)


def _loss(batch: Batch, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Average the losses [b, s] that count; others are selected away, as a NaN times 0 is NaN.

    With ``num_counted``, that of all context-parallel ranks, the result is this rank's share of the
    mean, which the schedule multiplies by the number of these ranks before DDP averages gradients
    over them. ``loss_scale`` makes the sum a share of the step's mean loss per token instead. It
    undoes the means over microbatches (in the schedule) and over ranks (in DDP), which count
    documents on several ranks more than once.
    """
    is_counted = batch["is_counted"]
    total = losses.float().masked_fill(~is_counted, 0.0).sum()
    if "loss_scale" in batch:
        loss = total * batch["loss_scale"]
    elif "num_counted" in batch:
        loss = total / batch["num_counted"]
    else:
        loss = total / is_counted.sum().clamp(min=1)
    return loss, {"lm loss": loss.detach().clone()}


def shared_loss(losses: list[dict[str, torch.Tensor]], device: torch.device) -> float:
    """Average the losses over microbatches and data-parallel ranks; return it on every rank.

    Context-parallel ranks hold shares of the loss, which are summed.
    """
    state = import_megatron("megatron.core.parallel_state")
    loss = torch.zeros((), dtype=torch.float32, device=device)
    if losses:
        loss = torch.stack([entry["lm loss"] for entry in losses]).mean()
        group = state.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:
            dist.all_reduce(loss, group=group)
            loss /= group.size() // state.get_context_parallel_world_size()
    if state.get_pipeline_model_parallel_world_size() > 1:
        source = state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(loss, source, group=state.get_pipeline_model_parallel_group())
    return float(loss)


class TrainedModel:
    """The chunks of a model on this rank, their optimizer and their microbatches.

    Args:
        config: the run; model parallel groups must be initialized.
        device: this rank's device.
        model_options: more arguments of `build_model`.

    Attributes:
        chunks: model chunks of this rank.
        optimizer: Megatron's optimizer of all chunks.
        batches: source of the microbatches.
        graphs: chunk graphs; None until they are attached.
        schedule: Megatron's schedule function, wrapped as the run requires.
    """

    def __init__(self, config: Config, device: torch.device, **model_options: Any) -> None:
        seed_everything(config.train.seed, device)
        if config.moe.num_moe_experts is not None:
            forget_expert_metrics()  # those of an earlier model, before graphs use them
        self.config = config
        self.device = device
        self.chunks = build_model(config, device, **model_options)
        self.optimizer = build_optimizer(config, self.chunks)
        self.graphs: MegatronChunkGraphs | None = None
        pipeline = import_megatron("megatron.core.pipeline_parallel")
        self.schedule: Callable[..., Any] = pipeline.get_forward_backward_func()
        self._undo = ExitStack()
        if not config.packing.max_packed_seqs:
            self.batches = SequenceBatches(config, device)
            return
        model_config = config_of(self.chunks[0])
        self.batches = batches = PackedBatches(config, device, model_config)
        self._undo.callback(batches.close)
        if batches.banks.groups is not None:
            self._undo.callback(follow_groups(self.chunks, batches.banks.groups))

    def attach_graphs(self) -> MegatronChunkGraphs:
        """Attach chunk graphs as configured."""
        config = self.config
        self.graphs = attach(
            self.chunks,
            scope=config.capture.scope,
            options=CaptureOptions(**config.capture.options),
            packing=self.batches.banks,
            schedule=config.pipeline.schedule,
            token_drops=config.moe.token_drops,
            stash=config.stash,
        )
        self._undo.callback(self.graphs.detach)  # before the process groups that graphs use
        self.schedule = self.graphs.wrap_forward_backward(self.schedule)
        if config.capture.captures_optimizer:
            self.graphs.capture_optimizer(self.optimizer)
        return self.graphs

    def train_eagerly(self) -> None:
        """Run the configured schedule, and handle packed documents as chunk graphs do."""
        config = self.config
        if config.pipeline.schedule != "auto":
            self.schedule = eager_driver(self.chunks, config.pipeline.schedule)
        if not config.packing.max_packed_seqs:
            return
        if config.moe.num_moe_experts is not None:
            model_config = config_of(self.chunks[0])
            self._undo.callback(keep_padding_from_experts(self.chunks, model_config))
        if config.packing.buckets:
            self.schedule = receiving_lengths(self.chunks, self.device, self.schedule)

    def count(self, step: int) -> int:
        """Return the configured number of microbatches of a step."""
        counts = self.config.train.num_microbatches
        return counts[step % len(counts)]

    def draw(self, step: int) -> list[Iterator[Batch]]:
        """Draw the microbatches of a step, once for each chunk."""
        return [self.batches.step(step, self.count(step)) for _ in self.chunks]

    def run_step(
        self,
        step: int,
        data: Sequence[Iterator[Batch]],
        *,
        announces_next: bool,
        forward_step: Callable[..., Any] = forward_step,
        timed: AbstractContextManager[object] | None = None,
    ) -> StepRecord:
        """Run one training step.

        Args:
            step: number of the step, from 0.
            data: the step's microbatches, for each chunk.
            announces_next: whether another step follows, whose packed documents are known already.
            forward_step: forward step function of the schedule.
            timed: context of the timed part of the step.
        """
        options = self.batches.schedule_options(step, self.count(step))
        of_next: dict[str, Any] = {}
        if announces_next:
            of_next = self.batches.schedule_options(step + 1, self.count(step + 1))
            del of_next["num_microbatches"]
        of_graphs = ("packings", "contexts") if self.graphs is None else ()
        before = replace(self.counters, fallbacks=Counter(self.counters.fallbacks))
        torch.cuda.synchronize()  # nothing on a CPU host
        with timed or nullcontext():
            started = time.perf_counter()
            zero_gradients(self.chunks, self.optimizer)
            losses = self.schedule(
                forward_step_func=forward_step,
                data_iterator=list(data),
                model=self.chunks,
                seq_length=self.config.tokens_per_sequence,
                micro_batch_size=self.config.train.micro_batch_size,
                forward_only=False,
                **{name: value for name, value in options.items() if name not in of_graphs},
            )
            if self.graphs is not None and of_next:
                # The ranks agree on the next step while the device runs the optimizer.
                self.graphs.announce(**of_next)
            _, grad_norm, _ = self.optimizer.step()
            torch.cuda.synchronize()
            step_ms = (time.perf_counter() - started) * 1e3
        has_experts = self.config.moe.num_moe_experts is not None
        metrics = sorted(take_expert_metrics().items()) if has_experts else ()
        return StepRecord(
            step=step,
            num_microbatches=options["num_microbatches"],
            loss=shared_loss(losses, self.device),
            grad_norm=0.0 if grad_norm is None else float(grad_norm),
            step_ms=step_ms,
            captures=self.counters.captures - before.captures,
            replays=self.counters.replays - before.replays,
            fallbacks=dict(self.counters.fallbacks - before.fallbacks),
            expert_metrics={name: sum(of_layers) for name, of_layers in metrics if any(of_layers)},
            context_sizes=[[bank.size for bank in options.get("contexts", ())]],
        )

    @property
    def counters(self) -> Counters:
        """Return the graphs' counters; all are 0 without graphs."""
        return Counters() if self.graphs is None else self.graphs.counters

    def finish_parameter_gather(self) -> None:
        """Gather the last step's parameters, if the next step would gather them overlapped.

        No step may follow.
        """
        for chunk in self.chunks:
            if getattr(chunk, "use_forward_hook", False):
                chunk.disable_forward_pre_hook()  # type: ignore[operator]

    def close(self) -> None:
        """Detach the graphs and destroy the batches' process groups."""
        self._undo.close()
