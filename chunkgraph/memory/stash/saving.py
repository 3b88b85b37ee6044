"""Stash the tensors that autograd saves inside a scope, and reload them in the backward."""

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
"""Smaller rows are not stashed: a page table would cost as much."""

SavingMode = Literal["off", "measure", "stash"]


class _Group:
    """The tensors that were stashed in one scope.

    ``previous`` is the group of the previous scope in the same forward. A backward reaches the
    groups in reverse order.
    """

    def __init__(self, previous: _Group | None) -> None:
        self.previous = previous
        self.members: list[_SavedTensor] = []
        self.is_reached = False


class _SavedTensor:
    """A stashed tensor that one or more autograd nodes hold."""

    def __init__(self, stashed: Stashed, name: str, shape: torch.Size, group: _Group) -> None:
        self.stashed = stashed
        self.name = name
        self.shape = shape
        self.group = group
        self.num_uses = 0
        self.reload: Reload | None = None


@dataclass(frozen=True)
class _Columns:
    """Some columns of a stashed tensor's rows, held by an autograd node."""

    saved: _SavedTensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Entry:
    """A tensor that is already stashed in this scope, with its version."""

    storage: StorageWeakRef
    version: int
    saved: _SavedTensor


class Saving:
    """Choose and stash the tensors that autograd saves in a scope.

    A contiguous tensor is stashed if it is not a parameter and has the scope's rows, or is a range
    of rows of such a tensor. All rows may be flattened into one dimension. For a tensor that is
    some columns of such a matrix (a split-off gate), the whole matrix is stashed once. Autograd
    saves all other tensors as usual.

    Args:
        page_bytes: Bytes of a page of the stash.
        min_row_bytes: Smaller rows are not stashed.
        prefetches: Whether a backward that reaches a scope starts to reload the tensors of the
            previous scope, which it needs next.

    Attributes:
        mode: ``off``: autograd saves as usual. ``measure``: likewise, and ``meter`` counts.
            ``stash``: save to ``stash``.
        meter: The meter of ``measure``.
        stash: The stash of ``stash``.
        ambiguous: Shapes of tensors that were not stashed because a parameter has the same shape.
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
        self._waiting: dict[int, _SavedTensor] = {}
        self._last: _Group | None = None  # the last group of the running forward

    @contextmanager
    def during(self, mode: SavingMode) -> Iterator[None]:
        """Set the mode inside the block."""
        previous, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = previous

    @contextmanager
    def forward(self, chunk: int) -> Iterator[None]:
        """Enclose a chunk's forward; tensors stashed outside of one are never prefetched."""
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
        chosen = _Choice(rows, parameters, self._min_row_bytes, self.ambiguous)
        entries: dict[tuple[Any, ...], _Entry] = {}
        pack = self._measuring(chosen, name) if self.mode == "measure" else None
        pack = pack or self._stashing(chosen, entries, name)
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

    def _measuring(self, chosen: _Choice, name: str) -> Callable[[torch.Tensor], Any]:
        seen: dict[tuple[Any, ...], StorageWeakRef] = {}
        meter = self.meter
        assert meter is not None

        def pack(tensor: torch.Tensor) -> Any:
            whole = _whole_rows(tensor)
            part = chosen.rows_of(whole)
            if part is not None:
                storage = seen.get(_key(whole))
                if storage is None or storage.expired():
                    seen[_key(whole)] = StorageWeakRef(tensor.untyped_storage())
                    meter.add(part, _layout_of(_by_rows(whole, part), self._page_bytes, name))
            return tensor

        return pack

    def _stashing(
        self, chosen: _Choice, entries: dict[tuple[Any, ...], _Entry], name: str
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
            entry = entries.get(_key(whole))
            is_same = entry is not None and not entry.storage.expired()
            if entry is None or not is_same or entry.version != tensor._version:
                stashed = stash.stash(_by_rows(whole, part), part)
                saved = _SavedTensor(stashed, name, whole.shape, group)
                group.members.append(saved)
                storage = StorageWeakRef(tensor.untyped_storage())
                entry = entries[_key(whole)] = _Entry(storage, tensor._version, saved)
                self._waiting[id(saved)] = saved
            entry.saved.num_uses += 1
            if whole is tensor:
                return entry.saved
            offset = int(tensor.storage_offset())
            return _Columns(entry.saved, tensor.shape, tensor.stride(), offset)

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
        if packed.reload is None:
            packed.reload = self.stash.reload_now(packed.stashed)
        tensor = packed.reload.tensor().view(packed.shape)
        if not packed.group.is_reached:
            packed.group.is_reached = True
            self._prefetch(packed.group.previous)
        packed.num_uses -= 1
        if not packed.num_uses:
            self.stash.give_back(packed.stashed)
            packed.reload = None
            self._waiting.pop(id(packed), None)
        return tensor

    def _prefetch(self, group: _Group | None) -> None:
        """Start to reload a group, or the nearest previous one with stashed tensors."""
        while group is not None and not group.members:
            group = group.previous
        if group is None or group.is_reached or not self._prefetches:
            return
        assert self.stash is not None
        pending = [saved for saved in group.members if saved.num_uses and saved.reload is None]
        reloads = self.stash.reload_ahead([saved.stashed for saved in pending])
        for saved, reload in zip(pending, reloads, strict=True):
            saved.reload = reload


class _Choice:
    """Choose the saved tensors that consist of rows of the scope."""

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
    """Return a view whose first dimension is the rows."""
    return tensor.detach().view(rows.num_rows, -1) if tensor.dim() == 1 else tensor


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
    with torch.no_grad():
        return tensor.detach().as_strided((num_rows, width), (width, 1), 0)


def _layout_of(tensor: torch.Tensor, page_bytes: int, name: str) -> RowLayout:
    try:
        return row_layout(tensor, page_bytes)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype
