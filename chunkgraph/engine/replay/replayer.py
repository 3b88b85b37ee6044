"""Replay steps: assign slots to microbatches, load, replay and free them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from chunkgraph.engine.arguments import rank_label
from chunkgraph.engine.autocast import Autocast
from chunkgraph.engine.banks import StepBanks
from chunkgraph.engine.capture.captured_rank import CapturedRank
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.counters import Counters
from chunkgraph.engine.decide.reasons import NOTHING_REPLAYED
from chunkgraph.engine.hooks import refuse_contexts
from chunkgraph.engine.observer import Action, Observer
from chunkgraph.engine.options import CaptureOptions
from chunkgraph.engine.replay.autograd_node import replay_node
from chunkgraph.engine.replay.profiler_ranges import ReplayRanges
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.verify import Verifier
from chunkgraph.errors import ChunkGraphError, ReplayMismatchError
from chunkgraph.slots import SlotMachine

__all__ = ["Replayer"]

_task_id = torch._C._current_graph_task_id
_will_execute = torch._C._will_engine_execute_node


class Replayer:
    """Replay the slots of one rank.

    Args:
        chunks: The rank's chunks.
        num_slots: Number of slots of each chunk.
        banks: The banks of the microbatches of each step.
        options: Options for shared slots and verification.
        counters: Counters that every replay updates.
        device: Device of the chunks.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        num_slots: Sequence[int],
        banks: StepBanks,
        options: CaptureOptions,
        counters: Counters,
        device: torch.device,
    ) -> None:
        self._chunks = tuple(chunks)
        self._banks = banks
        self._options = options
        self._counters = counters
        self._label = rank_label(chunks)
        self._machine = SlotMachine(num_slots, self._label, are_shared=options.shared_slots)
        # An input of every replayed microbatch. A backward that does not reach it computes only
        # some of the gradients.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._anchor_node = torch.autograd.graph.get_gradient_edge(self._anchor).node
        self._pass = -1  # torch's number of the backward pass that runs
        self._chunks_in_pass: set[int] = set()
        self._sharing: list[set[int]] = []  # for each chunk, those that train a parameter of it
        self._captured: CapturedRank | None = None
        self._verifier: Verifier | None = None
        self._ranges: ReplayRanges | None = None
        self._observers: tuple[Observer, ...] = ()  # of the current step
        self._first_step, self._num_hooks = 0, -1
        self._is_in_step = False
        self._is_called = False
        self._forget_microbatches()

    def take(self, captured: CapturedRank, verifier: Verifier | None) -> None:
        """Replay these graphs from now on."""
        self._captured, self._verifier = captured, verifier
        report = captured.report
        self._machine = SlotMachine(report.num_slots, self._label, are_shared=report.shared_slots)
        trained = [set(map(id, sinks.parameters)) for sinks in captured.sinks]
        self._sharing = [{c for c, of in enumerate(trained) if own & of} for own in trained]
        self._first_step = self._counters.replayed_steps
        self._num_hooks = -1  # torch's number of the last hook for which hooks were accepted

    def drop(self) -> None:
        """Drop the graphs and everything that refers to them."""
        self._captured = self._verifier = None
        self._forget_microbatches()

    def name_replays(self, names: Sequence[str]) -> None:
        """See `ChunkGraphs.name_replays`."""
        self._ranges = ReplayRanges(names)

    @contextmanager
    def step(self, num_microbatches: int | None) -> Iterator[None]:
        """Enclose one replayed step.

        Args:
            num_microbatches: Number of microbatches; only shown in errors.

        Raises:
            ReplayMismatchError: The model differs from the captured one.
            SlotError: A microbatch was forwarded but not run backward when the step ended.
        """
        captured, counters = self._captured, self._counters
        assert captured is not None
        num_replays = counters.replays
        number = counters.replayed_steps - self._first_step
        verifier = self._verifier if self._options.verifies(number) else None
        for model in captured.models:
            model.check()
        for sinks in captured.sinks:
            sinks.begin_step()
        self._is_called = False
        self._machine.begin_step()
        self._is_in_step = True
        self._observers = tuple(o for o in (self._ranges, verifier) if o is not None)
        for observer in self._observers:
            observer.begin_step(number)
        try:
            yield
            self._machine.end_step()
        except BaseException as error:
            self._machine.abort_step()
            self._forget_microbatches()
            for slot in (s for slots in captured.slots for s in slots):
                slot.forget_sources()
            if isinstance(error, ChunkGraphError) and num_microbatches is not None:
                error.add_note(f"The step had {num_microbatches} microbatches.")
            raise
        finally:
            self._is_in_step = False
            for observer in self._observers:
                observer.end_step()
            self._observers = ()
        if counters.replays > num_replays:
            counters.replayed_steps += 1
        else:  # every call ran eagerly: gradients were off, or modules in evaluation
            counters.fallbacks[NOTHING_REPLAYED] += 1

    def _refuse_hooks(self) -> None:
        """Refuse hooks of others, once torch has counted a new hook anywhere in the process.

        Raises:
            ReplayMismatchError: There is one that a replay would skip.
        """
        assert self._captured is not None
        for model in self._captured.models:
            model.refuse_hooks(ReplayMismatchError)
        self._num_hooks = RemovableHandle.next_id

    def call(self, c: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the next forward of chunk ``c`` as a node of autograd.

        Raises:
            ReplayMismatchError: The call does not match the capture.
            SlotError: No slot is free.
        """
        captured: CapturedRank = self._captured  # type: ignore[assignment]
        if not self._is_called:  # inside the contexts of the caller
            refuse_contexts(self._label, ReplayMismatchError)
            self._is_called = True
        if RemovableHandle.next_id != self._num_hooks:
            self._refuse_hooks()
        reserved = self._reserved[c]
        key = reserved[0].bank if reserved else self._banks.key_of_next(c)
        tensors = captured.banks[key].signatures[c].tensors_of(args, kwargs)
        if reserved:
            slot = reserved.popleft()
            del self._received[slot]
        else:
            slot = self._acquire(c, key)
        self._awaiting_grads[c].append(slot)
        leaves = map(tensors.__getitem__, slot.differentiable_inputs)
        outputs = replay_node(self, slot, tensors, *leaves, self._anchor)
        return outputs if slot.is_single else slot.result(outputs)

    def reserve_input(self, c: int, index: int, num_before: int) -> torch.Tensor | None:
        """See `ChunkGraphs.reserve_input`."""
        if not self._is_in_step:
            return None
        slot = next((s for s in self._reserved[c] if index not in self._received[s]), None)
        if slot is None:
            assert self._captured is not None
            num_others = num_before if self._captured.report.shared_slots else 0
            if self._machine.num_free(c) <= num_others:
                return None
            slot = self._acquire(c, self._banks.key_of_next(c))
            self._reserved[c].append(slot)
            self._received[slot] = set()
        self._received[slot].add(index)
        wants_grad = slot.input_grads[index] is not None
        return slot.inputs[index].detach().requires_grad_(wants_grad)

    def reserve_output_grad(self, c: int, index: int) -> torch.Tensor | None:
        """See `ChunkGraphs.reserve_output_grad`."""
        waiting = self._awaiting_grads[c]
        if not self._is_in_step or not waiting:
            return None
        return waiting.popleft().output_grads[index]

    def replay_forward(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> None:
        """Load inputs and replay. `SlotReplay` calls this."""
        before = self._chunks[slot.chunk].before_forward
        if before is not None:
            before()
        for observer in self._observers:
            observer.before("F", slot, tensors)
        slot.load_inputs(tensors)
        slot.forward_graph.replay()
        for observer in self._observers:
            observer.after("F", slot)
        self._counters.replays += 1
        self._counters.replays_of_bank[slot.bank] += 1

    def replay_backward(
        self, slot: Slot, turn: int, grads: tuple[torch.Tensor | None, ...]
    ) -> None:
        """Load output gradients, replay and free the slot. `SlotReplay` calls this."""
        c = slot.chunk
        self._machine.begin_backward(c, slot.index, turn)
        waiting = self._awaiting_grads[c]
        if waiting and waiting[0] is slot:
            waiting.popleft()
        elif slot in waiting:
            waiting.remove(slot)
        autocast = slot.backward_autocast
        if autocast is not None and not autocast.is_now():
            raise self._other_autocast(slot.label, autocast)
        assert self._captured is not None
        if RemovableHandle.next_id != self._num_hooks:
            self._refuse_hooks()
        # Autograd does not know the parameters, so it does not report whether all are requested.
        if slot.trained and not _will_execute(self._anchor_node):
            raise ReplayMismatchError(
                f"{slot.label}: autograd.grad() or backward(inputs=...) asks for only some "
                "gradients; a replayed backward adds those of all parameters to .grad.\n"
                "  To do: call backward() without `inputs`, or ask for an eager step "
                "(`step(eager=True)`)."
            )
        self._note_pass(slot)
        is_split = slot.weight_graph is not None
        if not is_split:  # else the weight half adds the gradients
            self._captured.sinks[c].before_backward(slot.trained)
        action: Action = "I" if is_split else "B"
        for observer in self._observers:
            observer.before(action, slot, grads)
        slot.load_output_grads(grads)
        before = self._chunks[c].before_backward
        if before is not None:
            before()
        if slot.backward_graph is not None:
            slot.backward_graph.replay()
        for observer in self._observers:
            observer.after(action, slot)
        self._counters.backward_replays += 1
        if is_split:
            self._machine.defer_weight(c, slot.index)
            self._halved[c, slot.index] = slot
        else:
            self._end_backward(slot)

    def _note_pass(self, slot: Slot) -> None:
        """Record that the running backward pass enters a microbatch of the slot's chunk.

        Raises:
            ReplayMismatchError: it has already added to gradients that this microbatch adds to.
        """
        c, number = slot.chunk, _task_id()
        if number != self._pass:
            self._pass, self._chunks_in_pass = number, set()
        if not self._sharing[c].isdisjoint(self._chunks_in_pass):
            raise ReplayMismatchError(
                f"{slot.label}: one backward pass runs through several microbatches that add to "
                "the same parameter. Eager training adds these up before it adds them to the "
                "gradient; replays cannot, so the last bits would differ.\n"
                "  To do: call backward() for each microbatch (and each chunk that shares a "
                "parameter), or ask for an eager step (`step(eager=True)`)."
            )
        self._chunks_in_pass.add(c)

    def waiting_weights(self, c: int) -> tuple[int, ...]:
        """Return the turns of chunk ``c`` that wait for their weight half, oldest first."""
        return self._machine.pending(c)

    def run_weight(self, c: int, turn: int | None) -> None:
        """Replay the weight half that has waited longest.

        Args:
            c: Index of the chunk.
            turn: The turn that it must have; None accepts any.

        Raises:
            SlotError: No weight half waits, or another one has waited longest.
        """
        index = self._machine.begin_weight(c, turn)
        slot = self._halved.pop((c, index))
        assert self._captured is not None
        assert slot.weight_graph is not None
        self._captured.sinks[c].before_backward(slot.trained)
        for observer in self._observers:
            observer.before("W", slot, ())
        slot.weight_graph.replay()
        for observer in self._observers:
            observer.after("W", slot)
        self._counters.weight_replays += 1
        self._end_backward(slot)

    def _end_backward(self, slot: Slot) -> None:
        """Finish a microbatch once all of its gradients are added."""
        assert self._captured is not None
        if slot.marker is not None:
            slot.marker.replayed()
        self._machine.release(slot.chunk, slot.index)
        after = self._chunks[slot.chunk].after_backward
        if after is not None:
            after()

    @staticmethod
    def _other_autocast(label: str, captured: Autocast) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"{label}: its backward was captured with autocast {captured}, and runs with "
            f"{captured.now(captured.device_type)}. Call backward() under the same autocast in "
            "warmup steps and in every later step (torch recommends outside of autocast), or "
            "release the graphs and capture again."
        )

    def _acquire(self, c: int, key: Hashable) -> Slot:
        assert self._captured is not None
        slot = self._captured.banks[key].slots[c][self._machine.acquire_forward(c)]
        slot.turn = self._machine.latest_turn
        self._banks.advance(c)
        return slot

    def _forget_microbatches(self) -> None:
        """Reset the slots that wait for an input, an output gradient or a weight half.

        Between steps there are none.
        """
        self._reserved = tuple(deque[Slot]() for _ in self._chunks)
        self._received: dict[Slot, set[int]] = {}
        self._awaiting_grads = tuple(deque[Slot]() for _ in self._chunks)
        self._halved: dict[tuple[int, int], Slot] = {}  # by chunk and slot number
