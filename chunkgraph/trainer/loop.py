"""The training loop: Megatron's schedule, DDP and optimizer, eagerly or with chunk graphs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from chunkgraph.engine import CaptureOptions
from chunkgraph.engine.options import OnCapture
from chunkgraph.megatron.attachment import MegatronChunkGraphs, attach, config_of
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.contexts import follow_groups
from chunkgraph.megatron.features.experts.packed_padding import keep_padding_from_experts
from chunkgraph.megatron.features.experts.state import forget_expert_metrics, take_expert_metrics
from chunkgraph.megatron.features.fp8.feature import reset_fp8
from chunkgraph.megatron.features.stash.feature import stash_options
from chunkgraph.megatron.receive import receiving_lengths
from chunkgraph.settings import Config
from chunkgraph.trainer.batches import make_batches, packed_shape
from chunkgraph.trainer.batches import sequence_batches as microbatches
from chunkgraph.trainer.context_batches import ContextBatches
from chunkgraph.trainer.forward_step import forward_step, shared_loss
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.optimizer import build_optimizer, zero_gradients
from chunkgraph.trainer.setup import seed_everything

__all__ = [
    "StepRecord",
    "TrainingRun",
    "capture_options",
    "finish_parameter_gather",
    "forward_step",
    "microbatches",
    "resume_parameter_gather",
    "run_training",
    "shared_loss",
    "synchronize",
]


@dataclass(frozen=True)
class StepRecord:
    """One training step of this rank.

    Attributes:
        step: from 0.
        num_microbatches: for each data-parallel rank.
        loss: mean over microbatches and data-parallel ranks, the same on every rank.
        grad_norm: before clipping, over all stages.
        captures: graph pairs captured at this step's start, on this rank.
        replays: forward graphs replayed, on this rank.
        fallbacks: reason of an eager step -> 1.
        step_ms: wall time of schedule and optimizer, in ms.
        expert_metrics: this rank's sums over the step of each metric of the experts, by layer.
        context_sizes: context-parallel size of each microbatch of this rank, where they differ.
    """

    step: int
    num_microbatches: int
    loss: float
    grad_norm: float
    captures: int
    replays: int
    fallbacks: dict[str, int]
    step_ms: float
    expert_metrics: dict[str, tuple[float, ...]] = field(default_factory=dict)
    context_sizes: tuple[int, ...] = ()


@dataclass
class TrainingRun:
    """What a run of all steps left behind on this rank.

    Attributes:
        steps: one record for each step.
        parameters: final parameters and buffers on the CPU, named ``chunk index.name``.
        num_slots: slots of each chunk; empty for an eager run.
        capture_sessions: sessions in which graphs were captured.
        captures_after_first_session: graph pairs captured in any later session, but for those that
            followed a lack of room.
        dropped_tokens: how often an expert of this rank's layers had no room for a token, in a run
            with graphs.
        overflow_reruns: steps that were run anew, by what had no room.
        recaptures: why graphs were captured anew with more room, each time.
        stash_bytes: of the stash's pages on this rank's device.
        bytes_without_stash: what slots would keep in their place.
        replays_of_bank: forward graphs replayed on this rank, by bank, where there are several.
        missing_banks: eager steps, by the bank that they had no graphs of.
        memsets_kept: see `CaptureReport`.
        reserved_bytes: most memory that torch held on this rank's device; 0 on a CPU.
        gpu_used_bytes: memory in use on the whole of this rank's GPU behind the last step, by all
            processes: torch's, and that of NCCL, libraries, graphs and CUDA itself; 0 on a CPU.
    """

    steps: list[StepRecord] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    num_slots: tuple[int, ...] = ()
    capture_sessions: int = 0
    captures_after_first_session: int = 0
    dropped_tokens: int = 0
    overflow_reruns: dict[str, int] = field(default_factory=dict)
    recaptures: tuple[str, ...] = ()
    stash_bytes: int = 0
    bytes_without_stash: int = 0
    replays_of_bank: dict[str, int] = field(default_factory=dict)
    missing_banks: dict[str, int] = field(default_factory=dict)
    memsets_kept: str = ""
    reserved_bytes: int = 0
    gpu_used_bytes: int = 0

    @property
    def num_graphs(self) -> int:
        """Graphs captured on this rank, forward and backward."""
        return 2 * sum(record.captures for record in self.steps)


def run_training(
    config: Config,
    device: torch.device,
    *,
    use_graphs: bool,
    ddp_options: Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    on_step: Callable[[StepRecord], None] = lambda _: None,
    on_capture: OnCapture | None = None,
) -> TrainingRun:
    """Build the model from the seed, train every step of ``config``, and take it all down.

    Args:
        config: the run.
        device: this rank's device; process groups must be set up.
        use_graphs: attach chunk graphs, or leave the model as Megatron made it.
        ddp_options: further fields of Megatron's DistributedDataParallelConfig.
        model_options: further arguments of `build_model`.
        on_step: called after every step.
        on_capture: called after every captured graph.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seed_everything(config.train.seed, device)
    chunks = build_model(config, device, ddp_options, **(model_options or {}))
    optimizer = build_optimizer(config, chunks)
    model_config = config_of(chunks[0])
    batches = (
        ContextBatches(config, device, model_config)
        if config.packing.context_parallel_sizes
        else make_batches(config, device, model_config)
    )
    forward_backward = import_megatron(
        "megatron.core.pipeline_parallel"
    ).get_forward_backward_func()
    has_experts = config.moe.num_moe_experts is not None
    if has_experts:
        forget_expert_metrics()  # of a run before
    graphs: MegatronChunkGraphs | None = None
    run = TrainingRun()
    undo = ExitStack()
    undo.callback(batches.close)
    contexts = batches.banks if isinstance(batches, ContextBatches) else None
    try:
        if contexts is not None:
            undo.callback(follow_groups(chunks, contexts.groups))
        is_packed = contexts is not None or packed_shape(config) is not None
        if has_experts and is_packed and not use_graphs:
            undo.callback(keep_padding_from_experts(chunks, model_config))
        if use_graphs:
            graphs = attach(
                chunks,
                scope=config.capture.scope,
                options=capture_options(config),
                packing=packed_shape(config, model_config),
                buckets=config.packing.buckets,
                seq_buckets=config.seq_buckets if contexts is None else (),
                contexts=contexts,
                progress=on_capture,
                token_drops=config.moe.token_drops,
                stash=stash_options(config.stash),
            )
            undo.callback(graphs.detach)  # before process groups that graphs hold
            run.num_slots = graphs.num_slots
            forward_backward = graphs.wrap_forward_backward(forward_backward)
        elif config.packing.buckets:
            forward_backward = receiving_lengths(chunks, device, forward_backward)
        counted = _Counted(graphs)
        counts = config.train.num_microbatches
        for step, count in enumerate(counts):
            synchronize(device)
            started = time.perf_counter()
            zero_gradients(chunks, optimizer)
            told = batches.told(step, count, has_graphs=graphs is not None)
            num_microbatches = batches.num_microbatches(step, count)
            losses = forward_backward(
                forward_step_func=forward_step,
                data_iterator=[batches.step(step, count) for _ in chunks],
                model=chunks,
                num_microbatches=num_microbatches,
                seq_length=config.tokens_per_sequence,
                micro_batch_size=config.train.micro_batch_size,
                forward_only=False,
                **told,
            )
            if told and graphs is not None and step + 1 < len(counts):
                # The ranks agree on the next step while the device works on the optimizer's.
                graphs.announce(**batches.told(step + 1, counts[step + 1], has_graphs=True))
            _, grad_norm, _ = optimizer.step()
            synchronize(device)
            record = StepRecord(
                step=step,
                num_microbatches=num_microbatches,
                loss=shared_loss(losses, device),
                grad_norm=0.0 if grad_norm is None else float(grad_norm),
                step_ms=(time.perf_counter() - started) * 1e3,
                expert_metrics=take_expert_metrics() if has_experts else {},
                context_sizes=tuple(key.size for key in told.get("contexts", ())),
                **counted.since_last(),
            )
            run.steps.append(record)
            on_step(record)
        if device.type == "cuda":
            run.reserved_bytes = torch.cuda.max_memory_reserved(device)
            free, total = torch.cuda.mem_get_info(device)
            run.gpu_used_bytes = total - free
        finish_parameter_gather(chunks)
        if graphs is not None:
            run.dropped_tokens = sum(graphs.dropped_tokens(wait=True).values())
            run.overflow_reruns = dict(graphs.counters.overflow_reruns)
            run.recaptures = tuple(graphs.counters.recaptures)
            run.missing_banks = dict(graphs.counters.missing_banks)
            if graphs.engine.report is not None:
                run.memsets_kept = graphs.engine.report.memsets_kept
            run.replays_of_bank = graphs.replays_of_bank
            if graphs.stash is not None and graphs.stash.size is not None:
                run.stash_bytes = graphs.stash.size.device_bytes
                run.bytes_without_stash = graphs.stash.full_bytes()
        run.capture_sessions = counted.capture_sessions
        run.captures_after_first_session = counted.captures_after_first_session
        run.parameters = {
            f"{index}.{name}": parameter.detach().to("cpu", copy=True)
            for index, chunk in enumerate(chunks)
            for name, parameter in (*chunk.named_parameters(), *chunk.named_buffers())
        }
    finally:
        undo.close()
        if config.model.fp8 is not None:
            reset_fp8()  # or the next model's scales would be reduced together with these
    return run


