"""Receive from other pipeline stages directly into slots, so that a replay copies nothing.

The schedule determines the order of a rank's receives: one for each forward of every stage but the
first, and one for each backward of every stage but the last, in the order in which the rank runs
them, even if Megatron posts a receive long before its use. So the model chunk of the next receive
in a direction is known, and the receive goes into the chunk's next slot.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chunkgraph.engine import ChunkGraphs, StepMode
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.p2p import (
    Direction,
    default_groups,
    is_pipelining_schedule,
    is_plain_communicator,
    make_communicator,
)
from chunkgraph.megatron.pipeline.choice import PipelinePlace
from chunkgraph.megatron.pipeline.driver import ScheduleDriver
from chunkgraph.schedules import Op, Schedule, megatron_schedule, with_transfers


@dataclass(frozen=True)
class ReceiveOrder:
    """The model chunk of each receive of one rank, in order.

    Attributes:
        forward: Chunks of received inputs.
        backward: Chunks of received output gradients.
        num_before: For each received input, the number of the rank's forwards before the forward
            that uses it.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    num_before: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> ReceiveOrder:
        """Return the order of a rank's receives in a schedule with transfers."""
        actions = schedule.actions[rank]
        forwards = [(a.stage, a.microbatch) for a in actions if a.op is Op.F]
        received = [a for a in actions if a.op is Op.RECV_F]
        return cls(
            forward=tuple(schedule.chunk_of(a.stage) for a in received),
            num_before=tuple(forwards.index((a.stage, a.microbatch)) for a in received),
            backward=tuple(schedule.chunk_of(a.stage) for a in actions if a.op is Op.RECV_B),
        )

    @classmethod
    def of_megatron(cls, place: PipelinePlace, num_microbatches: int) -> ReceiveOrder:
        """Return the order in one step of Megatron's schedule.

        Raises:
            TopologyError: Megatron's schedule does not support this number of microbatches.
        """
        schedule = megatron_schedule(
            place.pipeline_size, place.num_chunks, num_microbatches, place.group_size
        )
        return cls.of(with_transfers(schedule), place.pipeline_rank)


def _with_rows(chunks: Sequence[int], rows: Sequence[int] | None) -> deque[tuple[int, int | None]]:
    """Pair the chunk of each receive with its rows: a chunk's n-th receive is microbatch n."""
    count: Counter[int] = Counter()
    pairs: deque[tuple[int, int | None]] = deque()
    for c in chunks:
        pairs.append((c, None if rows is None else rows[count[c]]))
        count[c] += 1
    return pairs


