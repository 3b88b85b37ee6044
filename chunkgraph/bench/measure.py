"""Run one variant on this rank and measure it."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chunkgraph.bench.gpu_speed import matmul_tflops
from chunkgraph.bench.host_times import HostTimes, host_times
from chunkgraph.bench.packed_work import Work, work_of
from chunkgraph.bench.profiled import marked, profile_steps
from chunkgraph.bench.trace import PREFIX, KernelTimes
from chunkgraph.bench.variants import ChunkVariant, Variant
from chunkgraph.megatron.attachment import config_of
from chunkgraph.megatron.features.packing.steps import Packings
from chunkgraph.settings import Config
from chunkgraph.trainer.batches import PackedBatches, make_batches
from chunkgraph.trainer.loop import (
    finish_parameter_gather,
    forward_step,
    resume_parameter_gather,
    shared_loss,
    synchronize,
)
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.optimizer import build_optimizer, zero_gradients
from chunkgraph.trainer.setup import seed_everything

__all__ = ["Measurement", "Step", "VariantRun"]


@dataclass(frozen=True)
class Step:
    """One step of this rank.

    Attributes:
        step: from 0, warmup included.
        num_microbatches: for each data-parallel rank.
        step_ms: from a barrier to the end of the optimizer's step on the device, in ms.
        loss: mean over microbatches and data-parallel ranks.
        grad_norm: before clipping.
        work: what its microbatches hold.
        captures: captures in it.
        fallbacks: why it ran eagerly, where graphs were to be replayed.
        overflows: which of its packed documents did not fit, by cause.
    """

    step: int
    num_microbatches: int
    step_ms: float
    loss: float
    grad_norm: float
    work: Work
    captures: int = 0
    fallbacks: tuple[str, ...] = ()
    overflows: tuple[str, ...] = ()


@dataclass
class Measurement:
    """What one rank measured; plain values, to be gathered.

    Attributes:
        steps: all steps, warmup first.
        parameters_sha256: of all parameters after the measured steps, in order.
        reserved_bytes: most memory the allocator held during the steps (0 on a CPU).
        allocated_bytes: most memory in use during the steps.
        capture_s: seconds of the captures, where they were apart from a step.
        capture_step: the step whose time contains them, where they were not.
        captures_after_first: captures after the first session.
        overflow_reruns: steps of any kind that were run anew so far, by what had no room.
        pool_bytes: what the graphs reserve, by part; None where it is not known.
        matmul_tflops: of its GPU behind the measured steps; None where it was not measured.
        host: host times; None until they are measured.
        kernels: kernel times of all profiled steps; None until they are measured.
        num_profiled_steps: how many.
        num_profiled_fallbacks: of those, how many ran eagerly where graphs were to be replayed.
        num_steps_run: steps of any kind that have run.
    """

    steps: list[Step] = field(default_factory=list)
    parameters_sha256: str = ""
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    capture_s: float | None = None
    capture_step: int | None = None
    captures_after_first: int = 0
    overflow_reruns: dict[str, int] = field(default_factory=dict)
    pool_bytes: dict[str, int] | None = None
    matmul_tflops: float | None = None
    host: HostTimes | None = None
    kernels: KernelTimes | None = None
    num_profiled_steps: int = 0
    num_profiled_fallbacks: int = 0
    num_steps_run: int = 0


class VariantRun:
    """A model, its optimizer and one way to run their steps.

    The microbatches of a step are on the device before its time begins, as a loader that works
    ahead would have them.

    Args:
        config: the run; model parallel groups must be set up.
        device: this rank's device.
        variant: how to run.
        on_step: called after every step, with its kind: ``warmup``, ``step``, ``host`` or
            ``profile``.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        variant: Variant,
        on_step: Callable[[str, Step], None] = lambda *_: None,
    ) -> None:
        self._config = config
        self._device = device
        self._variant = variant
        self._on_step = on_step
        self._step = 0
        seed_everything(config.train.seed, device)
        self._chunks = build_model(
            config,
            device,
            transformer_options=variant.transformer_options(),
            ddp_scope=variant.ddp_scope,
        )
        self._optimizer = build_optimizer(config, self._chunks)
        self._batches = make_batches(config, device, config_of(self._chunks[0]))
        variant.prepare(self._chunks, self._optimizer)
        self.measurement = Measurement()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    def measure_steps(self) -> None:
        """Run warmup and measured steps, and note what they left."""
        bench, result = self._config.bench, self.measurement
        num_steps = bench.num_warmup_steps + bench.num_steps
        for index in range(num_steps):
            kind = "warmup" if index < bench.num_warmup_steps else "step"
            is_last = index == num_steps - 1
            result.steps.append(self._run_step(kind, forward_step, announces_next=not is_last))
        if self._device.type == "cuda":
            result.reserved_bytes = torch.cuda.max_memory_reserved(self._device)
            result.allocated_bytes = torch.cuda.max_memory_allocated(self._device)
        # At once: on all GPUs together, and while they are as warm as they were.
        result.matmul_tflops = matmul_tflops(self._device)
        result.capture_s = self._variant.capture_s
        result.capture_step = self._variant.capture_step
        result.pool_bytes = self._variant.pool_bytes
        result.captures_after_first = self._variant.captures_after_first
        result.overflow_reruns = self._variant.overflow_reruns
        finish_parameter_gather(self._chunks)
        result.parameters_sha256 = _parameters_sha256(self._chunks)
        resume_parameter_gather(self._chunks)

    def measure_host(self, num_steps: int) -> None:
        """Time the host in further steps, which change the parameters again."""
        engine = None
        if isinstance(self._variant, ChunkVariant):
            engine = self._variant.graphs.engine
        with host_times(self._chunks, engine) as times:
            for _ in range(num_steps):
                before = times.num_calls
                if self._run_step("host", forward_step).fallbacks:
                    times.forget(before)  # an eager step's calls are none of the variant's
        self.measurement.host = times

    def measure_kernels(self, num_steps: int, trace: Path) -> None:
        """Profile further steps."""
        step = marked(forward_step, self._chunks)
        profiled: list[Step] = []
        self.measurement.kernels = profile_steps(
            lambda: profiled.append(self._run_step("profile", step)), num_steps, trace
        )
        self.measurement.num_profiled_steps = num_steps
        self.measurement.num_profiled_fallbacks = sum(
            bool(one.fallbacks) for one in profiled[-num_steps:]
        )

    def close(self) -> None:
        """Drop the graphs, before process groups end."""
        self._variant.close()
        self._batches.close()

    def _run_step(
        self, kind: str, step_function: Callable[..., Any], *, announces_next: bool = False
    ) -> Step:
        config, device, variant = self._config, self._device, self._variant
        index, count = self._step, self._count_of(self._step)
        self._step = self.measurement.num_steps_run = index + 1
        variant.before_step(index)
        known = self._packings_of(index)
        # A loader that works ahead knows the next step's documents by now.
        following = self._packings_of(index + 1) if announces_next else None
        batches = list(self._batches.step(index, count))
        iterators = [iter(batches) for _ in self._chunks]
        synchronize(device)
        _barrier(device)
        with torch.profiler.record_function(f"{PREFIX}step"):
            started = time.perf_counter()
            zero_gradients(self._chunks, self._optimizer)
            losses = variant.forward_backward(
                forward_step_func=step_function,
                data_iterator=iterators,
                model=self._chunks,
                num_microbatches=count,
                seq_length=config.tokens_per_sequence,
                micro_batch_size=config.train.micro_batch_size,
                forward_only=False,
                **variant.told(*known),
            )
            if following is not None:
                variant.announce(*following)
            _, grad_norm, _ = self._optimizer.step()
            synchronize(device)
            step_ms = (time.perf_counter() - started) * 1e3
        step = Step(
            step=index,
            num_microbatches=count,
            step_ms=step_ms,
            loss=shared_loss(losses, device),
            grad_norm=0.0 if grad_norm is None else float(grad_norm),
            work=work_of(config, count, *known),
            **variant.counted(),
        )
        self._on_step(kind, step)
        return step

    def _count_of(self, step: int) -> int:
        counts = self._config.train.num_microbatches
        return counts[step % len(counts)]

    def _packings_of(self, step: int) -> tuple[Packings | None, list[int] | None]:
        if not isinstance(self._batches, PackedBatches):
            return None, None
        count = self._count_of(step)
        return self._batches.packings(step, count), self._batches.buckets(step, count)


def _barrier(device: torch.device) -> None:
    if dist.get_world_size() > 1:
        dist.barrier()
        synchronize(device)


def _parameters_sha256(chunks: Sequence[nn.Module]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        for parameter in chunk.parameters():
            value = parameter.detach().to("cpu").contiguous().view(-1)
            digest.update(value.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
