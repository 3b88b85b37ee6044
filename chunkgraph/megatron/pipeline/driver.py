"""A forward-backward function of Megatron's signature that walks a schedule's actions."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from chunkgraph.megatron.pipeline.transfers import Exchange, Received, TransferGroups
from chunkgraph.schedules import Action, Op, Schedule, num_ended_sends, with_transfers

__all__ = ["ScheduleDriver"]


class ScheduleDriver:
    """Runs training steps of Megatron by a schedule; call it like Megatron's own functions.

    Forwards, backwards, losses and the reduction of gradients are Megatron's. Evaluation runs
    Megatron's own function.

    Args:
        build: Returns the schedule for a number of microbatches, the same on all ranks.
        rank: Rank of this process in the pipeline.
        run_weights: Adds the weight gradients that the oldest backward of a chunk has left out; the
            argument is the chunk. None: backwards compute all gradients, and W does nothing.

    Raises:
        ConfigError: (when called) the model or the call needs a feature that only Megatron's own
            functions have.
    """

    def __init__(
        self,
        build: Callable[[int], Schedule],
        rank: int,
        run_weights: Callable[[int], None] | None = None,
    ) -> None:
        self.rank = rank
        self.run_weights = run_weights
        self.schedule = functools.cache(lambda count: with_transfers(build(count)))
        self._walk = functools.cache(lambda count: _Walk.of(self.schedule(count), rank))
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
        groups = keywords.get("pg_collection") or self._default_groups()
        steps = MegatronSteps(keywords, groups)
        for name in ("adjust_tensor_shapes_fn", "p2p_communicator"):
            value = keywords.get(name)
            if value is not None and not is_plain_communicator(value):
                raise ConfigError(
                    "A pipeline schedule of chunkgraph exchanges tensors of one shape itself, but "
                    f"this step has {name}={value!r}. Leave it out, or train with Megatron's own "
                    "schedule."
                )
        schedule = self.schedule(steps.num_microbatches)
        received = Received(
            steps.received_shape(keywords),
            steps.config.pipeline_dtype,
            next(steps.models[0].parameters()).device,
            take_buffer,
        )
        if self._groups is None and schedule.num_ranks > 1:
            self._groups = TransferGroups(steps.groups.pp, received.message_bytes)
        self._is_in_step = True
        force_all_reduce = bool(keywords.get("force_all_reduce", False))
        walk = self._walk(steps.num_microbatches)
        step = _Step(steps, walk, self._groups, received, self.run_weights)
        losses = step.run(force_all_reduce=force_all_reduce)
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
        run: Runs it, as a method of `_Step`.
        chunk: Index of the stage among the rank's chunks.
        stage: Its stage.
        microbatch: Its microbatch.
        last: The chunk's last gradients, if it adds them.
        num_ended: Number of sends, in the other direction, that have ended once the tensor that
            the action uses is received; see `num_ended_sends`.
    """

    run: Callable[[_Step, _Stop], None]
    chunk: int
    stage: int
    microbatch: int
    last: LastGradients | None
    num_ended: int


@dataclass(frozen=True)
class _Walk:
    """The actions of one rank in a step of some number of microbatches."""

    stops: tuple[_Stop, ...]
    last_stage: int
    is_last_rank: bool

    @staticmethod
    def of(schedule: Schedule, rank: int) -> _Walk:
        """Return the walk of a rank along a schedule with transfers."""
        methods: dict[Op, Callable[[_Step, _Stop], None]] = {
            Op.F: _Step.forward,
            Op.B: _Step.backward,
            Op.I: _Step.backward,
            Op.W: _Step.weights,
            Op.SEND_F: lambda step, stop: step.forwards.send(stop.stage, stop.microbatch),
            Op.RECV_F: lambda step, stop: step.forwards.receive(stop.stage, stop.microbatch),
            Op.SEND_B: lambda step, stop: step.backwards.send(stop.stage, stop.microbatch),
            Op.RECV_B: lambda step, stop: step.backwards.receive(stop.stage, stop.microbatch),
        }
        actions = [half for action in schedule.actions[rank] for half in _halves(schedule, action)]
        last = last_gradients(actions, schedule.chunk_of)
        num_ended = num_ended_sends(schedule, rank)
        last_stage = schedule.num_stages - 1
        stops = tuple(
            _Stop(
                methods[action.op],
                schedule.chunk_of(action.stage),
                action.stage,
                action.microbatch,
                last.get(index),
                num_ended.get((action.op is Op.F, action.stage, action.microbatch), 0),
            )
            for index, action in enumerate(actions)
        )
        return _Walk(stops, last_stage, schedule.rank_of(last_stage) == rank)


