"""The paged stash of one rank's experts: measured in eager steps, allocated, then captured."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from chunkgraph.engine import Chunk, StepMode
from chunkgraph.errors import CaptureError, ConfigError, StashError
from chunkgraph.megatron.captured_part import CapturedPart
from chunkgraph.megatron.core.backward_pass import is_in_backward
from chunkgraph.megatron.feature import Feature
from chunkgraph.megatron.features.experts.rows_in_use import moe_layers_of, watch_expert_rows
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
from chunkgraph.settings.stash import STASH_RULES, StashSettings

if TYPE_CHECKING:
    from chunkgraph.engine import ChunkGraphs
    from chunkgraph.megatron.attached import MegatronChunkGraphs

__all__ = ["ExpertStash", "stash_options"]

_MOST_DOUBLED = 4
"""How often a margin is doubled."""


class ExpertStash(Feature):
    """What of the stash belongs to Megatron's experts. A rank without experts has one that is idle.

    Args:
        model_chunks: all of this rank's model; padding is marked for all of its experts.
        num_slots: of each chunk.
        options: see `StashOptions`.
        device: of the model.
        most_in_flight: microbatches of all chunks together; None: as many as slots.
        are_shared: whether the chunks share their slots.

    Attributes:
        size: of the pages that graphs were last captured with, or None.
        stashes_in_backwards: whether experts were seen to be computed anew there, whose first pass
            has no gradients and stashes nothing.
    """

    repeats_steps = True
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
        # Slots whose forwards stash.
        skips = options.skips_single_slots and not are_shared
        self._num_slots = tuple(0 if skips and count == 1 else count for count in num_slots)
        self._num_distinct_slots = max(num_slots) if are_shared else sum(self._num_slots)
        self._most_in_flight = most_in_flight
        self._device = device
        self._saving = Saving(options.page_bytes, prefetches=options.prefetches)
        self._saving.meter = PageMeter(len(self._num_slots), device)
        self._wanted_pages = 0  # by what a step that ran out showed
        self._num_grown = 0  # captures with them
        # Of the last step that replayed, and of the one before.
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
    def check(cls, site: Site) -> None:
        """Refuse options that exclude each other."""
        stash = site.stash
        if stash is None:
            return
        if stash.skips_single_slots and site.options.shared_slots:
            raise ConfigError(
                "StashOptions(skips_single_slots=True) with shared slots: no chunk has a slot of "
                "its own. Leave one of them out."
            )

    @classmethod
    def of(cls, site: Site) -> Self | None:
        """Apply to models that are attached with a stash, also on ranks without experts."""
        if site.stash is None:
            return None
        # Shared whether slots are or not. Of slots that were given, any may be used.
        most = site.place.num_slots(are_shared=True)[0] if site.asked_slots is None else None
        return cls(
            site.chunks,
            site.num_slots,
            site.stash,
            site.device,
            most_in_flight=most,
            are_shared=site.options.shared_slots,
        )

    def install(self, undo: ExitStack) -> None:
        """Leave the experts' forwards changed as they are until ``undo``."""
        undo.callback(self.detach)

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Follow whether there are graphs."""
        self._engine, self._rank = graphs.engine, graphs.site.place.rank

    def wrap(self, part: CapturedPart, chunk: Chunk) -> Chunk:
        """Measure the forwards of the chunk one by one."""
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
        """Stash in a step that replays; in an eager one autograd saves as always, and is measured.

        Its backwards send, at the end of a replay, what they left.
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
                self.release()  # graphs that another rank could not capture were dropped here too
            with self._saving.during("off" if is_captured else "measure"):
                yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Around captures: pages are there, and what experts save goes to them.

        Raises:
            CaptureError: how many pages are needed was never measured.
            StashError: something was stashed that no backward reads.
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

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Around eager passes beside replays: autograd saves as always."""
        with self._saving.during("off"):
            yield

    def _begin_replays(self) -> None:
        if self._saving.stash is not None and self._steps is not None:
            self._saving.stash.arena.forget_overflow()
            before, now = self._steps
            now.begin()
            self._steps = now, before

    def forwards_done(self, step: Step) -> None:
        """Send the counts of a step that replays on their way to the host, if it has them."""
        if step.is_replayed and self._steps is not None and not self.stashes_in_backwards:
            self._steps[0].end_forwards()

    def forwards_resumed(self) -> None:
        """Send the counts again when the step ends."""
        if self._steps is not None:
            self._steps[0].resume_forwards()

    def status(self) -> StashStatus | None:
        """The counts behind the last forward of the last step that replayed; None without pages.

        Waits for that forward, not for the backwards behind it.
        """
        return self._steps[0].status() if self._steps is not None else None

    def num_short_late(self) -> int:
        """Tensors that found no page in the step before, behind what `status` told of it."""
        return self._steps[1].num_short_late() if self._steps is not None else 0

    def num_pages_left(self, *, steps_ago: int = 1) -> int:
        """Pages that a replayed step did not give back, now or ``steps_ago``; waits for its end."""
        return self._steps[steps_ago].num_pages_left() if self._steps is not None else 0

    def shortage(self, mode: StepMode) -> Shortage | None:
        """Say how many tensors of a step that replays found no page."""
        if mode is not StepMode.REPLAY:
            return None
        status = self.status()
        short = status.num_short if status is not None else 0
        text = ""
        if status is not None and short and self.size is not None:
            text = (
                f"{short} saved tensors found no page of the stash (it has "
                f"{self.size.total_pages} of {self.size.page_bytes} bytes, "
                f"{status.num_peak_pages} were wanted)"
            )
        is_at_limit = status is not None and bool(short) and not self.can_grow(status)
        # Of the step before: this one's backwards are under way.
        late = (self.num_pages_left(), self.num_short_late())
        return Shortage("stash pages", short, text, is_at_limit, late)

    def answer(self, mine: Shortage, most: Shortage) -> None:
        """Want more pages at the next capture, on a rank that had just enough too.

        Raises:
            StashError: on all ranks: pages ran out, and that was to be an error; or in the step
                before, a tensor found no page or a page was not given back.
        """
        (left, late), (most_left, most_late) = mine.late, most.late
        if most_left or most_late:  # none waits for one that raised
            self.drop_step()
        if most_left:
            raise StashError(
                f"Rank {self._rank}: {left} pages of the stash were not given back in the step "
                f"before (on one rank {most_left}), though every microbatch was run backward. "
                "Please report it; stash.enabled=false trains without."
            )
        if most_late:
            raise StashError(
                f"Rank {self._rank}: {late} tensors found no page of the stash in the step before "
                f"(on one rank {most_late}) after its last forward, where nothing is stashed: its "
                "gradients were wrong. Are experts computed again in the backward, by a layer of "
                "your own? Train without the stash (stash.enabled=false), or without that."
            )
        if not most.amount:
            return
        if self.options.on_overflow == "raise":
            raise StashError(
                "Pages of the stash ran out in this step: "
                f"{mine.text or 'another rank had no room'}. Its gradients are wrong; the "
                "optimizer has not used them.\n  To do: raise stash.headroom or stash.max_bytes, "
                "or set stash.on_overflow=rerun."
            )
        status = self.status()
        if status is not None:
            self.grow(status)

    def can_grow(self, status: StashStatus) -> bool:
        """Whether more pages may be taken than there are, after a step with this status."""
        assert self.size is not None
        return self._limited(self._pages_after(status)) > self.size.num_pages

    def grow(self, status: StashStatus) -> None:
        """Take more pages at the next capture, after a step with this status."""
        self._wanted_pages = max(self._wanted_pages, self._pages_after(status))

    def drop_step(self) -> None:
        """Drop what a step stashed: nobody will read it any more."""
        for step in self._steps or ():
            step.begin()
        if self._saving.stash is not None:
            self._saving.stash.arena.reset()

    def release(self) -> None:
        """Drop the pages; the graphs that used them are gone.

        Waits for the last step that used them, behind which no other looks at what it left.
        """
        steps, self._steps, self._saving.stash = self._steps, None, None
        if steps is None:
            return
        short, left = steps[0].num_short_late(), steps[0].num_pages_left()
        if short or left:
            warnings.warn(
                f"In the last replayed step {short} tensors found no page of the stash after its "
                f"last forward, and {left} pages were not given back: its gradients were wrong, "
                "and the optimizer may have used them. Train without the stash "
                "(stash.enabled=false), and please report it.",
                stacklevel=2,
            )

    def detach(self) -> None:
        """Give the experts their own forwards back."""
        self.release()
        self._undo()
        self._undo = lambda: None

    def full_bytes(self) -> int:
        """What slots would keep of all rows without the stash, as measured."""
        assert self._saving.meter is not None
        full_bytes = self._saving.meter.full_bytes
        return most_at_once(self._num_slots, full_bytes, self._num_distinct_slots)

    def _allocate(self) -> None:
        self.release()  # of a session that another rank ended: not two of them at once
        options, meter = self.options, self._saving.meter
        assert meter is not None
        if self._saving.ambiguous:
            shapes = ", ".join(str(shape) for shape in sorted(self._saving.ambiguous))
            warnings.warn(
                f"Experts save tensors of the shapes {shapes} for the backward, which are also "
                "those of weights: they are not stashed, since they cannot be told from copies of "
                "weights. Another moe_expert_capacity_factor gives them another number of rows.",
                stacklevel=2,
            )
            self._saving.ambiguous.clear()
        if options.initial_bytes is not None:
            pages = options.initial_bytes // options.page_bytes
        elif meter.was_used:
            pages = meter.pages_for(self._num_slots, options.headroom, self._most_in_flight)
        else:
            raise CaptureError(
                "How many pages the stash needs was never measured: no step ran eagerly before the "
                "capture. Train with num_warmup_steps=1 or more, or give the stash initial_bytes."
            )
        if self.size is not None and self._limited(self._wanted_pages) > self.size.num_pages:
            self._num_grown += 1
        self.size = ArenaSize(
            options.page_bytes,
            self._limited(max(pages, self._wanted_pages)),
            options.spill_bytes // options.page_bytes,
        )
        self._saving.stash = PagedStash(self.size, self._device, options.kernels)
        arena = self._saving.stash.arena
        self._steps = StepReadout(arena), StepReadout(arena)

    def _pages_after(self, status: StashStatus) -> int:
        assert self.size is not None
        # Twice the margin of the time before: captures are few, and loads drift.
        doubled = 2 ** min(self._num_grown + 1, _MOST_DOUBLED)
        margin = max(self.options.headroom - 1.0, 0.0) * doubled
        pages = math.ceil(status.num_peak_pages * (1.0 + margin))
        meter = self._saving.meter
        if meter is not None and meter.was_used:  # more could never be used
            most = meter.most_pages(self._num_slots, self._most_in_flight)
            pages = min(pages, max(most, status.num_peak_pages))
        return pages - self.size.num_spill_pages

    def _limited(self, pages: int) -> int:
        if self.options.max_bytes is None:
            return pages
        return min(pages, self.options.max_bytes // self.options.page_bytes)


def stash_options(stash: StashConfig | None) -> StashOptions | None:
    """What a configuration or flags ask for; None: no stash."""
    if stash is None or not stash.enabled:
        return None
    values = {item.name: getattr(stash, item.name) for item in fields(StashSettings)}
    return StashOptions(**values)
