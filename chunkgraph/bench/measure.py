"""Run one variant on this rank and measure it."""

from __future__ import annotations

import gc
import hashlib
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chunkgraph.bench.chunk_costs import chunk_costs
from chunkgraph.bench.gpu_speed import matmul_tflops
from chunkgraph.bench.host_times import HostTimes, host_times
from chunkgraph.bench.packed_work import Work, work_of
from chunkgraph.bench.profiled import marked, profile_steps
from chunkgraph.bench.trace import PREFIX, KernelTimes
from chunkgraph.bench.variants import Captures, Variant
from chunkgraph.settings import Config
from chunkgraph.trainer.forward_step import forward_step
from chunkgraph.trainer.trained_model import StepRecord, TrainedModel, synchronize

__all__ = [
    "NUM_OPTIMIZER_STEPS",
    "MeasuredRun",
    "Measurement",
    "Step",
    "VariantRun",
    "add_parameters",
    "timed_together",
]


@dataclass(frozen=True, kw_only=True)
class Step(StepRecord):
    """Results of one step of this rank; ``step`` also counts warmup steps.

    Attributes:
        work: Work of the step's microbatches.
    """

    work: Work


NUM_OPTIMIZER_STEPS = 5


@dataclass
class Measurement:
    """Measurements of one rank, as plain values for gathering.

    Attributes:
        steps: All steps, warmup first.
        parameters_sha256: Hash of all parameters after the measured steps, in order.
        reserved_bytes: Most memory that the allocator held during the steps; 0 on a CPU.
        allocated_bytes: Most memory in use during the steps; 0 on a CPU.
        captures: Measurements of the captures.
        matmul_tflops: Speed of the rank's GPU after the measured steps; None if not measured.
        host: Host times; None until they are measured.
        chunk_costs: Times of each chunk's graphs in ms; empty until they are measured.
        num_gemms: Numbers of GEMMs of a chunk's graphs; empty if they are not counted.
        optimizer_ms: Time of the optimizer's step and of zeroing gradients; None until measured.
        kernels: Kernel times of all profiled steps; None until they are measured.
        num_profiled_steps: Number of profiled steps.
        num_profiled_fallbacks: Number of profiled steps that ran eagerly instead of replaying.
        num_steps_run: Number of steps of any kind that have run.
    """

    steps: list[Step] = field(default_factory=list)
    parameters_sha256: str = ""
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    captures: Captures = field(default_factory=Captures)
    matmul_tflops: float | None = None
    host: HostTimes | None = None
    chunk_costs: list[dict[str, float]] = field(default_factory=list)
    num_gemms: dict[str, int] = field(default_factory=dict)
    optimizer_ms: float | None = None
    kernels: KernelTimes | None = None
    num_profiled_steps: int = 0
    num_profiled_fallbacks: int = 0
    num_steps_run: int = 0


class MeasuredRun:
    """Measure the steps of a model, which subclasses run.

    The microbatches of a step are on the device before its timing starts, as with a prefetching
    loader.

    Args:
        config: The run's configuration; its process groups must be initialized.
        device: This rank's device.
        on_step: Callback after every step, with its kind: ``warmup``, ``step``, ``host`` or
            ``profile``.

    Attributes:
        has_fragile_end: Whether the process should end without freeing the graphs.
        measurement: Measurements of this rank so far.
    """

    has_fragile_end = False

    def __init__(
        self, config: Config, device: torch.device, on_step: Callable[[str, Step], None]
    ) -> None:
        self.config = config
        self.device = device
        self.on_step = on_step
        self.measurement = Measurement()

    def begin_memory(self) -> None:
        """Begin to measure memory, once the model is built."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def measure_steps(self) -> None:
        """Run warmup and measured steps, and record their results."""
        bench, result = self.config.bench, self.measurement
        num_steps = bench.num_warmup_steps + bench.num_steps
        for index in range(num_steps):
            kind = "warmup" if index < bench.num_warmup_steps else "step"
            result.steps.append(self.run_step(kind, announces_next=index < num_steps - 1))
        if self.device.type == "cuda":
            result.reserved_bytes = torch.cuda.max_memory_reserved(self.device)
            result.allocated_bytes = torch.cuda.max_memory_allocated(self.device)
        # Right after the steps: on all GPUs together, and at the same temperature.
        result.matmul_tflops = matmul_tflops(self.device)
        result.captures = replace(self.captures)
        result.parameters_sha256 = self.parameters_sha256()

    @property
    def captures(self) -> Captures:
        """Return the measurements of the captures so far."""
        raise NotImplementedError

    def run_step(self, kind: str, *, announces_next: bool = False) -> Step:
        """Run the next step, and report it to ``on_step``."""
        raise NotImplementedError

    def parameters_sha256(self) -> str:
        """Return a hash of the parameters, which other variants are compared with."""
        raise NotImplementedError

    def measure_costs(self) -> None:
        """Time the graphs of each chunk and the optimizer, outside of steps."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the graphs, before process groups are destroyed."""
        raise NotImplementedError


