"""Run a plain transformer under one schedule class of torch on this rank, and measure it."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from chunkgraph.bench.choice import run_as, torch_class, torch_schedule
from chunkgraph.bench.measure import (
    NUM_OPTIMIZER_STEPS,
    MeasuredRun,
    Step,
    add_parameters,
    timed_together,
)
from chunkgraph.bench.packed_work import work_of
from chunkgraph.bench.stage_costs import stage_costs
from chunkgraph.bench.torch_layers import make_layer
from chunkgraph.bench.variants import Captures
from chunkgraph.engine.split.delayed import DelayedModules
from chunkgraph.pipelining import GraphedSchedule, GraphedStage
from chunkgraph.schedules import stage_of
from chunkgraph.settings import Config
from chunkgraph.trainer.trained_model import capture_options, synchronize

__all__ = ["TorchRun"]


class TorchRun(MeasuredRun):
    """Run and measure the steps of a transformer under a schedule class, with or without graphs.

    The layers of the whole model, and so the results, are the same for all schedules.

    Args:
        config: The run's configuration; the process group must be initialized.
        device: This rank's device.
        name: The variant to run.
        on_step: See `MeasuredRun`.

    Attributes:
        make: Function that creates the schedule for a number of microbatches.
        graphed: The schedule on graphs; None without graphs.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        name: str,
        on_step: Callable[[str, Step], None] = lambda *_: None,
    ) -> None:
        super().__init__(config, device, on_step)
        if config.train.deterministic:  # torch's attention heeds no mode that only warns
            torch.use_deterministic_algorithms(True)
        rank, size = dist.get_rank(), dist.get_world_size()
        schedule = torch_schedule(name)
        has_graphs = run_as(name) == "chunk"
        self._splits = schedule.splits_backward
        num_chunks = schedule.num_chunks or 2
        self._indices = [stage_of(rank, c, size, schedule.placement) for c in range(num_chunks)]
        num_stages = size * num_chunks
        delays = self._splits
        self._stages = [self._layers(i, num_stages, delays_weights=delays) for i in self._indices]
        stages: Any = [
            GraphedStage(module, index, num_stages, device)
            if has_graphs
            else pipelining.PipelineStage(
                module, index, num_stages, device, dw_builder=_weight_gradients(module)
            )
            for module, index in zip(self._stages, self._indices, strict=True)
        ]
        cls = getattr(pipelining, torch_class(schedule.name))
        local = stages[0] if issubclass(cls, PipelineScheduleSingle) else stages
        self.make: Callable[[int], Any] = lambda count: cls(local, count, loss_fn=_loss)
        counts = config.train.num_microbatches
        self.graphed: GraphedSchedule | None = None
        if has_graphs:
            distinct = tuple(dict.fromkeys(counts))
            self.graphed = GraphedSchedule(
                stages, self.make, distinct, options=capture_options(config)
            )
        self._eager: tuple[int, Any] | None = None
        parameters = [p for module in self._stages for p in module.parameters()]
        self._optimizer = torch.optim.SGD(parameters, lr=config.train.lr)
        self._is_first, self._is_last = 0 in self._indices, num_stages - 1 in self._indices
        self._captures = Captures()
        self._counts = itertools.cycle(counts)
        self._generator = torch.Generator(device).manual_seed(config.train.seed)
        # Every step has the same memory for its batch; eager activations would give it theirs.
        self._batch = self._tensor(2, max(counts) * config.train.micro_batch_size)
        self.begin_memory()

    @property
    def captures(self) -> Captures:
        """Return the measurements of the captures so far."""
        return self._captures

    def run_step(self, kind: str, *, announces_next: bool = False) -> Step:
        """Run the next step, and report it to ``on_step``."""
        del announces_next
        index = self.measurement.num_steps_run
        self.measurement.num_steps_run += 1
        count = next(self._counts)
        rows = count * self.config.train.micro_batch_size
        x, target = self._batch.normal_(generator=self._generator)[:, :rows].unbind()
        losses: list[torch.Tensor] = []
        arguments = [x] if self._is_first else []
        keywords = {"target": target, "losses": losses} if self._is_last else {}
        step = self._step_function(count)
        before = self._num_captures
        synchronize(self.device)
        with timed_together(self.device):
            started = time.perf_counter()
            self._optimizer.zero_grad()
            step(*arguments, return_outputs=False, **keywords)
            self._optimizer.step()
            synchronize(self.device)
            step_ms = (time.perf_counter() - started) * 1e3
        if self.graphed is not None:
            self._captures.update(self.graphed.graphs)
        loss, grad_norm = self._shared_results(losses)
        result = Step(
            step=index,
            num_microbatches=count,
            loss=loss,
            grad_norm=grad_norm,
            step_ms=step_ms,
            captures=self._num_captures - before,
            work=work_of(self.config, count, None, None),
        )
        self.on_step(kind, result)
        return result

    def parameters_sha256(self) -> str:
        """Return a hash of the whole model's parameters, the same for all schedules."""
        digest = hashlib.sha256()
        for _, value in sorted(self._gathered(self._layer_digests()).items()):
            digest.update(value)
        return digest.hexdigest()

    def measure_costs(self) -> None:
        """Time the optimizer, and the graphs of a stage that has all layers of a rank."""
        self.measurement.optimizer_ms = statistics.median(
            self._optimizer_ms() for _ in range(NUM_OPTIMIZER_STEPS)
        )
        if self.graphed is None:
            return
        size = dist.get_world_size()
        module = self._layers(dist.get_rank(), size, delays_weights=self._splits)
        x = self._tensor(self.config.train.micro_batch_size).normal_(generator=self._generator)
        costs, gemms = stage_costs(module, x, is_split=self._splits)
        self.measurement.chunk_costs, self.measurement.num_gemms = [costs], gemms

    def close(self) -> None:
        """Free the graphs, before process groups are destroyed."""
        if self.graphed is not None:
            self.graphed.graphs.release()

    def _layers(self, stage: int, num_stages: int, *, delays_weights: bool) -> nn.Sequential:
        """Make the layers of a stage; those of the whole model depend on their number alone."""
        model = self.config.model
        per_stage = model.num_layers // num_stages
        layers = []
        default = torch.get_default_dtype()
        # A later cast would leave holes between the parameters, which a graph's pool cannot use.
        torch.set_default_dtype(self._dtype)
        try:
            for number in range(stage * per_stage, (stage + 1) * per_stage):
                torch.manual_seed(self.config.train.seed + number)
                with self.device:
                    layers.append(make_layer(model, delays_weights=delays_weights))
        finally:
            torch.set_default_dtype(default)
        return nn.Sequential(*layers)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.config.model.params_dtype)
        return dtype

    def _tensor(self, *sizes: int) -> torch.Tensor:
        model = self.config.model
        shape = (*sizes, model.seq_length, model.hidden_size)
        return torch.empty(shape, device=self.device, dtype=self._dtype)

    @property
    def _num_captures(self) -> int:
        return 0 if self.graphed is None else self.graphed.graphs.counters.captures

    def _step_function(self, count: int) -> Callable[..., Any]:
        """Return the step of a number of microbatches; eagerly, torch needs another schedule."""
        if self.graphed is not None:
            graphed = self.graphed
            return lambda *args, **kwargs: graphed.step(*args, num_microbatches=count, **kwargs)
        if self._eager is None or self._eager[0] != count:
            self._eager = count, self.make(count)
        step: Callable[..., Any] = self._eager[1].step
        return step

    def _shared_results(self, losses: list[torch.Tensor]) -> tuple[float, float]:
        """Return the mean loss and the gradient norm, the same on all ranks."""
        values = self._gathered({"losses": [loss.item() for loss in losses]} if losses else {})
        norms = self._gathered(
            {
                number: [
                    torch.linalg.vector_norm(p.grad, dtype=torch.float32).item()
                    for p in layer.parameters()
                ]
                for number, layer in self._numbered_layers()
            }
        )
        squares = [norm**2 for _, of_layer in sorted(norms.items()) for norm in of_layer]
        return statistics.fmean(values["losses"]), math.sqrt(math.fsum(squares))

    def _numbered_layers(self) -> list[tuple[int, Any]]:
        """Return this rank's layers with their numbers in the whole model."""
        return [
            (index * len(module) + number, layer)
            for index, module in zip(self._indices, self._stages, strict=True)
            for number, layer in enumerate(module)
        ]

    def _layer_digests(self) -> dict[int, bytes]:
        digests = {}
        for number, layer in self._numbered_layers():
            digest = hashlib.sha256()
            add_parameters(digest, layer)
            digests[number] = digest.digest()
        return digests

    @staticmethod
    def _gathered(values: dict[Any, Any]) -> dict[Any, Any]:
        """Return the values of all ranks."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, values)
        return {key: value for one in every for key, value in one.items()}

    def _optimizer_ms(self) -> float:
        synchronize(self.device)
        started = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=False)
        self._optimizer.step()
        synchronize(self.device)
        return (time.perf_counter() - started) * 1e3


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def _weight_gradients(stage: nn.Module) -> Callable[[], Callable[[], None]] | None:
    """Return torch's ``dw_builder`` for modules that delay weight gradients; None for others."""
    delayed = DelayedModules(stage, "stage")
    return (lambda: lambda: delayed.run(())) if delayed.modules else None
