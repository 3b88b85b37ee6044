"""Stash the tensors that autograd saves inside a scope, and reload them in the backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from chunkgraph.errors import StashError
from chunkgraph.memory.stash.paged_stash import PagedStash, Stashed
from chunkgraph.memory.stash.rows import RowLayout, RowsInUse

_MIN_ROW_BYTES = 64
"""Smaller rows are not stashed: a page table would cost as much."""

SavingMode = Literal["off", "measure", "stash"]


class PageMeter:
    """Measure on the device, in eager steps, the most pages that one forward of each chunk needs.

    Args:
        num_slots: Number of slots of each chunk.
        device: Device of the counters.

    Attributes:
        was_used: Whether a forward was measured.
    """

    def __init__(self, num_slots: Sequence[int], device: torch.device) -> None:
        self.was_used = False
        self._num_slots = num_slots
        self._now = torch.zeros(1, dtype=torch.int64, device=device)
        self._peaks = torch.zeros(len(num_slots), dtype=torch.int64, device=device)
        self._limit, self._limits = 0, [0] * len(num_slots)

    @contextmanager
    def forward(self, chunk: int) -> Iterator[None]:
        """Enclose one forward of a chunk."""
        self._limit = 0
        self._now.zero_()
        yield
        peak = self._peaks[chunk : chunk + 1]
        peak.copy_(torch.maximum(peak, self._now))
        self._limits[chunk] = max(self._limits[chunk], self._limit)
        self.was_used = True

    def add(self, rows: RowsInUse, layout: RowLayout) -> None:
        """Count a tensor that would be stashed."""
        self._now.add_((rows.total + (layout.rows_per_page - 1)) // layout.rows_per_page)
        self._limit += layout.max_pages

    def pages(self, num_in_flight: int) -> int:
        """Return the pages for microbatches in flight, each with its chunk's measured maximum.

        Waits for the device.

        Args:
            num_in_flight: Maximum number of microbatches in flight in all chunks together.
        """
        return self._at_once(self._peaks.tolist(), num_in_flight)

    def most_pages(self, num_in_flight: int) -> int:
        """Return `pages` if all rows were in use; 0 if no forward was measured."""
        return self._at_once(self._limits, num_in_flight)

    def _at_once(self, each: Sequence[int], num_in_flight: int) -> int:
        total = 0
        for pages, count in sorted(zip(each, self._num_slots, strict=True), reverse=True):
            total += pages * min(count, num_in_flight)
            num_in_flight -= min(count, num_in_flight)
        return total


@dataclass
class _SavedTensor:
    """A stashed tensor that one or more autograd nodes hold, with its version."""

    stashed: Stashed | None
    storage: StorageWeakRef
    version: int
    name: str
    shape: torch.Size
    num_uses: int = 0
    reloaded: torch.Tensor | None = None


@dataclass(frozen=True)
class _Columns:
    """Some columns of a stashed tensor's rows, held by an autograd node."""

    saved: _SavedTensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Saving:
    """Choose and stash the tensors that autograd saves in a scope.

    A contiguous tensor is stashed if it is not a parameter and has the scope's rows, or is a range
    of rows of such a tensor. All rows may be flattened into one dimension. For a tensor that is
    some columns of such a matrix (a split-off gate), the whole matrix is stashed once. Autograd
    saves all other tensors as usual.

    Args:
        page_bytes: Bytes of a page of the stash. Wider rows are not stashed.
        meter: The meter of ``measure``.

    Attributes:
        mode: ``off``: autograd saves as usual. ``measure``: likewise, and the meter counts.
            ``stash``: save to ``stash``.
        stash: The stash of ``stash``.
    """

    def __init__(self, page_bytes: int, meter: PageMeter | None = None) -> None:
        self.mode: SavingMode = "off"
        self.stash: PagedStash | None = None
        self._page_bytes = page_bytes
        self._meter = meter
        self._waiting: dict[int, _SavedTensor] = {}

    @contextmanager
    def during(self, mode: SavingMode) -> Iterator[None]:
        """Set the mode inside the block."""
        previous, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = previous

    @contextmanager
    def scope(
        self, rows: RowsInUse, parameters: Collection[torch.Tensor], name: str
    ) -> Iterator[None]:
        """Stash or measure, depending on the mode, the tensors with ``rows`` that autograd saves.

        The backward must not depend on rows that are not in use; it reads zeros there.

        Args:
            rows: Rows of the tensors to stash.
            parameters: Tensors that are never stashed, nor any tensor with their shape.
            name: Name of the layer in errors.
        """
        if self.mode == "off" or not torch.is_grad_enabled():
            yield
            return
        chosen = _Choice(rows, parameters, self._page_bytes)
        pack = self._packing(chosen, name)
        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield

    def check_all_read(self) -> None:
        """Check after captures that backwards read every stashed tensor.

        Raises:
            StashError: A tensor was not read; its pages would leak in every replay.
        """
        if not self._waiting:
            return
        names = sorted({saved.name for saved in self._waiting.values()})
        self.forget_waiting()
        raise StashError(
            f"{', '.join(names)}: no backward read some stashed tensors, so their pages would "
            "never be freed. This happens if the loss does not depend on a part of the experts' "
            "result. Train without the stash, or remove that part from the model."
        )

    def forget_waiting(self) -> None:
        """Forget the stashed tensors that no backward read, after a capture failed."""
        self._waiting.clear()

    def _packing(self, chosen: _Choice, name: str) -> Callable[[torch.Tensor], Any]:
        entries: dict[tuple[Any, ...], _SavedTensor] = {}
        stash, meter = (None, self._meter) if self.mode == "measure" else (self.stash, None)

        def pack(tensor: torch.Tensor) -> Any:
            whole = _whole_rows(tensor)
            rows = chosen.rows_of(whole)
            if rows is None:
                return tensor
            key = whole.data_ptr(), tuple(whole.shape), whole.dtype
            saved = entries.get(key)
            if saved is None or saved.storage.expired() or saved.version != tensor._version:
                # In one dimension, rows lie one after the other.
                by_rows = whole.detach().view(rows.num_rows, -1) if whole.dim() == 1 else whole
                if meter is not None:
                    meter.add(rows, RowLayout.of(by_rows, self._page_bytes))
                stashed = None if stash is None else stash.stash(by_rows, rows)
                storage = StorageWeakRef(tensor.untyped_storage())
                saved = _SavedTensor(stashed, storage, tensor._version, name, whole.shape)
                entries[key] = saved
            if stash is None:
                return tensor
            saved.num_uses += 1
            self._waiting[id(saved)] = saved
            if whole is tensor:
                return saved
            return _Columns(saved, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

        return pack

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Columns):
            return self._unpack(packed.saved).as_strided(packed.shape, packed.stride, packed.offset)
        if not isinstance(packed, _SavedTensor):
            return packed
        if not packed.num_uses:
            raise StashError(
                f"{packed.name}: a backward read a stashed tensor for the second time. The stash "
                "frees its pages after the first time: do not retain the graph of a chunk."
            )
        assert self.stash is not None
        assert packed.stashed is not None
        if packed.reloaded is None:
            packed.reloaded = self.stash.reload(packed.stashed)
        tensor = packed.reloaded.view(packed.shape)
        packed.num_uses -= 1
        if not packed.num_uses:
            self.stash.give_back(packed.stashed)
            packed.reloaded = None
            self._waiting.pop(id(packed), None)
        return tensor