def capture_options(config: Config) -> CaptureOptions:
    """How ``config`` wants its chunks captured."""
    return CaptureOptions(
        num_warmup_steps=config.capture.num_warmup_steps,
        verify=config.capture.verify,
        num_verify_steps=config.capture.num_verify_steps,
        verify_every=config.capture.verify_every,
        on_failure=config.capture.on_failure,
        memory_plan=config.capture.memory_plan,
        shared_slots=config.capture.shared_slots,
        memset_kernels=config.capture.memset_kernels,
    )


class _Counted:
    """The engine's counters, step by step."""

    def __init__(self, graphs: MegatronChunkGraphs | None) -> None:
        self._graphs = graphs
        self._last = self._read()
        self.captures_after_first_session = 0

    @property
    def capture_sessions(self) -> int:
        return self._last[0]

    def since_last(self) -> dict[str, Any]:
        before, self._last = self._last, self._read()
        captures = self._last[1] - before[1]
        num_expected = 1 + (len(self._graphs.counters.recaptures) if self._graphs else 0)
        if before[0] >= num_expected:
            self.captures_after_first_session += captures
        return {
            "captures": captures,
            "replays": self._last[2] - before[2],
            "fallbacks": dict(self._last[3] - before[3]),
        }

    def _read(self) -> tuple[int, int, int, Counter[str]]:
        if self._graphs is None:
            return 0, 0, 0, Counter()
        counters = self._graphs.counters
        return (
            counters.capture_sessions,
            counters.captures,
            counters.replays,
            Counter(counters.fallbacks),
        )


def finish_parameter_gather(chunks: list[nn.Module]) -> None:
    """With overlapped gathering, the last step's parameters would be gathered by the next step."""
    for chunk in chunks:
        if getattr(chunk, "use_forward_hook", False):
            chunk.disable_forward_pre_hook()  # type: ignore[operator]


def resume_parameter_gather(chunks: list[nn.Module]) -> None:
    """Undo `finish_parameter_gather`, before further steps."""
    for chunk in chunks:
        if getattr(chunk, "use_forward_hook", False):
            chunk.enable_forward_pre_hook()  # type: ignore[operator]


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