def _halves(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """Return the halves of a B if backwards of the schedule are split; else the action itself."""
    if action.op is not Op.B or not schedule.splits_backward:
        return (action,)
    return replace(action, op=Op.I), replace(action, op=Op.W)


class _Step:
    """One training step on one rank.

    Attributes:
        forwards: The transfers of outputs.
        backwards: The transfers of input gradients.
    """

    def __init__(
        self,
        steps: MegatronSteps,
        walk: _Walk,
        groups: TransferGroups | None,
        received: Received,
        run_weights: Callable[[int], None] | None,
    ) -> None:
        self._megatron = steps
        self._walk = walk
        self._run_weights = run_weights
        forward, backward = (
            None if groups is None else groups.route(direction) for direction in Direction
        )
        self.forwards = Exchange(Direction.FORWARD, forward, received, steps.free_output)
        self.backwards = Exchange(Direction.BACKWARD, backward, received)
        self._sync = GradientSync(steps.config, steps.models)
        self._in_flight: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._num_tokens = torch.zeros([], dtype=torch.int, device=received.device)

    def run(self, *, force_all_reduce: bool) -> list[Any]:
        """Walk the rank's actions; return what the last stage reports of its losses."""
        steps, config, is_last = self._megatron, self._megatron.config, self._walk.is_last_rank
        embedding = steps.begin(is_last_rank=is_last)
        if config.timers is not None:
            barrier = config.barrier_with_L1_time
            config.timers("forward-backward", log_level=1).start(barrier=barrier)
        self._start_parameter_gathers()
        with self._sync.step():
            for stop in self._walk.stops:
                if stop.last is None:
                    stop.run(self, stop)
                else:
                    with self._sync.around(stop.last):
                        stop.run(self, stop)
            self.forwards.end()
            self.backwards.end()
        steps.finish(
            embedding, self._num_tokens, is_last_rank=is_last, force_all_reduce=force_all_reduce
        )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return steps.losses

    def _start_parameter_gathers(self) -> None:
        functions = self._megatron.config.param_sync_func
        if functions is None or len(self._megatron.models) == 1:
            return
        if not isinstance(functions, (list, tuple)):
            functions = [functions] * len(self._megatron.models)
        for function, model in zip(functions, self._megatron.models, strict=True):
            function(model.parameters())

    def forward(self, stop: _Stop) -> None:
        """Run the forward of a microbatch."""
        _, chunk, stage, microbatch, _, num_ended = stop
        is_last = stage == self._walk.last_stage
        received = None
        if stage:
            received = self.forwards.take(stage, microbatch)
            self.backwards.end(num_ended)
        output, num_tokens = self._megatron.forward(chunk, microbatch, received, is_last=is_last)
        self._num_tokens += num_tokens
        self._in_flight[stage, microbatch] = (received, output)
        if is_last:
            self._megatron.free_output(output)
        else:
            self.forwards.keep(stage, microbatch, output)

    def backward(self, stop: _Stop) -> None:
        """Run the backward of a microbatch, or its input gradients."""
        _, _, stage, microbatch, _, num_ended = stop
        received, output = self._in_flight.pop((stage, microbatch))
        output_grad = None
        if stage < self._walk.last_stage:
            output_grad = self.backwards.take(stage, microbatch)
            self.forwards.end(num_ended)
        input_grad = self._megatron.backward(received, output, output_grad)
        if stage:
            assert input_grad is not None
            self.backwards.keep(stage, microbatch, input_grad)

    def weights(self, stop: _Stop) -> None:
        """Add the weight gradients that the oldest backward of a chunk has left out."""
        if self._run_weights is not None:
            self._run_weights(stop.chunk)


class LastGradients(NamedTuple):
    """The last gradients of a chunk in a step.

    Attributes:
        chunk: Index of the chunk.
        are_final: Whether none come later, whether or not the backward is split.
    """

    chunk: int
    are_final: bool


def last_gradients(
    actions: Sequence[Action], chunk_of: Callable[[int], int]
) -> dict[int, LastGradients]:
    """Return which of a rank's actions add the last gradients of its chunks, by their index.

    An eager backward adds most gradients in I already, so the last I and the last W both count;
    they may belong to different microbatches.

    Args:
        actions: The actions; B only where no backward is split.
        chunk_of: Returns the index of a stage among the rank's chunks.
    """
    last = {(action.op, chunk_of(action.stage)): i for i, action in enumerate(actions)}
    return {
        index: LastGradients(chunk, op is not Op.I)
        for (op, chunk), index in last.items()
        if op in (Op.B, Op.I, Op.W)
    }


class GradientSync:
    """Gradient reductions of one rank in one step, held back until a chunk's last gradients.

    Args:
        config: Megatron's ModelParallelConfig, with its ``no_sync_func`` and ``grad_sync_func``.
        models: Model chunks of the rank.
    """

    def __init__(self, config: Any, models: Sequence[nn.Module]) -> None:
        functions = config.no_sync_func
        if functions is None:
            functions = ()
        self._no_sync = functions if isinstance(functions, (list, tuple)) else (functions,)
        starts = config.grad_sync_func
        is_list = isinstance(starts, (list, tuple))
        self._starts = list(starts) if is_list else [starts] * len(models)
        self._models = models
        self._held: contextlib.ExitStack | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Hold reductions back inside, except those that `around` runs."""
        self._hold()
        try:
            yield
        finally:
            self._let_go()

    @contextlib.contextmanager
    def around(self, last: LastGradients) -> Iterator[None]:
        """Reduce the gradients of a chunk; the action inside adds the last ones."""
        start = self._starts[last.chunk]
        if start is None:
            self._let_go()
            yield
            self._hold()
            return
        yield
        if last.are_final:
            self._let_go()
            start(self._models[last.chunk].parameters())
            self._hold()

    def _hold(self) -> None:
        self._held = contextlib.ExitStack()
        for function in self._no_sync:
            self._held.enter_context(function())

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


class MegatronSteps:
    """Megatron's functions and arguments for one training step of a schedule.

    Args:
        keywords: Keywords of a forward-backward function.
        groups: Megatron's process groups.

    Attributes:
        models: Model chunks of this rank, wrappers included.
        config: Megatron's ModelParallelConfig.
        groups: Megatron's process groups.
        num_microbatches: Microbatches in the step.
        losses: What the last stage's loss function reports, by microbatch.
    """

    def __init__(self, keywords: dict[str, Any], groups: Any) -> None:
        self.models, data = _as_list(keywords["model"]), _as_list(keywords["data_iterator"])
        self._data = data if len(data) == len(self.models) else [*data] * len(self.models)
        self.schedules: Any = import_megatron("megatron.core.pipeline_parallel.schedules")
        self.config = self.schedules.get_model_config(self.models[0])
        self.groups = groups
        self._forward_step_func = keywords["forward_step_func"]
        self.num_microbatches = keywords["num_microbatches"]
        self._collect_non_loss_data = keywords.get("collect_non_loss_data", False)
        self.losses: list[Any] = []

    def forward(
        self, chunk: int, microbatch: int, received: torch.Tensor | None, *, is_last: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one forward; return the output, or the loss, and the number of tokens."""
        output, num_tokens = self.schedules.forward_step(
            self._forward_step_func,
            self._data[chunk],
            self.models[chunk],
            self.num_microbatches,
            received,
            self.losses,
            self.config,
            cp_group_size=self.groups.cp.size(),
            collect_non_loss_data=self._collect_non_loss_data,
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
        grad: torch.Tensor | None = self.schedules.backward_step(
            received, output, output_grad, *self.model_type, self.config
        )
        return grad

    @functools.cached_property
    def model_type(self) -> tuple[Any, ...]:
        """Return the argument that only older releases take."""
        parameters = inspect.signature(self.schedules.backward_step).parameters
        is_taken = "model_type" in parameters
        return (self.schedules.get_model_type(self.models[0]),) if is_taken else ()

    def free_output(self, output: torch.Tensor) -> None:
        """Free an output that was sent, where Megatron is configured to."""
        self.schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def received_shape(self, keywords: dict[str, Any]) -> tuple[int, ...]:
        """Return the shape of what stages exchange."""
        (shape,) = self.schedules.get_tensor_shapes(
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
        return self.schedules.clear_embedding_activation_buffer(
            self.config, list(self.models), is_last_rank
        )

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
        self.schedules.finish_embedding_wgrad_compute(
            config, embedding, is_last_rank, self.groups.tp
        )
        config.finalize_model_grads_func(
            list(self.models),
            num_tokens if config.calculate_per_token_loss else None,
            pg_collection=self.groups,
            force_all_reduce=force_all_reduce,
        )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