class VariantRun(MeasuredRun):
    """Run and measure the steps of Megatron's model in one variant.

    Args:
        config: The run's configuration; model parallel groups must be initialized.
        device: This rank's device.
        variant: The variant to run.
        on_step: See `MeasuredRun`.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        variant: Variant,
        on_step: Callable[[str, Step], None] = lambda *_: None,
    ) -> None:
        super().__init__(config, device, on_step)
        self._variant = variant
        self.has_fragile_end = variant.has_fragile_end
        self._step = 0
        self._model = TrainedModel(
            config,
            device,
            model_options={
                "transformer_options": variant.transformer_options(),
                "ddp_scope": variant.ddp_scope,
            },
        )
        variant.prepare(self._model)
        self.begin_memory()

    @property
    def captures(self) -> Captures:
        """Return the measurements of the variant's captures so far."""
        return self._variant.captures

    def parameters_sha256(self) -> str:
        """Return a hash of all parameters of this rank, in order."""
        self._model.finish_parameter_gather()
        digest = hashlib.sha256()
        for chunk in self._model.chunks:
            add_parameters(digest, chunk)
        self._model.resume_parameter_gather()
        return digest.hexdigest()

    def measure_host(self, num_steps: int) -> None:
        """Measure host times in more steps, which change the parameters again."""
        graphs = self._model.graphs
        engine = graphs.engine if graphs is not None else None
        with host_times(self._model.chunks, engine) as times:
            for _ in range(num_steps):
                before = times.num_calls
                if self.run_step("host").fallbacks:
                    times.forget(before)  # calls of an eager step do not belong to the variant
        self.measurement.host = times

    def measure_kernels(self, num_steps: int, trace: Path) -> None:
        """Profile more steps."""
        step = marked(forward_step, self._model.chunks)
        profiled: list[Step] = []
        self.measurement.kernels = profile_steps(
            lambda: profiled.append(self.run_step("profile", forward=step)), num_steps, trace
        )
        self.measurement.num_profiled_steps = num_steps
        self.measurement.num_profiled_fallbacks = sum(
            bool(one.fallbacks) for one in profiled[-num_steps:]
        )

    def measure_costs(self) -> None:
        """Time the graphs of each chunk and the optimizer, outside of steps.

        Parameters, gradients and random state change. With a stash no graphs are timed: only a
        whole step returns its pages.
        """
        self.measurement.optimizer_ms = statistics.median(
            self._model.run_optimizer() for _ in range(NUM_OPTIMIZER_STEPS)
        )
        graphs = self._model.graphs
        if graphs is not None and not self.config.stash.enabled:
            self.measurement.chunk_costs = chunk_costs(graphs.engine, self.device)

    def close(self) -> None:
        """Free the graphs, before process groups are destroyed."""
        self._variant.close()
        self._model.close()

    def run_step(
        self,
        kind: str,
        *,
        announces_next: bool = False,
        forward: Callable[..., Any] = forward_step,
    ) -> Step:
        """Run the next step with a forward step function, and report it to ``on_step``."""
        model, index = self._model, self._step
        self._step = self.measurement.num_steps_run = index + 1
        self._variant.before_step(index)
        count = model.count(index)
        packings = model.batches.packings(index, count)
        buckets = model.batches.buckets(index, count)
        batches = list(model.batches.step(index, count))
        record = model.run_step(
            index,
            [iter(batches) for _ in model.chunks],
            announces_next=announces_next,
            forward_step=forward,
            timed=timed_together(self.device),
        )
        self._variant.after_step()
        step = Step(**vars(record), work=work_of(self.config, count, packings, buckets))
        self.on_step(kind, step)
        return step


@contextmanager
def timed_together(device: torch.device) -> Iterator[None]:
    """Start the time of a step on all ranks together, and mark it in the profiler's trace."""
    _barrier(device)
    with torch.profiler.record_function(f"{PREFIX}step"):
        yield


def _barrier(device: torch.device) -> None:
    if dist.get_world_size() > 1:
        dist.barrier()
        synchronize(device)


def add_parameters(digest: Any, module: nn.Module) -> None:
    """Add a module's parameters to a hash."""
    for parameter in module.parameters():
        value = parameter.detach().to("cpu").contiguous().view(-1)
        digest.update(value.view(torch.uint8).numpy().tobytes())
