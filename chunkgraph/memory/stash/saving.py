"""What autograd saves inside a scope goes to the stash and comes back for the backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from chunkgraph.errors import ConfigError, StashError
from chunkgraph.memory.stash.meter import PageMeter
from chunkgraph.memory.stash.paged_stash import PagedStash, Reload, Stashed, row_layout
from chunkgraph.memory.stash.rows import RowLayout, RowsInUse

__all__ = ["MIN_ROW_BYTES", "Saving", "SavingMode"]

MIN_ROW_BYTES = 64
"""Rows below this stay where they are: a page table would cost as much."""

SavingMode = Literal["off", "measure", "stash"]


class _Group:
    """What was stashed in one scope; ``before`` it in the same forward was another.

    A backward comes to the groups from the last to the first.
    """

    def __init__(self, before: _Group | None) -> None:
        self.before = before
        self.members: list[_Kept] = []
        self.is_asked_for = False


class _Kept:
    """A stashed tensor as autograd holds it: by one or more nodes."""

    def __init__(self, stashed: Stashed, name: str, shape: torch.Size, group: _Group) -> None:
        self.stashed = stashed
        self.name = name
        self.shape = shape
        self.group = group
        self.num_uses = 0
        self.loaded: Reload | None = None


@dataclass(frozen=True)
class _Columns:
    """Some columns of a stashed tensor's rows, as autograd holds them."""

    kept: _Kept
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Known:
    """A tensor that was stashed already in this scope."""

    storage: StorageWeakRef
    version: int
    kept: _Kept


class Saving:
    """Decides in a scope what becomes of each tensor that autograd saves there.

    Stashed are contiguous tensors that have the scope's rows, or are some of the rows of such a
    tensor, and that are not parameters; all rows may lie one after the other in one dimension. Of
    some columns of such a tensor (a gate that was split off) all are stashed, once. The rest is
    saved as always.

    Args:
        page_bytes: of the stash.
        min_row_bytes: smaller rows are not stashed.
        prefetches: whether a backward that comes to a scope starts to reload what was stashed in
            the scope before, which it needs next.

    Attributes:
        mode: ``off``: autograd saves as always; ``measure``: so it does, and ``meter`` counts;
            ``stash``: to ``stash``.
        meter: where to count.
        stash: where to stash.
        ambiguous: shapes of what was not stashed because a parameter has the same.
    """

    def __init__(
        self, page_bytes: int, *, min_row_bytes: int = MIN_ROW_BYTES, prefetches: bool = False
    ) -> None:
        self.mode: SavingMode = "off"
        self.meter: PageMeter | None = None
        self.stash: PagedStash | None = None
        self.ambiguous: set[tuple[int, ...]] = set()
        self._page_bytes = page_bytes
        self._min_row_bytes = min_row_bytes
        self._prefetches = prefetches
        self._waiting: dict[int, _Kept] = {}
        self._last: _Group | None = None  # of the forward that runs

    @contextmanager
    def during(self, mode: SavingMode) -> Iterator[None]:
        """Another mode for a while."""
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before

    @contextmanager
    def forward(self, chunk: int) -> Iterator[None]:
        """Around a chunk's forward; what is stashed outside of one is never prefetched."""
        self._last = _Group(None)
        measures = self.mode == "measure" and self.meter is not None
        try:
            with self.meter.forward(chunk) if measures and self.meter else nullcontext():
                yield
        finally:
            self._last = None

    @contextmanager
    def scope(
        self, rows: RowsInUse, parameters: Collection[torch.Tensor], name: str
    ) -> Iterator[None]:
        """Inside, what autograd saves of ``rows`` is stashed (or measured, by the mode).

        The backward must not depend on rows that are not in use: it finds zeros there.

        Args:
            rows: of the tensors to stash.
            parameters: never stashed, nor what has their shape.
            name: of the layer, in errors.
        """
        if self.mode == "off" or not torch.is_grad_enabled():
            yield
            return
        chosen = _Choice(rows, parameters, self._min_row_bytes, self.ambiguous)
        known: dict[tuple[Any, ...], _Known] = {}
        pack = self._measuring(chosen, name) if self.mode == "measure" else None
        pack = pack or self._stashing(chosen, known, name)
        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield

    def check_all_read(self) -> None:
        """After captures: every stashed tensor was read by a backward.

        Raises:
            StashError: one was not; its pages would be lost in every replay.
        """
        if not self._waiting:
            return
        names = sorted({kept.name for kept in self._waiting.values()})
        self.forget_waiting()
        raise StashError(
            f"{', '.join(names)}: saved tensors were stashed that no backward read, so that their "
            "pages would never be free again. A part of the experts' result that the loss does not "
            "depend on does this. Train without the stash, or take that part out of the model."
        )

    def forget_waiting(self) -> None:
        """What was stashed so far will not be read: a capture failed."""
        self._waiting.clear()

    def _measuring(self, chosen: _Choice, name: str) -> Callable[[torch.Tensor], Any]:
        seen: dict[tuple[Any, ...], StorageWeakRef] = {}
        meter = self.meter
        assert meter is not None

        def pack(tensor: torch.Tensor) -> Any:
            whole = _whole_rows(tensor)
            part = chosen.rows_of(whole)
            if part is not None:
                before = seen.get(_key(whole))
                if before is None or before.expired():
                    seen[_key(whole)] = StorageWeakRef(tensor.untyped_storage())
                    meter.add(part, _layout_of(_by_rows(whole, part), self._page_bytes, name))
            return tensor

        return pack

    def _stashing(
        self, chosen: _Choice, known: dict[tuple[Any, ...], _Known], name: str
    ) -> Callable[[torch.Tensor], Any]:
        stash = self.stash
        assert stash is not None
        group = _Group(self._last)
        if self._last is not None:
            self._last = group

        def pack(tensor: torch.Tensor) -> Any:
            whole = _whole_rows(tensor)
            part = chosen.rows_of(whole)
            if part is None:
                return tensor
            before = known.get(_key(whole))
            is_same = before is not None and not before.storage.expired()
            if before is None or not is_same or before.version != tensor._version:
                stashed = stash.stash(_by_rows(whole, part), part)
                kept = _Kept(stashed, name, whole.shape, group)
                group.members.append(kept)
                storage = StorageWeakRef(tensor.untyped_storage())
                before = known[_key(whole)] = _Known(storage, tensor._version, kept)
                self._waiting[id(kept)] = kept
            before.kept.num_uses += 1
            if whole is tensor:
                return before.kept
            offset = int(tensor.storage_offset())
            return _Columns(before.kept, tensor.shape, tensor.stride(), offset)

        return pack

    def _unpack(self, held: Any) -> torch.Tensor:
        if isinstance(held, _Columns):
            return self._unpack(held.kept).as_strided(held.shape, held.stride, held.offset)
        if not isinstance(held, _Kept):
            return held
        if not held.num_uses:
            raise StashError(
                f"{held.name}: a backward read a stashed tensor for the second time. The stash "
                "gives its pages back at the first: do not retain the graph of a chunk."
            )
        assert self.stash is not None
        if held.loaded is None:
            held.loaded = self.stash.reload_now(held.stashed)
        tensor = held.loaded.tensor().view(held.shape)
        if not held.group.is_asked_for:
            held.group.is_asked_for = True
            self._prefetch(held.group.before)
        held.num_uses -= 1
        if not held.num_uses:
            self.stash.give_back(held.stashed)
            held.loaded = None
            self._waiting.pop(id(held), None)
        return tensor

    def _prefetch(self, group: _Group | None) -> None:
        """Start to reload a group; where nothing was stashed in it, the one before."""
        while group is not None and not group.members:
            group = group.before
        if group is None or group.is_asked_for or not self._prefetches:
            return
        assert self.stash is not None
        wanted = [kept for kept in group.members if kept.num_uses and kept.loaded is None]
        reloads = self.stash.reload_ahead([kept.stashed for kept in wanted])
        for kept, loaded in zip(wanted, reloads, strict=True):
            kept.loaded = loaded


