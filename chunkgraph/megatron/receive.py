"""Pipeline receives that land in the slots, so that a replay copies nothing.

The order of a rank's receives is fixed by the schedule: its forwards of every stage but the first,
and its backwards of every stage but the last, in the order it runs them (also where Megatron posts
a receive long before it is used). So the next receive of a direction is known to belong to one
model chunk, whose next slot then takes it in place.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chunkgraph.engine import ChunkGraphs, StepMode
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.megatron.core.p2p import (
    Direction,
    default_groups,
    is_pipelining_schedule,
    is_plain_communicator,
    make_communicator,
)
from chunkgraph.megatron.topology import PipelinePlace
from chunkgraph.schedules import Op, megatron_schedule

__all__ = ["ReceiveOrder", "SlotReceiver", "receiving_lengths", "waits_for_sends"]


@dataclass(frozen=True)
class ReceiveOrder:
    """The model chunks that the receives of one rank are for, in order.

    Attributes:
        forward: of received inputs.
        backward: of received output gradients.
        num_before: for each received input, the rank's forwards that come before its own.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    num_before: tuple[int, ...]

    @classmethod
    def of(cls, place: PipelinePlace, num_microbatches: int) -> ReceiveOrder:
        """The order in one step of Megatron's schedule.

        Raises:
            TopologyError: Megatron's schedule does not take this number of microbatches.
        """
        schedule = megatron_schedule(
            place.pipeline_size, place.num_chunks, num_microbatches, place.group_size
        )
        actions = schedule.compute_actions(place.pipeline_rank)
        forwards = [a for a in actions if a.op is Op.F]
        return cls(
            forward=tuple(schedule.chunk_of(a.stage) for a in forwards if a.stage > 0),
            num_before=tuple(n for n, a in enumerate(forwards) if a.stage > 0),
            backward=tuple(
                schedule.chunk_of(a.stage)
                for a in actions
                if a.op is Op.B and a.stage < schedule.num_stages - 1
            ),
        )


def _with_rows(chunks: Sequence[int], rows: Sequence[int] | None) -> deque[tuple[int, int | None]]:
    """Each receive's chunk with the rows of its microbatch: the n-th of a chunk is of the n-th."""
    count: Counter[int] = Counter()
    found: deque[tuple[int, int | None]] = deque()
    for c in chunks:
        found.append((c, None if rows is None else rows[count[c]]))
        count[c] += 1
    return found


def waits_for_sends(config: Any) -> bool:
    """Whether Megatron's schedules have a gradient sent before the rank's next backward.

    Without ``overlap_p2p_comm`` every exchange is waited for (by the compute stream) before the
    schedule goes on. With it, the send after backward k is waited for only after backward k + 1
    was launched, which overwrites the gradient that is being sent. A ring exchange hands out no
    requests to wait for.

    Args:
        config: Megatron's ModelParallelConfig.
    """
    return not (
        getattr(config, "overlap_p2p_comm", False)
        or getattr(config, "overlap_p2p_comm_warmup_flush", False)
        or getattr(config, "use_ring_exchange_p2p", False)
    )


