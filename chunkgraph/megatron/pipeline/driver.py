"""A forward-backward function of Megatron's signature that walks a schedule's actions."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.core.p2p import (
    Direction,
    TakeBuffer,
    default_groups,
    is_plain_communicator,
)
from chunkgraph.megatron.pipeline.transfers import Exchange, TransferGroups
from chunkgraph.schedules import Action, Op, Schedule, num_ended_sends, with_transfers


class ScheduleDriver:
    """Runs training steps of Megatron by a schedule; call it like Megatron's own functions.

    Forwards, backwards, losses and the reduction of gradients are Megatron's. Evaluation runs
    Megatron's own function.

    Args:
        build: Returns the schedule for a number of microbatches, the same on all ranks.
        rank: Rank of this process in the pipeline.
        run_weights: Adds the weight gradients that the oldest backward of a chunk has left out,
            given the chunk and whether it is the last one.

    Raises:
        ConfigError: (when called) the model or the call needs a feature that only Megatron's own
            functions have.
    """

    def __init__(
        self,
        build: Callable[[int], Schedule],
        rank: int,
        run_weights: Callable[[int, bool], None],
    ) -> None:
        self._run_weights = run_weights
        self.schedule = functools.cache(lambda count: with_transfers(build(count)))
        self._stops = functools.cache(lambda count: _stops_of(self.schedule(count), rank))
        self._default_groups = functools.cache(default_groups)
        self._groups: TransferGroups | None = None
        self._is_in_step = False

    def __call__(self, *, take_buffer: TakeBuffer | None = None, **keywords: Any) -> list[Any]:
        """Run one step; see ``megatron.core.pipeline_parallel.get_forward_backward_func``.

        Args:
            take_buffer: Returns the memory of the step's next receive; None: new memory.
            keywords: As Megatron's functions take them.
        """
        if keywords.get("forward_only", False):
            schedules = import_megatron("megatron.core.pipeline_parallel")
            losses: list[Any] = schedules.get_forward_backward_func()(**keywords)
            return losses
        for name in ("adjust_tensor_shapes_fn", "p2p_communicator"):
            value = keywords.get(name)
            if value is not None and not is_plain_communicator(value):
                raise ConfigError(
                    "A pipeline schedule of chunkgraph exchanges tensors of one shape itself, but "
                    f"this step has {name}={value!r}. Leave it out, or train with Megatron's own "
                    "schedule."
                )
        groups = keywords.get("pg_collection") or self._default_groups()
        count = keywords["num_microbatches"]
        step = _Step(keywords, groups, self._stops(count), take_buffer, self._run_weights)
        if self._groups is None and self.schedule(count).num_ranks > 1:
            self._groups = TransferGroups(groups.pp, step.message_bytes)
        self._is_in_step = True
        losses = step.run(self._groups)
        self._is_in_step = False
        return losses

    def close(self) -> None:
        """Destroy the process groups of the transfers.

        They stay after a step that failed: NCCL would wait for transfers that another rank may
        never post.
        """
        if self._groups is not None and not self._is_in_step:
            self._groups.close()
        self._groups = None
        self._default_groups.cache_clear()


class _Stop(NamedTuple):
    """One action of a rank, with its details that are known before the step.

    Attributes:
        op: Its operation.
        chunk: Index of the stage among the rank's chunks.
        stage: Its stage.
        microbatch: Its microbatch.
        is_last: Whether its stage is the last one.
        adds_last: Whether it adds the last gradients of its chunk. An eager backward adds most of
            them in I already, so the last I and the last W both do; they may belong to different
            microbatches.
        num_ended: Number of sends, in the other direction, that have ended once the tensor that
            the action uses is received; see `num_ended_sends`.
    """

    op: Op
    chunk: int
    stage: int
    microbatch: int
    is_last: bool
    adds_last: bool
    num_ended: int

    @property
    def key(self) -> tuple[int, int]:
        """Return the stage and the microbatch."""
        return self.stage, self.microbatch


def _stops_of(schedule: Schedule, rank: int) -> tuple[_Stop, ...]:
    """Return the actions of a rank in a schedule with transfers."""
    actions = [half for action in schedule.actions[rank] for half in _halves(schedule, action)]
    last = {(a.op, a.stage): index for index, a in enumerate(actions)}
    num_ended = num_ended_sends(schedule, rank)
    return tuple(
        _Stop(
            a.op,
            schedule.chunk_of(a.stage),
            a.stage,
            a.microbatch,
            a.stage == schedule.num_stages - 1,
            a.op in (Op.B, Op.I, Op.W) and last[a.op, a.stage] == index,
            num_ended.get((a.op is Op.F, a.stage, a.microbatch), 0),
        )
        for index, a in enumerate(actions)
    )


def _halves(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """Return the halves of a B if backwards of the schedule are split; else the action itself."""
    if action.op is not Op.B or not schedule.splits_backward:
        return (action,)
    return replace(action, op=Op.I), replace(action, op=Op.W)


class _Step:
    """One training step on one rank.

    Args:
        keywords: Keywords of a forward-backward function.
        groups: Megatron's process groups.
        stops: The rank's actions.
        take_buffer: See `ScheduleDriver`, like ``run_weights``.
    """

    def __init__(
        self,
        keywords: dict[str, Any],
        groups: Any,
        stops: Sequence[_Stop],
        take_buffer: TakeBuffer | None,
        run_weights: Callable[[int, bool], None],
    ) -> None:
        self._schedules: Any = import_megatron("megatron.core.pipeline_parallel.schedules")
        self._models, data = _as_list(keywords["model"]), _as_list(keywords["data_iterator"])
        self._data = data if len(data) == len(self._models) else data * len(self._models)
        self._config = config = self._schedules.get_model_config(self._models[0])
        self._keywords = keywords
        self._groups = groups
        self._stops = stops
        self._take_buffer = take_buffer
        self._run_weights = run_weights
        (self._shape,) = self._schedules.get_tensor_shapes(
            seq_length=keywords["seq_length"],
            micro_batch_size=keywords["micro_batch_size"],
            decoder_seq_length=keywords.get("decoder_seq_length"),
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        self._device = next(self._models[0].parameters()).device
        takes_type = "model_type" in inspect.signature(self._schedules.backward_step).parameters
        self._model_type = [self._schedules.get_model_type(self._models[0])] if takes_type else []
        self._sync = GradientSync(config, self._models)
        self._in_flight: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._num_tokens = torch.zeros([], dtype=torch.int, device=self._device)
        self._losses: list[Any] = []

    @property
    def message_bytes(self) -> int:
        """Return the size of a tensor that stages exchange."""
        return math.prod(self._shape) * int(self._config.pipeline_dtype.itemsize)

    def run(self, transfers: TransferGroups | None) -> list[Any]:
        """Walk the rank's actions; return what the last stage reports of its losses.

        Args:
            transfers: Groups of the transfers; None with one rank.
        """
        config, models = self._config, list(self._models)
        is_last = any(stop.is_last for stop in self._stops)
        finalize = config.finalize_model_grads_func
        if finalize is not None:
            embedding = self._schedules.clear_embedding_activation_buffer(config, models, is_last)
        if config.timers is not None:
            barrier = config.barrier_with_L1_time
            config.timers("forward-backward", log_level=1).start(barrier=barrier)
        self._start_parameter_gathers()
        self._take_stops(transfers)
        if finalize is not None:
            self._schedules.finish_embedding_wgrad_compute(
                config, embedding, is_last, self._groups.tp
            )
            finalize(
                models,
                self._num_tokens if config.calculate_per_token_loss else None,
                pg_collection=self._groups,
                force_all_reduce=bool(self._keywords.get("force_all_reduce", False)),
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return self._losses

    def _start_parameter_gathers(self) -> None:
        functions = self._config.param_sync_func
        if functions is None or len(self._models) == 1:
            return
        for function, model in zip(_for_each(self._models, functions), self._models, strict=True):
            function(model.parameters())

    def _take_stops(self, transfers: TransferGroups | None) -> None:
        forwards, backwards = (
            Exchange(None if transfers is None else transfers.routes[direction])
            for direction in Direction
        )
        self._forwards, self._backwards = forwards, backwards
        methods: dict[Op, Callable[[_Stop], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: lambda stop: self._run_weights(stop.chunk, stop.adds_last),
            Op.SEND_F: lambda stop: forwards.send(stop.key),
            Op.RECV_F: lambda stop: forwards.receive(stop.key, self._buffer(Direction.FORWARD)),
            Op.SEND_B: lambda stop: backwards.send(stop.key),
            Op.RECV_B: lambda stop: backwards.receive(stop.key, self._buffer(Direction.BACKWARD)),
        }
        with self._sync.step():
            for stop in self._stops:
                if stop.adds_last:
                    with self._sync.around(stop.chunk, are_final=stop.op is not Op.I):
                        methods[stop.op](stop)
                else:
                    methods[stop.op](stop)
            self._end_forward_sends()
            backwards.end()

    def _buffer(self, direction: Direction) -> torch.Tensor:
        """Return the memory of the next receive of a direction, which requires grad."""
        shape, dtype = tuple(self._shape), self._config.pipeline_dtype
        buffer = None if self._take_buffer is None else self._take_buffer(direction, shape, dtype)
        if buffer is not None:
            return buffer
        return torch.empty(shape, dtype=dtype, device=self._device, requires_grad=True)

    def _end_forward_sends(self, num_sends: float = math.inf) -> None:
        """Wait until outputs are sent, and free them where Megatron is configured to."""
        for output in self._forwards.end(num_sends):
            self._free(output)

    def _free(self, output: torch.Tensor) -> None:
        self._schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _forward(self, stop: _Stop) -> None:
        """Run the forward of a microbatch."""
        received = None
        if stop.stage:
            received = self._forwards.take(stop.key)
            self._backwards.end(stop.num_ended)
        output, num_tokens = self._schedules.forward_step(
            self._keywords["forward_step_func"],
            self._data[stop.chunk],
            self._models[stop.chunk],
            self._keywords["num_microbatches"],
            received,
            self._losses,
            self._config,
            cp_group_size=self._groups.cp.size(),
            collect_non_loss_data=self._keywords.get("collect_non_loss_data", False),
            is_first_microbatch=stop.microbatch == 0,
            current_microbatch=stop.microbatch,
            vp_stage=stop.chunk if len(self._models) > 1 else None,
            is_last_stage=stop.is_last,
        )
        self._num_tokens += num_tokens
        self._in_flight[stop.key] = (received, output)
        if stop.is_last:
            self._free(output)
        else:
            self._forwards.keep(stop.key, output)

    def _backward(self, stop: _Stop) -> None:
        """Run the backward of a microbatch, or its input gradients."""
        received, output = self._in_flight.pop(stop.key)
        output_grad = None
        if not stop.is_last:
            output_grad = self._backwards.take(stop.key)
            self._end_forward_sends(stop.num_ended)
        input_grad = self._schedules.backward_step(
            received, output, output_grad, *self._model_type, self._config
        )
        if stop.stage:
            self._backwards.keep(stop.key, input_grad)


class GradientSync:
    """Gradient reductions of one rank in one step, held back until a chunk's last gradients.

    Args:
        config: Megatron's ModelParallelConfig, with its ``no_sync_func`` and ``grad_sync_func``.
        models: Model chunks of the rank.
    """

    def __init__(self, config: Any, models: Sequence[nn.Module]) -> None:
        self._no_sync = [] if config.no_sync_func is None else _as_list(config.no_sync_func)
        self._starts = _for_each(models, config.grad_sync_func)
        self._models = models
        self._held = ExitStack()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold reductions back inside, except those that `around` runs."""
        self._hold()
        try:
            yield
        finally:
            self._held.close()

    @contextmanager
    def around(self, chunk: int, *, are_final: bool) -> Iterator[None]:
        """Reduce the gradients of a chunk; the action inside adds the last ones.

        Args:
            chunk: Index of the chunk.
            are_final: Whether none come later, whether or not the backward is split.
        """
        start = self._starts[chunk]
        if start is None:
            self._held.close()
            yield
            self._hold()
            return
        yield
        if are_final:
            self._held.close()
            start(self._models[chunk].parameters())
            self._hold()

    def _hold(self) -> None:
        for function in self._no_sync:
            self._held.enter_context(function())


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _for_each(models: Sequence[nn.Module], value: Any) -> list[Any]:
    """Return a value for each model: those of a list, or the one value."""
    return list(value) if isinstance(value, (list, tuple)) else [value] * len(models)
