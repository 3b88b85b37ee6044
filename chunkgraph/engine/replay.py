"""Replay steps: assign slots to microbatches, load, replay and free them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from chunkgraph.engine.arguments import rank_label
from chunkgraph.engine.banks import StepBanks
from chunkgraph.engine.capture.graph_set import GraphSet
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.hooks import refuse_contexts, refuse_gradients_of_parameters
from chunkgraph.engine.observer import Counters, Observer
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.step import NOTHING_REPLAYED
from chunkgraph.errors import ChunkGraphError, ReplayMismatchError
from chunkgraph.slots import SlotMachine

_task_id = torch._C._current_graph_task_id
_will_execute = torch._C._will_engine_execute_node


class Replayer:
    """Replay the slots of one rank.

    Args:
        chunks: The rank's chunks.
        num_slots: Number of slots of each chunk.
        banks: The banks of the microbatches of each step.
        shared_slots: See `CaptureOptions`.
        counters: Counters of steps.
        device: Device of the chunks.
    """

    machine = SlotMachine

    def __init__(
        self,
        chunks: Sequence[Chunk],
        num_slots: Sequence[int],
        banks: StepBanks,
        counters: Counters,
        device: torch.device,
        *,
        shared_slots: bool,
    ) -> None:
        self._chunks = tuple(chunks)
        self._banks = banks
        self._actions = tuple(chunk.actions for chunk in chunks)
        self._counters = counters
        self._label = rank_label(chunks)
        self._machine = self.machine(num_slots, self._label, are_shared=shared_slots)
        # An input of every replayed microbatch. A backward that does not reach it computes only
        # some of the gradients.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._anchor_node = torch.autograd.graph.get_gradient_edge(self._anchor).node
        self._pass = -1  # torch's number of the backward pass that runs
        self._chunks_in_pass: set[int] = set()
        self._sharing: list[set[int]] = []  # for each chunk, those that train a parameter of it
        self._captured: GraphSet | None = None
        self._observers: tuple[Observer, ...] = ()  # of the current step
        self._first_step, self._num_hooks = 0, -1
        self._is_in_step = False
        self._is_called = self._has_replayed = False
        self._forget_microbatches()

    def take(self, captured: GraphSet) -> None:
        """Replay these graphs from now on."""
        self._captured = captured
        report = captured.report
        latest_turn = self._machine.latest_turn
        self._machine = self.machine(report.num_slots, self._label, are_shared=report.shared_slots)
        self._machine.latest_turn = latest_turn  # backwards of earlier captures stay refused
        trained = [set(map(id, sinks.parameters)) for sinks in captured.sinks]
        self._sharing = [{c for c, of in enumerate(trained) if own & of} for own in trained]
        self._first_step = self._counters.replayed_steps
        self._num_hooks = -1  # torch's number of the next hook when hooks were last accepted

    def drop(self) -> None:
        """Drop the graphs and everything that refers to them."""
        self._captured = None
        self._forget_microbatches()

    @contextmanager
    def step(self, num_microbatches: int | None, observers: Sequence[Observer]) -> Iterator[None]:
        """Enclose one replayed step.

        Args:
            num_microbatches: Number of microbatches, if it is known; paged slots need it.
            observers: Follow the step if they observe it.

        Raises:
            ReplayMismatchError: The model differs from the captured one.
            SlotError: A microbatch was forwarded but not run backward when the step ended.
        """
        captured, counters = self._captured, self._counters
        assert captured is not None
        number = counters.replayed_steps - self._first_step
        for model in captured.models:
            model.check()
        for sinks in captured.sinks:
            sinks.begin_step()
        self._is_called = self._has_replayed = False
        self._machine.begin_step()
        has_failed = self._is_in_step = True
        self._observers = tuple(o for o in observers if o.observes(number))
        try:
            for observer in self._observers:
                observer.begin_step(number)
            yield
            self._machine.end_step()
            has_failed = False
        except BaseException as error:
            self._machine.abort_step()
            self._forget_microbatches()
            captured.forget_inputs()
            refuse_gradients_of_parameters(self._label, error)
            if isinstance(error, ChunkGraphError) and num_microbatches is not None:
                error.add_note(f"The step had {num_microbatches} microbatches.")
            raise
        finally:
            self._is_in_step = False
            for sinks in captured.sinks:
                sinks.end_step()
            for observer in self._observers:
                observer.end_step(has_failed=has_failed)
            self._observers = ()
        if self._has_replayed:
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
        captured: GraphSet = self._captured  # type: ignore[assignment]
        if not self._is_called:  # inside the contexts of the caller
            refuse_contexts(self._label, ReplayMismatchError)
            self._is_called = True
        if RemovableHandle.next_id != self._num_hooks:
            self._refuse_hooks()
        reserved = self._reserved[c]
        key = reserved[0].bank if reserved else self._banks.bank_of_next(c)
        tensors = captured.banks[key].signatures[c].tensors_of(args, kwargs)
        if reserved:
            slot = reserved.popleft()
            del self._received[slot]
        else:
            slot = self._acquire(c, key)
        if slot.output_grads is None:  # the capture may have found that the chunk trains nothing
            return self._call_without_backward(slot, tensors)
        self._awaiting_grads[c].append(slot)
        leaves = map(tensors.__getitem__, slot.input_grads.positions)
        outputs = _replay_node(self, slot, tensors, *leaves, self._anchor)
        return outputs if slot.outputs.is_single else slot.outputs.result(outputs)

    def _call_without_backward(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> Any:
        with torch.no_grad():
            self.replay_forward(slot, tensors)
            outputs = slot.outputs.hand_out()
        self._machine.begin_backward(slot.chunk, slot.index)
        self._machine.release(slot.chunk, slot.index)
        return slot.outputs.result(outputs)

    def reserve_input(self, c: int, index: int = 0, *, num_before: int = 0) -> torch.Tensor | None:
        """Return the memory that the next forward of chunk ``c`` reads, to receive into it.

        The next call of the chunk takes the same slot, and copies nothing if passed this tensor.

        Args:
            c: Index of the chunk.
            index: Number of the tensor among the call's tensors.
            num_before: Forwards of the rank before that one that have no slot yet; with shared
                slots, this many slots are left for them.

        Returns:
            A leaf on the slot's static input, as it was captured; None outside a replayed step or
            if no slot is free (receive elsewhere; the call copies it).
        """
        if not self._is_in_step:
            return None
        slot = next((s for s in self._reserved[c] if index not in self._received[s]), None)
        if slot is None:
            assert self._captured is not None
            num_others = num_before if self._captured.report.shared_slots else 0
            if self._machine.num_free(c) <= num_others:
                return None
            slot = self._acquire(c, self._banks.bank_of_next(c))
            self._reserved[c].append(slot)
            self._received[slot] = set()
        self._received[slot].add(index)
        wants_grad = slot.input_grads.tensors[index] is not None
        return slot.inputs.tensors[index].detach().requires_grad_(wants_grad)

    def reserve_output_grad(self, c: int) -> torch.Tensor | None:
        """Return the memory that the next backward of chunk ``c`` reads, to receive into it.

        Only for schedules that run a chunk's backwards in the order of its forwards.

        Returns:
            The static gradient of the first output that gets one; None if no forward of the chunk
            waits for it.
        """
        slots = self._awaiting_grads[c]
        if not self._is_in_step or not slots:
            return None
        grads = slots.popleft().output_grads
        assert grads is not None
        return grads.tensors[0]

    def replay_forward(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> None:
        """Load inputs and replay."""
        for observer in self._observers:
            observer.before("F", slot, tensors)
        slot.inputs.load(tensors)
        slot.graphs["F"].replay()
        for observer in self._observers:
            observer.after("F", slot)

    def replay_backward(
        self, slot: Slot, turn: int, grads: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor]:
        """Load output gradients and replay; free the slot, unless further actions wait.

        Args:
            slot: The slot of the microbatch.
            turn: The slot's turn at the forward of this backward.
            grads: Gradients of the outputs.

        Returns:
            The gradients of the inputs, for autograd.
        """
        c = slot.chunk
        self._machine.begin_backward(c, slot.index, turn)
        slots = self._awaiting_grads[c]
        if slot in slots:
            slots.remove(slot)
        output_grads = slot.output_grads
        assert output_grads is not None
        output_grads.check_autocast()
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
        _, action, *later = self._actions[c]
        if not later:  # else the last action adds the gradients
            self._captured.sinks[c].bind_grads(slot.trained)
        for observer in self._observers:
            observer.before(action, slot, grads)
        output_grads.load(grads)
        if action in slot.graphs:
            slot.graphs[action].replay()
        if later:
            self._machine.await_last(c, slot.index)
            self._awaiting_last[c, slot.index] = slot
        else:
            self._machine.release(c, slot.index)
        for observer in self._observers:
            observer.after(action, slot)
        return slot.input_grads.hand_out()

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

    def waiting(self, c: int) -> tuple[int, ...]:
        """Return the turns of chunk ``c`` that wait for their last action, oldest first."""
        return self._machine.waiting(c)

    def run_waiting(self, c: int, turn: int | None) -> None:
        """Replay the last action of the microbatch that has waited longest.

        Args:
            c: Index of the chunk.
            turn: The turn that it must have; None accepts any.

        Raises:
            SlotError: No microbatch waits, or another one has waited longest.
        """
        index = self._machine.begin_last(c, turn)
        slot = self._awaiting_last.pop((c, index))
        assert self._captured is not None
        self._captured.sinks[c].bind_grads(slot.trained)
        action = self._actions[c][-1]
        for observer in self._observers:
            observer.before(action, slot, ())
        slot.graphs[action].replay()
        self._machine.release(c, index)
        for observer in self._observers:
            observer.after(action, slot)

    def _acquire(self, c: int, key: Hashable) -> Slot:
        assert self._captured is not None
        slot = self._captured.banks[key].slots[c][self._machine.acquire_forward(c)]
        slot.turn = self._machine.latest_turn
        self._has_replayed = True
        self._banks.advance(c)
        return slot

    def _forget_microbatches(self) -> None:
        """Reset the slots that wait for an input, an output gradient or their last action.

        Between steps there are none.
        """
        self._reserved = tuple(deque[Slot]() for _ in self._chunks)
        self._received: dict[Slot, set[int]] = {}
        self._awaiting_grads = tuple(deque[Slot]() for _ in self._chunks)
        self._awaiting_last: dict[tuple[int, int], Slot] = {}  # by chunk and slot number


class _SlotReplay(torch.autograd.Function):
    """A replayed microbatch as one node of autograd.

    Parameters do not pass through the node. The backward graph accumulates their gradients, so the
    host cost does not grow with their number.
    """

    @staticmethod
    def forward(
        ctx: Any,
        runner: Replayer,
        slot: Slot,
        tensors: Sequence[torch.Tensor],
        *_differentiable: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Replay the forward.

        Args:
            ctx: The context that carries replayer and slot to the backward.
            runner: The replayer.
            slot: An acquired slot.
            tensors: The call's tensor arguments.
            *_differentiable: The tensors of ``slot.input_grads.positions``, for autograd alone, and
                one more that requires grad, so that the backward runs.

        Returns:
            The output tensors, or a single one if it is the whole result. They are copies, or fresh
            aliases of the static outputs if the caller is known to be done with them in time. A
            caller may rebind their ``.data`` (Megatron frees sent outputs this way) without
            touching the static memory.
        """
        runner.replay_forward(slot, tensors)
        ctx.replayed = runner, slot, slot.turn
        ctx.set_materialize_grads(False)
        results = slot.outputs
        if results.plain is not None:
            hand_out, output = results.plain
            return hand_out(output)
        outputs = tuple(results.hand_out())
        frozen = [out for i, out in enumerate(outputs) if i not in results.differentiable]
        ctx.mark_non_differentiable(*frozen)
        return outputs[0] if results.is_single else outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Replay the backward.

        The next backward overwrites the memory of the input gradients. Autograd may hold them
        longer: if several nodes read one tensor (it sums what all of them return), or if a leaf
        keeps them. So they are copied, unless the caller is known to be done with them by then.
        """
        runner, slot, turn = ctx.replayed
        if torch.is_grad_enabled():
            raise ReplayMismatchError(
                f"{slot.label}: backward(create_graph=True) asks for gradients that can be "
                "differentiated again, which a replay does not compute.\n  To do: leave "
                "create_graph out, or ask for an eager step (`step(eager=True)`)."
            )
        return (None, None, None, *runner.replay_backward(slot, turn, grads), None)


_replay_node: Callable[..., Any] = super(torch.autograd.Function, _SlotReplay).apply
"""`_SlotReplay.apply` without support for ``torch.func``, under which no chunk can be called."""