class _Choice:
    """Which saved tensors are rows of the scope."""

    def __init__(
        self,
        rows: RowsInUse,
        parameters: Collection[torch.Tensor],
        min_row_bytes: int,
        ambiguous: set[tuple[int, ...]],
    ) -> None:
        self._ambiguous = ambiguous
        self._rows = rows
        self._min_row_bytes = min_row_bytes
        self._parts: dict[tuple[int, int], RowsInUse] = {}
        self._addresses = {p.untyped_storage().data_ptr() for p in parameters}
        # Copies of weights (in another type, or transposed) are no rows, whatever their number.
        shapes = [tuple(p.shape) for p in parameters]
        flat = [(p.numel(),) for p in parameters]
        self._shapes = {*shapes, *(shape[::-1] for shape in shapes), *flat}

    def rows_of(self, tensor: torch.Tensor) -> RowsInUse | None:
        """The rows that ``tensor`` consists of, or None."""
        if not tensor.dim() or not tensor.numel() or type(tensor) is not torch.Tensor:
            return None
        storage = tensor.untyped_storage()
        if not tensor.is_contiguous() or storage.data_ptr() in self._addresses:
            return None
        if tuple(tensor.shape) in self._shapes:
            self._ambiguous.add(tuple(tensor.shape))
            return None
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        if start % 8 or not self._rows.num_rows:
            return None
        if tensor.dim() == 1:
            width, rest = divmod(tensor.numel(), self._rows.num_rows)
            is_whole = not rest and width * size >= self._min_row_bytes
            return self._rows if is_whole else None
        row_bytes = tensor.numel() // tensor.shape[0] * size
        if row_bytes < self._min_row_bytes:
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


def _by_rows(tensor: torch.Tensor, rows: RowsInUse) -> torch.Tensor:
    """A view whose first dimension are the rows."""
    return tensor.detach().view(rows.num_rows, -1) if tensor.dim() == 1 else tensor


def _whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or where it is some columns of a matrix that fills its storage, that matrix."""
    if tensor.dim() != 2 or tensor.is_contiguous() or not tensor.numel():
        return tensor
    storage, size = tensor.untyped_storage(), tensor.element_size()
    (num_rows, _), (width, step) = tensor.shape, tensor.stride()
    if step != 1 or storage.nbytes() != num_rows * width * size:
        return tensor
    if tensor.storage_offset() + tensor.shape[1] > width:
        return tensor
    with torch.no_grad():
        return tensor.detach().as_strided((num_rows, width), (width, 1), 0)


def _layout_of(tensor: torch.Tensor, page_bytes: int, name: str) -> RowLayout:
    try:
        return row_layout(tensor, page_bytes)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype
