"""Manage the paged stash of one rank's experts: measure in eager steps, allocate, capture."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from chunkgraph.engine import Chunk, StepMode
from chunkgraph.engine.agreement import Agree
from chunkgraph.errors import CaptureError
from chunkgraph.megatron.core.capturing import is_in_backward
from chunkgraph.megatron.feature import LimitedFeature, Shortage, Step, Work
from chunkgraph.megatron.features.experts.rows_in_use import moe_layers_of, watch_expert_rows
from chunkgraph.megatron.model_part import ModelPart
from chunkgraph.megatron.rules.features import STASH_RULES
from chunkgraph.megatron.site import Site
from chunkgraph.memory.stash import PagedStash, PageMeter, RowsInUse, Saving, StashStatus
from chunkgraph.settings import StashConfig

if TYPE_CHECKING:
    from chunkgraph.engine import ChunkGraphs
    from chunkgraph.megatron.attachment import MegatronChunkGraphs

_ROWS_PER_PAGE = 4  # of the widest rows; each tensor wastes half a page
_MARGIN = 0.1
"""Additional pages, as a share of what was needed. It doubles whenever pages ran out."""
_MAX_DOUBLINGS = 4


class ExpertStash(LimitedFeature):
    """Stash the activations of Megatron's experts. On a rank without experts this does nothing.

    Args:
        model_chunks: All model chunks of this rank; padding is marked for all of their experts.
        num_slots: Number of slots of each chunk.
        config: Sizes of the stash.
        device: Device of the model.
        most_in_flight: Maximum number of microbatches in flight in all chunks together; None for
            the number of slots.
        are_shared: Whether the chunks share their slots.

    Attributes:
        page_bytes: Bytes of a page.
        num_pages: Number of pages of the last capture; 0 before it.
        stashes_in_backwards: Whether experts were seen to recompute in a backward. Their first
            pass has no gradients and stashes nothing.
    """

    rules = STASH_RULES

    def __init__(
        self,
        model_chunks: Sequence[nn.Module],
        num_slots: Sequence[int],
        config: StashConfig,
        device: torch.device,
        *,
        most_in_flight: int | None = None,
        are_shared: bool = False,
    ) -> None:
        layers = moe_layers_of([m for chunk in model_chunks for m in chunk.modules()])
        self.config = config
        self.page_bytes = _page_bytes(layers)
        self.num_pages = 0
        self.has_experts = bool(layers)
        self.stashes_in_backwards = False
        self._num_distinct_slots = max(num_slots) if are_shared else sum(num_slots)
        self._num_in_flight = sum(num_slots) if most_in_flight is None else most_in_flight
        self._device = device
        self._meter = PageMeter(tuple(num_slots), device)
        self._saving = Saving(self.page_bytes, self._meter)
        self._wanted_pages = 0  # as measured by the last replayed step
        self._required_pages = 0  # the most of steps that ran out of pages
        self._num_grown = 0  # number of captures with more pages
        self._is_sent = False  # whether the counts of this step's forwards are on their way
        self._engine: ChunkGraphs | None = None
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
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return whether there is a stash."""
        config = site.feature_options.get("stash")
        return {"stash": config is not None and config.enabled}

    @classmethod
    def of(cls, site: Site, undo: ExitStack) -> Self | None:
        """Apply if `attach` has a stash, also on ranks without experts."""
        if not site.facts().stash:
            return None
        # All chunks share the pages, even if they do not share slots. Slots that the user requests
        # may all be in use.
        most = site.place.num_slots(are_shared=True)[0] if site.requested_slots is None else None
        stash = cls(
            site.chunks,
            site.num_slots,
            site.feature_options["stash"],
            site.device,
            most_in_flight=most,
            are_shared=site.options.shared_slots,
        )
        undo.callback(stash.detach)
        return stash

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Keep the engine, to check whether there are graphs."""
        self._engine = graphs.engine

    def wrap(self, part: ModelPart, chunk: Chunk) -> Chunk:
        """Attribute the tensors of each forward to the chunk."""
        forward, index = chunk.forward, part.index

        def measured(*args: Any, **kwargs: Any) -> Any:
            measures = self._saving.mode == "measure"
            with self._meter.forward(index) if measures else nullcontext():
                return forward(*args, **kwargs)

        return replace(chunk, forward=measured)

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Begin and end the counts of a replayed step; measure an eager step before the capture.

        In an eager step autograd saves tensors as usual.
        """
        if not step.is_training:
            yield
        elif step.is_replayed:
            self._is_sent = False
            if self._saving.stash is not None:
                self._saving.stash.forget_overflow()
            yield
            self._send()
        else:
            is_captured = self._engine is not None and self._engine.report is not None
            if not is_captured:
                self.release()  # a capture that failed, here or on another rank, freed the graphs
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
        with self._saving.during("stash"):
            yield
        self._saving.check_all_read()

    def forwards_done(self, step: Step) -> None:
        """Send the counts of a replayed step to the host while backwards run."""
        if step.is_replayed and not self.stashes_in_backwards:
            self._send()

    def _send(self) -> None:
        if self._saving.stash is not None and not self._is_sent:
            self._saving.stash.send_status()
            self._is_sent = True

    def status(self) -> StashStatus | None:
        """Return the counts after the last forward of the last replayed step; None without pages.

        Waits for that forward, not for the backwards that follow.
        """
        return None if self._saving.stash is None else self._saving.stash.sent_status()

    def shortage(self, mode: StepMode) -> Shortage | None:
        """Return how many tensors of a replayed step found no page; None for an eager step."""
        if mode is not StepMode.REPLAY:
            return None
        status = self.status()
        if status is None:
            return Shortage("stash pages", 0)
        self._wanted_pages = self._pages_after(status)  # also of a rank that had just enough
        text = (
            f"{status.num_short} saved tensors did not fit in the stash (it has {self.num_pages} "
            f"pages of {self.page_bytes} bytes, {status.num_peak_pages} were needed)"
        )
        is_at_limit = bool(status.num_short) and self._wanted_pages <= self.num_pages
        return Shortage("stash pages", status.num_short, text, is_at_limit, "stash.max_bytes")

    def make_room(self, _agree: Agree) -> None:
        """Allocate more pages at the next capture."""
        self._required_pages = max(self._required_pages, self._wanted_pages)

    def drop_step(self) -> None:
        """Discard the tensors that a step stashed and that no backward will read."""
        if self._saving.stash is not None:
            self._saving.stash.reset()

    def release(self) -> None:
        """Free the pages; the graphs that used them no longer exist."""
        self._saving.stash = None
        self._saving.forget_waiting()

    def detach(self) -> None:
        """Free the pages and restore the experts' forwards."""
        self.release()
        self._undo()
        self._undo = lambda: None

    def num_bytes(self) -> int:
        """Return the bytes of the pages of the last capture; 0 before it."""
        return self.num_pages * self.page_bytes

    def full_bytes(self) -> int:
        """Return the measured bytes that slots would hold for all rows without the stash."""
        return self._meter.most_pages(self._num_distinct_slots) * self.page_bytes

    def _allocate(self) -> None:
        if self.config.initial_bytes is not None:
            pages = self.config.initial_bytes // self.page_bytes
        elif self._meter.was_used:
            pages = self._with_margin(self._meter.pages(self._num_in_flight), _MARGIN)
        else:
            raise CaptureError(
                "The number of pages that the stash needs was never measured: no step ran eagerly "
                "before the capture. Train with num_warmup_steps=1 or more, or set the stash's "
                "initial_bytes."
            )
        if self.num_pages and self._required_pages > self.num_pages:
            self._num_grown += 1
        self.release()  # pages of a session that failed on another rank
        self.num_pages = self._limited(max(pages, self._required_pages))
        self._saving.stash = PagedStash(self.page_bytes, self.num_pages, self._device)

    def _pages_after(self, status: StashStatus) -> int:
        doubled = 2 ** min(self._num_grown + 1, _MAX_DOUBLINGS)
        return self._limited(self._with_margin(status.num_peak_pages, _MARGIN * doubled))

    def _with_margin(self, pages: int, margin: float) -> int:
        wanted = math.ceil(pages * (1 + margin))
        if not self._meter.was_used:
            return wanted
        # The slots can never use more.
        return min(wanted, max(pages, self._meter.most_pages(self._num_in_flight)))

    def _limited(self, pages: int) -> int:
        limit = self.config.max_bytes
        return pages if limit is None else min(pages, limit // self.page_bytes)


def _page_bytes(layers: Sequence[Any]) -> int:
    """Return the bytes of a page for the experts of ``layers``."""
    if not layers:
        return _ROWS_PER_PAGE
    config = layers[0].config
    hidden = config.moe_ffn_hidden_size or config.ffn_hidden_size
    widest = max(hidden * (2 if config.gated_linear_unit else 1), config.hidden_size)
    return int(_ROWS_PER_PAGE * widest * config.params_dtype.itemsize)
