"""A forward-backward function of Megatron's signature that walks a schedule's actions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.p2p import ReceiveBuffers, is_plain_communicator
from chunkgraph.megatron.core.pipeline_steps import MegatronSteps, megatron_forward_backward
from chunkgraph.megatron.pipeline.exchange import Exchange, Received
from chunkgraph.megatron.pipeline.gradient_sync import GradientSync
from chunkgraph.megatron.pipeline.transfer_groups import TransferGroups
from chunkgraph.schedules import Action, Op, Schedule, with_transfers

__all__ = ["ScheduleDriver"]


class ScheduleDriver:
    """Runs training steps of Megatron by a schedule; call it like Megatron's own functions.

    Forwards, backwards, losses and the reduction of gradients are Megatron's. Evaluation runs
    Megatron's own function.

    Args:
        build: Returns the schedule for a number of microbatches, the same on all ranks.
        rank: Of this process in the pipeline.
        run_weights: Adds the weight gradients that the oldest backward of a chunk has left out; the
            argument is the chunk. None: backwards compute all gradients, and W does nothing.

    Raises:
        ConfigError: (when called) the model or the call asks for what only Megatron's own
            functions do.
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
        self._groups: TransferGroups | None = None

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
        steps = MegatronSteps.of(keywords)
        if keywords.get("adjust_tensor_shapes_fn") is not None:
            raise ConfigError(
                "A pipeline schedule of chunkgraph cannot run with adjust_tensor_shapes_fn: all "
                "stages exchange tensors of one shape. Leave it out, or train with Megatron's own "
                "schedule."
            )
        communicator = keywords.get("p2p_communicator")
        if communicator is not None and not is_plain_communicator(communicator):
            raise ConfigError(
                "A pipeline schedule of chunkgraph exchanges tensors itself, and the "
                f"p2p_communicator of this step is a {type(communicator).__name__}. Leave it out, "
                "or train with Megatron's own schedule."
            )
        schedule = self.schedule(steps.num_microbatches)
        if schedule.num_chunks != len(steps.models):
            raise ConfigError(
                f"The schedule {schedule.name!r} has {schedule.num_chunks} model chunk(s) a rank, "
                f"and the model has {len(steps.models)}. Set the virtual pipeline size to match."
            )
        if self._groups is None and schedule.num_ranks > 1:
            self._groups = TransferGroups(steps.groups.pp)
        received = Received(
            steps.received_shape(keywords),
            steps.config.pipeline_dtype,
            next(steps.models[0].parameters()).device,
            receive_buffers,
        )
        exchange = Exchange(self._groups, received, steps.free_output)
        force_all_reduce = bool(keywords.get("force_all_reduce", False))
        return _Step(self, steps, schedule, exchange, received.device, force_all_reduce).run()

    def close(self) -> None:
        """Destroy the process groups of the transfers."""
        if self._groups is not None:
            self._groups.close()
            self._groups = None


class _Step:
    """One training step on one rank."""

    def __init__(
        self,
        driver: ScheduleDriver,
        steps: MegatronSteps,
        schedule: Schedule,
        exchange: Exchange,
        device: torch.device,
        force_all_reduce: bool,
    ) -> None:
        self._driver = driver
        self._megatron = steps
        self._schedule = schedule
        self._is_split = any(action.op is Op.W for _, action in schedule)
        self._force_all_reduce = force_all_reduce
        self._exchange = exchange
        self._sync = GradientSync(steps.config, steps.models, schedule, driver.rank)
        self._in_flight: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._num_tokens = torch.zeros([], dtype=torch.int, device=device)

    def run(self) -> list[Any]:
        """Walk the rank's actions; return what the last stage reports of its losses."""
        steps, config = self._megatron, self._megatron.config
        is_last_rank = self._driver.rank == self._schedule.rank_of(self._schedule.num_stages - 1)
        embedding = steps.begin(is_last_rank=is_last_rank)
        if config.timers is not None:
            barrier = config.barrier_with_L1_time
            config.timers("forward-backward", log_level=1).start(barrier=barrier)
        self._start_parameter_gathers()
        with self._sync.step():
            for action in self._schedule.actions[self._driver.rank]:
                if action.op.is_communication:
                    self._exchange.run(action)
                    continue
                with self._sync.around(action):
                    self._compute(action)
            self._exchange.end()
        steps.finish(
            embedding,
            self._num_tokens,
            is_last_rank=is_last_rank,
            force_all_reduce=self._force_all_reduce,
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

    def _compute(self, action: Action) -> None:
        match action.op:
            case Op.F:
                self._forward(action)
            case Op.W:
                if self._driver.run_weights is not None:
                    self._driver.run_weights(self._schedule.chunk_of(action.stage))
            case _:
                self._backward(action)

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        is_last = stage == self._schedule.num_stages - 1
        received = None
        if stage > 0:
            received = self._exchange.take(Op.RECV_F, stage, microbatch)
        output, num_tokens = self._megatron.forward(
            self._schedule.chunk_of(stage), microbatch, received, is_last=is_last
        )
        self._num_tokens += num_tokens
        self._in_flight[stage, microbatch] = (received, output)
        if is_last:
            self._megatron.free_output(output)
        else:
            self._exchange.keep(Op.SEND_F, stage, microbatch, output)

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        received, output = self._in_flight.pop((stage, microbatch))
        output_grad = None
        if stage < self._schedule.num_stages - 1:
            output_grad = self._exchange.take(Op.RECV_B, stage, microbatch)
        input_grad = self._megatron.backward(received, output, output_grad)
        if action.op is Op.B and self._is_split and self._driver.run_weights is not None:
            self._driver.run_weights(self._schedule.chunk_of(stage))
        if stage > 0:
            assert input_grad is not None
            self._exchange.keep(Op.SEND_B, stage, microbatch, input_grad)