class SlotReceiver:
    """Let the schedule receive into slots in replayed steps.

    Megatron's schedules take a communicator, a `ScheduleDriver` takes the memory itself.

    Args:
        engine: The rank's chunk graphs. None without chunk graphs; received tensors then only get
            the lengths of their microbatches.
        place: The rank's place in the pipeline.
        config: Megatron's ModelParallelConfig.
        lends_input_grads: For each chunk, whether its input gradient is the slot's memory
            (``Chunk.keeps_input_grads`` is False), which the next backward overwrites.
        device: Device of received tensors.
        driver: Runs the training steps instead of Megatron's schedule; None if nothing does.

    Attributes:
        num_received_in_place: Number of receives of replayed steps so far that went into a slot.
        num_received_copied: Number of receives that went elsewhere while the communicator was in
            use, because no slot was free or the shape differed from the captured one.
        off_because: Why the last replayed step used Megatron's receives; "" if it did not.
        owner: An object to keep alive as long as the model's forwards call this receiver.
    """

    def __init__(
        self,
        engine: ChunkGraphs | None,
        place: PipelinePlace,
        config: Any,
        *,
        lends_input_grads: Sequence[bool],
        device: torch.device | None = None,
        driver: ScheduleDriver | None = None,
    ) -> None:
        self._driver = driver
        self.num_received_in_place = 0
        self.num_received_copied = 0
        self.off_because = ""
        self.owner: object = None
        self._engine = engine
        self._place = place
        self._config = config
        self._lends_input_grads = tuple(lends_input_grads)
        self._order = functools.cache(
            functools.partial(ReceiveOrder.of_megatron, place)
            if driver is None
            else lambda count: ReceiveOrder.of(driver.schedule(count), place.pipeline_rank)
        )
        self._device = device
        # The chunk and the rows (None: Megatron's) of each receive to come.
        self._left: dict[Direction, deque[tuple[int, int | None]]] = {}
        self._most_rows = 0
        # For each chunk, its inputs that wait for their forward: whether each lies in a slot.
        self._arrived: tuple[deque[bool], ...] = ()
        self._is_receiving = False
        # Number of the step's forwards that have begun, and the index of the latest receive's.
        self._num_begun = self._position = 0
        self._num_before: deque[int] = deque()
        self._copies_input_grads = False
        self._has_lost_grad_order: set[int] = set()

    def begin_step(
        self,
        mode: StepMode,
        forward_backward: Callable[..., Any],
        keywords: Mapping[str, Any],
        rows: Sequence[int] | None = None,
    ) -> Mapping[str, Any]:
        """Begin a step; return the keywords for the schedule.

        Args:
            mode: How the step runs.
            forward_backward: The schedule.
            keywords: The caller's keywords.
            rows: Rows of each microbatch, summed over the ranks that share it. None if all have
                ``seq_length`` rows, which is the largest possible number.

        Returns:
            ``keywords``; with a communicator, or ``take_buffer`` for the driver, if the step
            receives into slots or receives several lengths.

        Raises:
            ConfigError: There are several lengths, and Megatron's schedule cannot receive them.
        """
        self._is_receiving = False
        self._copies_input_grads = False
        self._left = {direction: deque() for direction in Direction}
        self._most_rows = keywords.get("seq_length", 0)
        if rows is not None and all(number == self._most_rows for number in rows):
            rows = None
        has_lengths = rows is not None and self._place.pipeline_size > 1
        if mode is StepMode.REPLAY or has_lengths:
            obstacle = self._obstacle(forward_backward, keywords)
        if has_lengths and obstacle:
            assert rows is not None
            raise ConfigError(
                f"rank {self._place.rank}: the microbatches of a step have {sorted(set(rows))} "
                "rows, and the stages of this pipeline cannot receive several lengths: "
                f"{obstacle}. Use no length buckets, or Megatron's schedule and communicator."
            )
        if mode is StepMode.REPLAY:
            self.off_because = obstacle
            self._is_receiving = not self.off_because
            # Only Megatron's own schedules are known to wait for their sends.
            self._copies_input_grads = any(self._lends_input_grads) and not self._is_receiving
            self._arrived = tuple(deque[bool]() for _ in range(self._place.num_chunks))
            self._num_begun = 0
            self._has_lost_grad_order = set()
        if self._is_receiving or has_lengths:
            return self._with_buffers(keywords, rows)
        return keywords

    def _with_buffers(
        self, keywords: Mapping[str, Any], rows: Sequence[int] | None
    ) -> Mapping[str, Any]:
        order = self._order(keywords["num_microbatches"])
        self._num_before = deque(order.num_before)
        self._left = {
            Direction.FORWARD: _with_rows(order.forward, rows),
            Direction.BACKWARD: _with_rows(order.backward, rows),
        }
        if self._driver is not None:
            return {**keywords, "take_buffer": self.take}
        communicator, groups = keywords.get("p2p_communicator"), keywords.get("pg_collection")
        if communicator is None:
            groups = default_groups()
            receiving = make_communicator(groups.pp, self._config, self.take)
        else:
            receiving = make_communicator(communicator.pp_group, communicator.config, self.take)
        return {**keywords, "p2p_communicator": receiving, "pg_collection": groups}

    def call(self, c: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call chunk ``c`` of the engine and count it; the first argument is the input."""
        if self._is_receiving:
            self._num_begun += 1
            if self._arrived[c]:
                self._arrived[c].popleft()
        if self._copies_input_grads and self._lends_input_grads[c] and args[0].requires_grad:
            args[0].register_hook(torch.clone)
        assert self._engine is not None
        return self._engine.call(c, args, kwargs)

    def take(
        self, direction: Direction, shape: tuple[int, ...], dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        """Return the memory of the next receive of ``direction``, called once for each, in order.

        Returns:
            A contiguous leaf that requires grad, of that shape and dtype; None to let Megatron
            allocate.
        """
        if not self._left[direction]:
            return None
        c, rows = self._left[direction].popleft()
        if direction is Direction.FORWARD:
            self._position = self._num_before.popleft()
        own_shape = shape
        if rows is not None:
            own_shape = (shape[0] * rows // self._most_rows, *shape[1:])
        if self._is_receiving:
            is_input = direction is Direction.FORWARD
            buffer = self._reserve_input(c) if is_input else self._reserve_output_grad(c)
            # Otherwise the slot stays reserved for the microbatch, and its replay copies.
            if buffer is not None and (
                tuple(buffer.shape) == own_shape
                and buffer.dtype == dtype
                and buffer.is_contiguous()
            ):
                self.num_received_in_place += 1
                return buffer.requires_grad_()
            self.num_received_copied += 1
        if own_shape == shape:
            return None
        return torch.empty(own_shape, dtype=dtype, device=self._device, requires_grad=True)

    def _reserve_input(self, c: int) -> torch.Tensor | None:
        # The engine assigns reserved slots to the next forwards. If a microbatch outside of a slot
        # still waits for its forward, that forward would take the reserved slot.
        assert self._engine is not None
        buffer = None
        if all(self._arrived[c]):
            num_reserved = sum(sum(arrived) for arrived in self._arrived)
            buffer = self._engine.reserve_input(
                c, num_before=max(self._position - self._num_begun - num_reserved, 0)
            )
        self._arrived[c].append(buffer is not None)
        return buffer

    def _reserve_output_grad(self, c: int) -> torch.Tensor | None:
        # The engine hands out output gradients in the order of forwards; after a miss that order
        # no longer matches the receives.
        if c in self._has_lost_grad_order:
            return None
        assert self._engine is not None
        buffer = self._engine.reserve_output_grad(c)
        if buffer is None:
            self._has_lost_grad_order.add(c)
            return None
        return buffer.detach()

    def _obstacle(self, forward_backward: Callable[..., Any], keywords: Mapping[str, Any]) -> str:
        """Return why this step must use Megatron's receives, or ""."""
        if self._place.pipeline_size == 1:
            return "there is no pipeline"
        if not (forward_backward is self._driver or is_pipelining_schedule(forward_backward)):
            return "not Megatron's pipeline schedule, or one that takes no communicator"
        communicator = keywords.get("p2p_communicator")
        if communicator is not None and not (
            is_plain_communicator(communicator)
            and communicator.pp_group.size() == self._place.pipeline_size
            and communicator.pp_group.rank() == self._place.pipeline_rank
        ):
            return "the caller's own communicator"
        return ""


def receiving_lengths(
    model_chunks: Sequence[Any], device: torch.device, forward_backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap Megatron's schedule, without chunk graphs, for microbatches of several lengths.

    The wrapper takes an additional keyword ``buckets``: the rows of each microbatch of the step.
    """
    config = model_chunks[0].config
    place = PipelinePlace.current(len(model_chunks), config)
    lends = [False] * len(model_chunks)
    receiver = SlotReceiver(None, place, config, lends_input_grads=lends, device=device)

    def run(*, buckets: Sequence[int] | None = None, **keywords: Any) -> Any:
        return forward_backward(
            **receiver.begin_step(StepMode.EAGER, forward_backward, keywords, buckets)
        )

    return run
