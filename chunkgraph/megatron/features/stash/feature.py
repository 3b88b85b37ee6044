"""Manage the paged stash of one rank's experts: measure in eager steps, allocate, capture."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from chunkgraph.engine import Chunk, StepMode
from chunkgraph.errors import CaptureError, ConfigError, StashError
from chunkgraph.megatron.captured_part import CapturedPart
from chunkgraph.megatron.core.backward_pass import is_in_backward
from chunkgraph.megatron.feature import LimitedFeature, Work
from chunkgraph.megatron.features.experts.rows_in_use import moe_layers_of, watch_expert_rows
from chunkgraph.megatron.rules.features import STASH_RULES
from chunkgraph.megatron.site import Site
from chunkgraph.megatron.step import Shortage, Step
from chunkgraph.memory.stash import (
    ArenaSize,
    PagedStash,
    PageMeter,
    RowsInUse,
    Saving,
    StashOptions,
    StashStatus,
    StepReadout,
    most_at_once,
)
from chunkgraph.settings import StashConfig

if TYPE_CHECKING:
    from chunkgraph.engine import ChunkGraphs
    from chunkgraph.megatron.attached import MegatronChunkGraphs

__all__ = ["ExpertStash", "stash_options"]

_MAX_DOUBLINGS = 4
"""Maximum number of times that the margin doubles."""


class ExpertStash(LimitedFeature):
    """Stash the activations of Megatron's experts. On a rank without experts this does nothing.

    Args:
        model_chunks: All model chunks of this rank; padding is marked for all of their experts.
        num_slots: Number of slots of each chunk.
        options: See `StashOptions`.
        device: Device of the model.
        most_in_flight: Maximum number of microbatches in flight in all chunks together; None for
            the number of slots.
        are_shared: Whether the chunks share their slots.

    Attributes:
        size: Size of the arena of the last capture; None before it.
        stashes_in_backwards: Whether experts were seen to recompute in a backward. Their first
            pass has no gradients and stashes nothing.
    """

    rules = STASH_RULES

    def __init__(
        self,
        model_chunks: Sequence[nn.Module],
        num_slots: Sequence[int],
        options: StashOptions,
        device: torch.device,
        *,
        most_in_flight: int | None = None,
        are_shared: bool = False,
    ) -> None:
        layers = moe_layers_of([m for chunk in model_chunks for m in chunk.modules()])
        self.options = options
        self.size: ArenaSize | None = None
        self.has_experts = bool(layers)
        self.stashes_in_backwards = False
        # Number of slots whose forwards stash, for each chunk.
        skips = options.skips_single_slots and not are_shared
        self._num_slots = tuple(0 if skips and count == 1 else count for count in num_slots)
        self._num_distinct_slots = max(num_slots) if are_shared else sum(self._num_slots)
        self._most_in_flight = most_in_flight
        self._device = device
        self._saving = Saving(options.page_bytes, prefetches=options.prefetches)
        self._saving.meter = PageMeter(len(self._num_slots), device)
        self._required_pages = 0  # as measured by steps that ran out of pages
        self._num_grown = 0  # number of captures with a larger arena
        self._num_requests = 0  # of more pages, on all ranks together
        # Readouts of the last replayed step and of the one before it.
        self._steps: tuple[StepReadout, StepReadout] | None = None
        self._engine: ChunkGraphs | None = None
        self._rank = 0
        self._undo: Callable[[], None] = lambda: None
        if layers:
            self._undo = watch_expert_rows(layers, lambda: self._saving.mode != "off", self._scope)

    def _scope(
        self, rows: RowsInUse, parameters: Collection[torch.Tensor], name: str
    ) -> AbstractContextManager[None]:
        if is_in_backward():
            self.stashes_in_backwards = True
        return self._saving.scope(rows, parameters, name)

    @classmethod
    def prepare(cls, site: Site, _undo: ExitStack) -> None:
        """Refuse options that exclude each other."""
        stash = site.stash
        if stash is None:
            return
        if stash.skips_single_slots and site.options.shared_slots:
            raise ConfigError(
                "StashOptions(skips_single_slots=True) with shared slots: no slot belongs to a "
                "single chunk. Turn one of them off."
            )

    @classmethod
    def of(cls, site: Site, undo: ExitStack) -> Self | None:
        """Apply if `attach` has a stash, also on ranks without experts."""
        if site.stash is None:
            return None
        # All chunks share the pages, even if they do not share slots. Slots that the user requests
        # may all be in use.
        most = site.place.num_slots(are_shared=True)[0] if site.requested_slots is None else None
        stash = cls(
            site.chunks,
            site.num_slots,
            site.stash,
            site.device,
            most_in_flight=most,
            are_shared=site.options.shared_slots,
        )
        undo.callback(stash.detach)
        return stash

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Keep the engine, to check whether there are graphs."""
        self._engine, self._rank = graphs.engine, graphs.site.place.rank

    def wrap(self, part: CapturedPart, chunk: Chunk) -> Chunk:
        """Run each forward of the chunk in the current mode, and attribute it to the chunk."""
        forward, index = chunk.forward, part.index

        def measured(*args: Any, **kwargs: Any) -> Any:
            mode = self._saving.mode
            if mode == "stash" and not self._num_slots[index]:
                mode = "off"
            with self._saving.during(mode), self._saving.forward(index):
                return forward(*args, **kwargs)

        return replace(chunk, forward=measured)

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Begin and end the counts of a replayed step; measure an eager step before the capture.

        In an eager step autograd saves tensors as usual. At the end of a replayed step the counts
        of its backwards are sent to the host.
        """
        if not step.is_training:
            yield
        elif step.is_replayed:
            self._begin_replays()
            yield
            if self._steps is not None:
                self._steps[0].end()
        else:
            is_captured = self._engine is not None and self._engine.report is not None
            if not is_captured:
                self.release()  # a capture that failed on another rank also freed the graphs here
            with self._saving.during("off" if is_captured else "measure"):
                yield

    def around(self, work: Work) -> AbstractContextManager[None]:
        """Stash in captures; in eager passes of ``verify`` autograd saves tensors as usual."""
        if work == "session":
            return nullcontext()
        return self.capturing() if work == "capture" else self._saving.during("off")

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Allocate the pages, and make experts save into them.

        Raises:
            CaptureError: No eager step measured the number of pages.
            StashError: A stashed tensor is read by no backward.
        """
        if not self.has_experts:
            yield
            return
        self._allocate()
        try:
            with self._saving.during("stash"):
                yield
        except BaseException:
            self._saving.forget_waiting()
            self.release()
            raise
        self._saving.check_all_read()

    def _begin_replays(self) -> None:
        if self._saving.stash is not None and self._steps is not None:
            self._saving.stash.arena.forget_overflow()
            before, now = self._steps
            now.begin()
            self._steps = now, before

    def forwards_done(self, step: Step) -> None:
        """Start copying the counts of a replayed step to the host."""
        if step.is_replayed and self._steps is not None and not self.stashes_in_backwards:
            self._steps[0].end_forwards()

    def forwards_resumed(self) -> None:
        """Copy the counts again when the step ends."""
        if self._steps is not None:
            self._steps[0].resume_forwards()

    def status(self) -> StashStatus | None:
        """Return the counts after the last forward of the last replayed step; None without pages.

        Waits for that forward, not for the backwards that follow.
        """
        return self._steps[0].status() if self._steps is not None else None

    def num_short_late(self) -> int:
        """Return how many tensors of the previous step found no page after its `status`."""
        return self._steps[1].num_short_late() if self._steps is not None else 0

    def num_pages_left(self, *, steps_ago: int = 1) -> int:
        """Return how many pages a replayed step did not free; waits for the end of the step.

        Args:
            steps_ago: 0 for the last replayed step, 1 for the one before it.
        """
        return self._steps[steps_ago].num_pages_left() if self._steps is not None else 0

    def shortage(self, mode: StepMode) -> Shortage | None:
        """Return how many tensors of a replayed step found no page; None for an eager step."""
        if mode is not StepMode.REPLAY:
            return None
        status = self.status()
        short = status.num_short if status is not None else 0
        text = ""
        if status is not None and short and self.size is not None:
            text = (
                f"{short} saved tensors did not fit in the stash (it has "
                f"{self.size.total_pages} pages of {self.size.page_bytes} bytes, "
                f"{status.num_peak_pages} were needed)"
            )
        is_at_limit = status is not None and bool(short) and not self.can_grow(status)
        # The late counts are those of the previous step: this step's backwards still run.
        late = (self.num_pages_left(), self.num_short_late())
        limit = "stash.max_bytes or stash.max_recaptures"
        return Shortage("stash pages", short, text, is_at_limit, limit, late)

    def answer(self, local: Shortage, largest: Shortage) -> None:
        """Request more pages for the next capture, also on a rank that had just enough.

        Raises:
            StashError: On all ranks: pages ran out and ``on_overflow`` is ``raise``; or, in the
                previous step, a tensor found no page after the last forward or a page was not
                freed.
        """
        (left, late), (most_left, most_late) = local.late, largest.late
        if most_left or most_late:  # all ranks raise below
            self.drop_step()
        if most_left:
            raise StashError(
                f"Rank {self._rank}: {left} pages of the stash were not freed in the previous step "
                f"(on one rank {most_left}), although every microbatch ran its backward. Please "
                "report it; stash.enabled=false trains without the stash."
            )
        if most_late:
            raise StashError(
                f"Rank {self._rank}: {late} tensors did not fit in the stash in the previous step "
                f"(on one rank {most_late}) after its last forward, when nothing should be "
                "stashed: its gradients were wrong. If a custom layer recomputes experts in the "
                "backward, train without the stash (stash.enabled=false), or without this layer."
            )
        if not largest.amount:
            return
        if self.options.on_overflow == "raise":
            raise StashError(
                "Pages of the stash ran out in this step: "
                f"{local.text or 'another rank had no room'}. Its gradients are wrong; the "
                "optimizer has not used them.\n  To do: raise stash.headroom or stash.max_bytes, "
                "or set stash.on_overflow=rerun."
            )
        if largest.is_at_limit:
            return
        self._num_requests += 1
        status = self.status()
        if status is not None:
            self.grow(status)

    def can_grow(self, status: StashStatus) -> bool:
        """Return whether the arena may grow after a step with this status."""
        assert self.size is not None
        if self._num_requests >= self.options.max_recaptures:
            return False
        return self._limited(self._pages_after(status)) > self.size.num_pages

    def grow(self, status: StashStatus) -> None:
        """Allocate more pages at the next capture, after a step with this status."""
        self._required_pages = max(self._required_pages, self._pages_after(status))

    def drop_step(self) -> None:
        """Discard the tensors that a step stashed and that no backward will read."""
        for step in self._steps or ():
            step.begin()
        if self._saving.stash is not None:
            self._saving.stash.arena.reset()

    def release(self) -> None:
        """Free the pages; the graphs that used them no longer exist.

        Waits for the last step that used them and warns about its late counts, which no later step
        checks.
        """
        steps, self._steps, self._saving.stash = self._steps, None, None
        if steps is None:
            return
        short, left = steps[0].num_short_late(), steps[0].num_pages_left()
        if short or left:
            warnings.warn(
                f"In the last replayed step {short} tensors did not fit in the stash after its "
                f"last forward, and {left} pages were not freed: its gradients were wrong, and the "
                "optimizer may have used them. Train without the stash (stash.enabled=false), and "
                "please report it.",
                stacklevel=2,
            )

    def detach(self) -> None:
        """Free the pages and restore the experts' forwards."""
        self.release()
        self._undo()
        self._undo = lambda: None

    def full_bytes(self) -> int:
        """Return the measured bytes that slots would hold for all rows without the stash."""
        assert self._saving.meter is not None
        full_bytes = self._saving.meter.full_bytes
        return most_at_once(self._num_slots, full_bytes, self._num_distinct_slots)

    def _allocate(self) -> None:
        self.release()  # pages of a session that failed on another rank
        options, meter = self.options, self._saving.meter
        assert meter is not None
        if self._saving.ambiguous:
            shapes = ", ".join(str(shape) for shape in sorted(self._saving.ambiguous))
            warnings.warn(
                f"Experts save tensors of the shapes {shapes} for the backward, which are also "
                "shapes of weights: they are not stashed, since copies of weights look the same. "
                "Another moe_expert_capacity_factor gives them another number of rows.",
                stacklevel=2,
            )
            self._saving.ambiguous.clear()
        if options.initial_bytes is not None:
            pages = options.initial_bytes // options.page_bytes
        elif meter.was_used:
            pages = meter.pages_for(self._num_slots, options.headroom, self._most_in_flight)
        else:
            raise CaptureError(
                "The number of pages that the stash needs was never measured: no step ran eagerly "
                "before the capture. Train with num_warmup_steps=1 or more, or set the stash's "
                "initial_bytes."
            )
        if self.size is not None and self._limited(self._required_pages) > self.size.num_pages:
            self._num_grown += 1
        self.size = ArenaSize(
            options.page_bytes,
            self._limited(max(pages, self._required_pages)),
            options.spill_bytes // options.page_bytes,
        )
        self._saving.stash = PagedStash(self.size, self._device, options.kernels)
        arena = self._saving.stash.arena
        self._steps = StepReadout(arena), StepReadout(arena)

    def _pages_after(self, status: StashStatus) -> int:
        assert self.size is not None
        # The margin doubles at every growth: recaptures are limited, and loads drift.
        factor = 2 ** min(self._num_grown + 1, _MAX_DOUBLINGS)
        margin = max(self.options.headroom - 1.0, 0.0) * factor
        pages = math.ceil(status.num_peak_pages * (1.0 + margin))
        meter = self._saving.meter
        if meter is not None and meter.was_used:  # the slots can never use more
            most = meter.most_pages(self._num_slots, self._most_in_flight)
            pages = min(pages, max(most, status.num_peak_pages))
        return pages - self.size.num_spill_pages

    def _limited(self, pages: int) -> int:
        if self.options.max_bytes is None:
            return pages
        return min(pages, self.options.max_bytes // self.options.page_bytes)


def stash_options(stash: StashConfig | None) -> StashOptions | None:
    """Return the options of a configuration's or command line's stash; None without a stash."""
    if stash is None or not stash.enabled:
        return None
    return StashOptions(initial_bytes=stash.initial_bytes, max_bytes=stash.max_bytes)
