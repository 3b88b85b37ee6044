"""What a slot keeps from its forward to its backward, as bytes that another slot can take.

The slots of a chunk are captured one like the other, so what they keep lies at the same offsets of
their pools, and the graphs of one can go on with the bytes of another. Offsets are compared, and
every capture session tests the bytes: a graph may hold an address of its own slot in its data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from chunkgraph.engine.chunk import Host
from chunkgraph.engine.layout import memory_of
from chunkgraph.engine.slot import Slot
from chunkgraph.graphs import AddressRanges, GraphBackend, tensor_at


@dataclass(frozen=True)
class SlotPage:
    """The bytes that one variant of a slot keeps.

    Attributes:
        parts: Those that its forward wrote into its pool, and those of its static inputs.
        layout: Offset and size of each part; None if an offset is unknown.
    """

    parts: tuple[torch.Tensor, ...]
    layout: tuple[tuple[int, int], ...] | None

    @staticmethod
    def of(slot: Slot) -> SlotPage:
        """Return the page of a captured slot."""
        pool, kept = slot.memory.pool, slot.memory.kept
        own = pool.relative(kept)
        of_inputs = [(0, place) for t in slot.inputs.tensors if (place := memory_of(t)) is not None]
        places = [*(own or ((0, place) for place in kept)), *of_inputs]
        parts = tuple(tensor_at(r.start, r.end - r.start, pool.device) for _, r in places)
        layout = tuple((offset, r.end - r.start) for offset, r in places)
        return SlotPage(parts, None if own is None else layout)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes."""
        return sum(part.numel() for part in self.parts)

    def on(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the place of each part in one piece of memory."""
        return memory[: self.num_bytes].split([part.numel() for part in self.parts])


def layout_problem(slots: Sequence[Slot]) -> str:
    """Return why what one slot keeps cannot be moved into another, by their layouts, or ""."""
    first, pool = slots[0], slots[0].memory.pool
    for i, tensor in enumerate(first.inputs.tensors):
        if type(tensor) is not torch.Tensor or tensor.device != pool.device:
            return f"its input {i} is a {type(tensor).__name__} on {tensor.device}"
    places = (memory_of(t) for t in first.input_grads.tensors if t is not None)
    grads = AddressRanges(place for place in places if place is not None)
    if len(first.graphs) == 2 and grads & pool.reserved():
        return "its backward leaves input gradients where the forward saved something"
    layouts = {SlotPage.of(slot).layout for slot in slots}
    if None in layouts:
        return "its memory is in no arena (a backend that was made without can_sleep)"
    return "its slots keep memory at different offsets" if len(layouts) > 1 else ""


def page_moved(
    slot: Slot,
    other: Slot,
    backend: GraphBackend,
    host: Host,
    around: Callable[[], AbstractContextManager[object]],
) -> Slot:
    """Run another forward in another slot, move a slot's page there, and poison its source.

    So a backward differs that reads anything but the page: other inputs and random numbers.

    Args:
        slot: A slot after the forward of the sampled call.
        other: The other slot, whose static inputs hold that call.
        backend: The backend of the graphs.
        host: The training loop around the chunks.
        around: Returns a context that restores what a forward writes outside of the graphs.

    Returns:
        The other slot.
    """
    with backend.preserve_random_state(host.generators()), host.preserving(), around():
        for generator in (backend.default_generator, *host.generators()):
            generator.manual_seed(generator.initial_seed() + 1)
        inputs = other.inputs.tensors
        # Activations in reverse, or tokens; other integers, such as offsets, stay in order.
        kind = next((t.dtype for t in inputs if t.is_floating_point()), torch.int64)
        for tensor in (t for t in inputs if t.dtype == kind):
            tensor.copy_(tensor.flip([*range(tensor.dim())]))
        other.graphs["F"].replay()
    for source, target in zip(SlotPage.of(slot).parts, SlotPage.of(other).parts, strict=True):
        target.copy_(source)
        source.fill_(0xFF)
    return other