class _Choice:
    """Choose the saved tensors that consist of rows of the scope."""

    def __init__(
        self, rows: RowsInUse, parameters: Collection[torch.Tensor], page_bytes: int
    ) -> None:
        self._rows = rows
        self._page_bytes = page_bytes
        self._parts: dict[tuple[int, int], RowsInUse] = {}
        self._addresses = {p.untyped_storage().data_ptr() for p in parameters}
        # Copies of weights (in another dtype, or transposed) are not rows, for any number of rows.
        shapes = [tuple(p.shape) for p in parameters]
        flat = [(p.numel(),) for p in parameters]
        self._shapes = {*shapes, *(shape[::-1] for shape in shapes), *flat}

    def rows_of(self, tensor: torch.Tensor) -> RowsInUse | None:
        """Return the rows in use of ``tensor``; None if it does not consist of rows."""
        if not tensor.dim() or not tensor.numel() or type(tensor) is not torch.Tensor:
            return None
        storage = tensor.untyped_storage()
        if not tensor.is_contiguous() or storage.data_ptr() in self._addresses:
            return None
        if tuple(tensor.shape) in self._shapes:
            return None
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        if start % 8 or not self._rows.num_rows:
            return None
        if tensor.dim() == 1:
            width, rest = divmod(tensor.numel(), self._rows.num_rows)
            is_integer = not rest and _MIN_ROW_BYTES <= width * size <= self._page_bytes
            return self._rows if is_integer else None
        row_bytes = tensor.numel() // tensor.shape[0] * size
        if not _MIN_ROW_BYTES <= row_bytes <= self._page_bytes:
            return None
        if tensor.shape[0] == self._rows.num_rows:
            return self._rows
        if storage.nbytes() != self._rows.num_rows * row_bytes or start % row_bytes:
            return None
        first, num_rows = start // row_bytes, tensor.shape[0]
        part = self._parts.get((first, num_rows))
        if part is None:
            part = self._parts[first, num_rows] = self._rows.part(first, num_rows)
        return part


def _whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the matrix whose columns ``tensor`` is, if it fills the storage; else ``tensor``."""
    if tensor.dim() != 2 or tensor.is_contiguous() or not tensor.numel():
        return tensor
    storage, size = tensor.untyped_storage(), tensor.element_size()
    (num_rows, _), (width, step) = tensor.shape, tensor.stride()
    if step != 1 or storage.nbytes() != num_rows * width * size:
        return tensor
    if tensor.storage_offset() + tensor.shape[1] > width:
        return tensor
    return tensor.detach().as_strided((num_rows, width), (width, 1), 0)
