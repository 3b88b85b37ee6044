"""A forward-backward function of Megatron's signature that walks a schedule's actions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.p2p import (
    Direction,
    ReceiveBuffers,
    default_groups,
    is_plain_communicator,
)
from chunkgraph.megatron.core.pipeline_steps import MegatronSteps, megatron_forward_backward
from chunkgraph.megatron.pipeline.exchange import Exchange, Received
from chunkgraph.megatron.pipeline.gradient_sync import (
    GradientSync,
    LastGradients,
    last_gradients,
)
from chunkgraph.megatron.pipeline.transfer_groups import TransferGroups
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

    def __call__(
        self, *, receive_buffers: ReceiveBuffers | None = None, **keywords: Any
    ) -> list[Any]:
        """Run one step; see ``megatron.core.pipeline_parallel.get_forward_backward_func``.

        Args:
            receive_buffers: Memory that the step's receives go to; None: new memory.
            keywords: As Megatron's functions take them.
        """
        if keywords.get("forward_only", False):
            return megatron_forward_backward()(**keywords)
        groups = keywords.get("pg_collection") or self._default_groups()
        steps = MegatronSteps.of(keywords, groups)
        if keywords.get("adjust_tensor_shapes_fn") is not None:
            raise ConfigError(
                "A pipeline schedule of chunkgraph cannot run with adjust_tensor_shapes_fn: all "
                "stages exchange tensors of one shape. Leave it out, or train with Megatron's own "
                "schedule."
            )
        communicator = keywords.get("p2p_communicator")
        if communicator is not None and not is_plain_communicator(communicator):
            raise ConfigError(
                "A pipeline schedule of chunkgraph exchanges tensors itself, but the "
                f"p2p_communicator of this step is a {type(communicator).__name__}. Leave it out, "
                "or train with Megatron's own schedule."
            )
        schedule = self.schedule(steps.num_microbatches)
        if schedule.num_chunks != len(steps.models):
            raise ConfigError(
                f"The schedule {schedule.name!r} has {schedule.num_chunks} model chunk(s) a rank, "
                f"but the model has {len(steps.models)}. Set the virtual pipeline size to match."
            )
        received = Received(
            steps.received_shape(keywords),
            steps.config.pipeline_dtype,
            next(steps.models[0].parameters()).device,
            receive_buffers,
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
        run: The method of `_Step` that runs it.
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
        methods = {
            Op.F: _Step.forward,
            Op.B: _Step.backward,
            Op.I: _Step.backward,
            Op.W: _Step.weights,
            Op.SEND_F: _Step.send_forward,
            Op.RECV_F: _Step.receive_forward,
            Op.SEND_B: _Step.send_backward,
            Op.RECV_B: _Step.receive_backward,
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
    """One training step on one rank."""

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
        self._forwards = Exchange(Direction.FORWARD, forward, received, steps.free_output)
        self._backwards = Exchange(Direction.BACKWARD, backward, received)
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
            self._forwards.end()
            self._backwards.end()
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

    def send_forward(self, stop: _Stop) -> None:
        """Post the send of an output."""
        self._forwards.send(stop.stage, stop.microbatch)

    def receive_forward(self, stop: _Stop) -> None:
        """Post the receive of an input."""
        self._forwards.receive(stop.stage, stop.microbatch)

    def send_backward(self, stop: _Stop) -> None:
        """Post the send of an input's gradient."""
        self._backwards.send(stop.stage, stop.microbatch)

    def receive_backward(self, stop: _Stop) -> None:
        """Post the receive of an output's gradient."""
        self._backwards.receive(stop.stage, stop.microbatch)

    def forward(self, stop: _Stop) -> None:
        """Run the forward of a microbatch."""
        _, chunk, stage, microbatch, _, num_ended = stop
        is_last = stage == self._walk.last_stage
        received = None
        if stage:
            received = self._forwards.take(stage, microbatch)
            self._backwards.end(num_ended)
        output, num_tokens = self._megatron.forward(chunk, microbatch, received, is_last=is_last)
        self._num_tokens += num_tokens
        self._in_flight[stage, microbatch] = (received, output)
        if is_last:
            self._megatron.free_output(output)
        else:
            self._forwards.keep(stage, microbatch, output)

    def backward(self, stop: _Stop) -> None:
        """Run the backward of a microbatch, or its input gradients."""
        _, _, stage, microbatch, _, num_ended = stop
        received, output = self._in_flight.pop((stage, microbatch))
        output_grad = None
        if stage < self._walk.last_stage:
            output_grad = self._backwards.take(stage, microbatch)
            self._forwards.end(num_ended)
        input_grad = self._megatron.backward(received, output, output_grad)
        if stage:
            assert input_grad is not None
            self._backwards.keep(stage, microbatch, input_grad)

    def weights(self, stop: _Stop) -> None:
        """Add the weight gradients that the oldest backward of a chunk has left out."""
        if self._run_weights is not None:
            self._run_weights(stop.chunk)
