"""The interface of verify modes to the engine, and their common parts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from chunkgraph.engine.capture.graph_set import GraphSet
from chunkgraph.engine.capture.restore import writable
from chunkgraph.engine.capture.saved import SavedTensor
from chunkgraph.engine.capture.self_test import TO_DO
from chunkgraph.engine.chunk import CaptureOptions, Chunk, Host
from chunkgraph.engine.observer import NamedReplays
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.tree import Call
from chunkgraph.engine.verify.eager_pass import EagerPasses
from chunkgraph.errors import VerifyError
from chunkgraph.graphs import AddressRanges, GraphBackend

_BACKWARD_TO_DO = (
    "  To do: look for writes to the slot between its forward and its backward (an input or "
    "output changed in place, a tensor of the previous step that is still in use), or for Python "
    "state that the backward reads."
)


class Verifier(NamedReplays):
    """Check the replays of one rank in verified steps.

    In a verified step a verifier observes every replay, on the stream of the replays. For a wrong
    one, it raises what `Host.judge` raises, a VerifyError.

    Args:
        chunks: the chunks of the rank.
        samples: the captured calls, by bank.
        graphs: their graphs.
        backend: the backend of the graphs.
        host: the training loop around the chunks.
        options: the steps to verify.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        samples: Mapping[Hashable, Sequence[Call]],
        graphs: GraphSet,
        backend: GraphBackend,
        host: Host,
        options: CaptureOptions,
    ) -> None:
        super().__init__([chunk.label for chunk in chunks])
        self._chunks, self._options = tuple(chunks), options
        self._calls = {
            key: tuple(sample.emptied() for sample in calls) for key, calls in samples.items()
        }
        self._backend, self._host = backend, host
        self._graphs = graphs
        self._gradients = tuple(sinks.buffers for sinks in graphs.sinks)
        self._forget()

    def observes(self, step: int | None) -> bool:
        """Observe the steps that the options ask for."""
        limit = self._options.num_verify_steps
        return step is not None and (limit is None or step < limit)

    def begin_step(self, step: int | None) -> None:
        """Begin a verified step, replayed step ``step`` after the capture."""
        super().begin_step(step)
        self._step = step or 0

    def end_step(self, *, has_failed: bool) -> None:  # noqa: ARG002
        """Drop the data of the step, after success or failure."""
        self._forget()

    def _forget(self) -> None:
        self._passes: dict[tuple[int, Hashable], EagerPasses] = {}

    def _passes_of(self, slot: Slot) -> EagerPasses:
        c, key = slot.chunk, slot.bank
        if (c, key) not in self._passes:
            of_chunk = self._chunks[c], self._calls[key][c], self._gradients[c]
            state = self._state_of(c, key)
            self._passes[c, key] = EagerPasses(*of_chunk, state, self._backend, self._host)
        return self._passes[c, key]

    def _state_of(self, c: int, key: Hashable) -> list[torch.Tensor]:
        """Return the memory that passes of a chunk restore.

        Not the memory into which a rank receives. A module may hold an earlier input, and what
        arrives there during a pass would be lost.
        """
        received = AddressRanges()
        for slot in (slot for slots in self._graphs.slots for slot in slots):
            for tensor in slot.loaded:
                received |= self._backend.storage_ranges(tensor)
        memory = writable(self._chunks[c], self._graphs.warm_ups[key, c].written)
        return [t for t in memory if not self._backend.storage_ranges(t) & received]

    def _saved_by(self, slot: Slot) -> list[SavedTensor]:
        """Return what the slot's forward keeps, with tensors in its pool and its inputs.

        Other memory may be gone.
        """
        memory = slot.memory.pool.reserved()
        for tensor in slot.inputs.tensors:
            memory = memory | self._backend.storage_ranges(tensor)
        saved = self._graphs.saved[slot.bank, slot.chunk, slot.index]
        return [record.seen_in(memory) for record in saved]

    def _describe(self, slot: Slot, direction: str) -> str:
        return (
            f"{slot.label}: the replayed {direction} of microbatch {self.microbatch(slot)} in "
            f"replayed step {self._step} after the capture"
        )

    def _judge(self, slot: Slot, direction: str, problem: str, what: str, layer: str) -> None:
        """Report a wrong replay, ``forward`` or ``backward``, to the host."""
        error = VerifyError(
            f"{self._describe(slot, direction)} {problem}.\n  {what}\n  first layer {layer}\n"
            f"{TO_DO if direction == 'forward' else _BACKWARD_TO_DO}"
        )
        self._host.judge(error)