class SlotReceiver:
    """Gives Megatron's schedule a communicator that receives into slots, in replayed steps.

    Args:
        engine: the rank's chunk graphs; None: there are none, and receives are only given the
            lengths of their microbatches.
        place: where the rank stands in the pipeline.
        config: Megatron's ModelParallelConfig.
        wanted: False: every step receives as Megatron does.
        lends_input_grads: for each chunk, whether it hands out the slot's own memory as input
            gradient (``Chunk.keeps_input_grads`` is False), which the next backward overwrites.
        device: where received tensors lie.

    Attributes:
        num_received_in_place: receives of replayed steps so far that landed in a slot.
        num_received_copied: those that landed elsewhere while the communicator was in use, because
            no slot was free when they were posted or the shape was not the captured one.
        off_because: why the last replayed step used Megatron's own receives; "" if it did not.
        owner: what lives as long as the model's forwards come here.
    """

    def __init__(
        self,
        engine: ChunkGraphs | None,
        place: PipelinePlace,
        config: Any,
        *,
        wanted: bool,
        lends_input_grads: Sequence[bool],
        device: torch.device | None = None,
    ) -> None:
        self.num_received_in_place = 0
        self.num_received_copied = 0
        self.off_because = ""
        self.owner: object = None
        self._engine = engine
        self._place = place
        self._config = config
        self._wanted = wanted
        self._lends_input_grads = tuple(lends_input_grads)
        self._orders: dict[int, ReceiveOrder | None] = {}
        self._device = device
        # The chunk and the rows (None: as Megatron has them) of each receive to come.
        self._left: dict[Direction, deque[tuple[int, int | None]]] = {}
        self._most_rows = 0
        # Received but not yet forwarded, for each chunk: whether in a slot's memory.
        self._arrived: tuple[deque[bool], ...] = ()
        self._is_receiving = False
        # Among the rank's forwards of the step: those begun, and the one of the latest receive.
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
        """What to call the schedule with.

        Args:
            mode: how the step runs.
            forward_backward: the schedule.
            keywords: what the caller calls it with.
            rows: of each microbatch, over all ranks that share it; ``seq_length`` is that of the
                longest there can be. None: all microbatches are so long.

        Returns:
            ``keywords``, with a communicator if the step receives into slots, or tensors of
            several lengths.

        Raises:
            ConfigError: there are several lengths, and Megatron's schedule cannot receive them.
        """
        self._is_receiving = False
        self._copies_input_grads = False
        self._left = {direction: deque() for direction in Direction}
        self._most_rows = keywords.get("seq_length", 0)
        if rows is not None and all(number == self._most_rows for number in rows):
            rows = None
        if rows is not None and self._place.pipeline_size > 1:
            obstacle = self._obstacle(forward_backward, keywords)
            if obstacle:
                raise ConfigError(
                    f"rank {self._place.rank}: the microbatches of a step have {sorted(set(rows))} "
                    "rows, and the stages of this pipeline cannot receive several lengths: "
                    f"{obstacle}. Use no length buckets, or Megatron's own schedule and "
                    "communicator."
                )
        if mode is not StepMode.REPLAY:
            if rows is None or self._place.pipeline_size == 1:
                return keywords
            return self._with_communicator(keywords, rows)
        self.off_because = (
            self._obstacle(forward_backward, keywords) if self._wanted else "not wanted"
        )
        self._copies_input_grads = any(self._lends_input_grads) and not (
            waits_for_sends(self._config) and self._sends_as_megatron(forward_backward, keywords)
        )
        if self.off_because:
            if rows is None or self._place.pipeline_size == 1:
                return keywords
            return self._with_communicator(keywords, rows)
        self._arrived = tuple(deque[bool]() for _ in range(self._place.num_chunks))
        self._num_begun = 0
        self._has_lost_grad_order = set()
        self._is_receiving = True
        return self._with_communicator(keywords, rows)

    def _with_communicator(
        self, keywords: Mapping[str, Any], rows: Sequence[int] | None
    ) -> Mapping[str, Any]:
        order = self._order(keywords["num_microbatches"])
        assert order is not None
        self._num_before = deque(order.num_before)
        self._left = {
            Direction.FORWARD: _with_rows(order.forward, rows),
            Direction.BACKWARD: _with_rows(order.backward, rows),
        }
        given, groups = keywords.get("p2p_communicator"), keywords.get("pg_collection")
        if given is None:
            groups = default_groups()
            communicator = make_communicator(groups.pp, self._config, self)
        else:
            communicator = make_communicator(given.pp_group, given.config, self)
        return {**keywords, "p2p_communicator": communicator, "pg_collection": groups}

    def call(self, c: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`ChunkGraphs.call`, watched by the receiver; the input is the first argument."""
        if self._is_receiving:
            self._num_begun += 1
            if self._arrived[c]:
                self._arrived[c].popleft()
        if self._copies_input_grads and self._lends_input_grads[c] and args[0].requires_grad:
            args[0].register_hook(torch.clone)
        assert self._engine is not None
        return self._engine.call(c, args, kwargs)

    def take(
        self, direction: Direction, shape: tuple[int, ...] | None, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        """Memory for the next receive; called by the communicator (see `ReceiveBuffers`)."""
        if not self._left[direction]:
            return None
        c, rows = self._left[direction].popleft()
        if direction is Direction.FORWARD:
            self._position = self._num_before.popleft()
        wanted = shape
        if rows is not None and shape is not None:
            wanted = (shape[0] * rows // self._most_rows, *shape[1:])
        buffer = self._of_slot(direction, c, wanted, dtype) if self._is_receiving else None
        if buffer is not None or wanted == shape:
            return buffer
        assert wanted is not None
        return torch.empty(wanted, dtype=dtype, device=self._device, requires_grad=True)

    def _of_slot(
        self,
        direction: Direction,
        c: int,
        shape: tuple[int, ...] | None,
        dtype: torch.dtype | None,
    ) -> torch.Tensor | None:
        find = self._input_of if direction is Direction.FORWARD else self._output_grad_of
        buffer = find(c)
        if buffer is not None and not (
            tuple(buffer.shape) == shape and buffer.dtype == dtype and buffer.is_contiguous()
        ):
            buffer = None  # the slot stays the microbatch's own, and its replay copies
        if buffer is None:
            self.num_received_copied += 1
            return None
        self.num_received_in_place += 1
        return buffer.requires_grad_()

    def _input_of(self, c: int) -> torch.Tensor | None:
        # The engine gives reserved slots to the next forwards. So nothing may be reserved while a
        # microbatch that arrived elsewhere waits for its forward: it would get the wrong slot.
        assert self._engine is not None
        buffer = None
        if all(self._arrived[c]):
            num_reserved = sum(sum(arrived) for arrived in self._arrived)
            buffer = self._engine.reserve_input(
                c, num_before=max(self._position - self._num_begun - num_reserved, 0)
            )
        self._arrived[c].append(buffer is not None)
        return buffer

    def _output_grad_of(self, c: int) -> torch.Tensor | None:
        # The engine counts its gradients in the order of forwards, from those it handed out.
        if c in self._has_lost_grad_order:
            return None
        assert self._engine is not None
        buffer = self._engine.reserve_output_grad(c)
        if buffer is None:
            self._has_lost_grad_order.add(c)
            return None
        return buffer.detach()

    def _obstacle(self, forward_backward: Callable[..., Any], keywords: Mapping[str, Any]) -> str:
        """Why this step must receive as Megatron does, or ""."""
        if self._place.pipeline_size == 1:
            return "there is no pipeline"
        if not is_pipelining_schedule(forward_backward):
            return "not a pipeline schedule of Megatron's, or one that takes no communicator"
        given, groups = keywords.get("p2p_communicator"), keywords.get("pg_collection")
        if (given is None) != (groups is None):
            return "a communicator without process groups, or the other way round"
        if given is not None and not (
            is_plain_communicator(given)
            and given.pp_group.size() == self._place.pipeline_size
            and given.pp_group.rank() == self._place.pipeline_rank
        ):
            return "the caller's own communicator"
        if keywords.get("adjust_tensor_shapes_fn") is not None:
            return "adjust_tensor_shapes_fn"
        if getattr(self._config, "use_ring_exchange_p2p", False):
            return "use_ring_exchange_p2p"
        models = keywords.get("model")
        models = models if isinstance(models, (list, tuple)) else [models]
        if not (torch.is_grad_enabled() and all(m.training for m in models)):
            return "not training"
        if self._order(keywords["num_microbatches"]) is None:
            return "Megatron refuses this number of microbatches"
        return ""

    def _sends_as_megatron(
        self, forward_backward: Callable[..., Any], keywords: Mapping[str, Any]
    ) -> bool:
        given = keywords.get("p2p_communicator")
        return is_pipelining_schedule(forward_backward) and (
            given is None or is_plain_communicator(given)
        )

    def _order(self, num_microbatches: int) -> ReceiveOrder | None:
        if num_microbatches not in self._orders:
            try:
                order = ReceiveOrder.of(self._place, num_microbatches)
            except TopologyError:
                order = None
            self._orders[num_microbatches] = order
        return self._orders[num_microbatches]


def receiving_lengths(
    model_chunks: Sequence[Any], device: torch.device, forward_backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Megatron's schedule without chunk graphs, for microbatches of several lengths.

    The result takes one keyword more: ``buckets``, the rows of each microbatch of the step.
    """
    config = model_chunks[0].config
    place = PipelinePlace.current(len(model_chunks), config)
    lends = [False] * len(model_chunks)
    receiver = SlotReceiver(
        None, place, config, wanted=False, lends_input_grads=lends, device=device
    )

    def run(*, buckets: Sequence[int] | None = None, **keywords: Any) -> Any:
        given = receiver.begin_step(StepMode.EAGER, forward_backward, keywords, buckets)
        return forward_backward(**given)

    return run
