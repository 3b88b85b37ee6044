"""Backward passes that run through several captured microbatches at once.

Eager training sums all terms that one pass gives a parameter, then adds the sum to the gradient. A
replay adds the terms of its microbatch directly. The bits are the same only if there was no
gradient before and each microbatch gives the parameter one term. The chunks of one pass may belong
to several engines. Eager work in the pass may use a parameter too; it is refused, since its number
of terms is unknown.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from chunkgraph.engine.watch.eager_gradients import watch_eager_gradients
from chunkgraph.errors import ReplayMismatchError

__all__ = ["BackwardTask"]

_task_id = torch._C._current_graph_task_id

_Terms = Mapping[int, int]
_Overlaps = dict[tuple[int, int], bool]


class BackwardTask:
    """The running backward pass, as one engine sees it.

    Args:
        terms: For each chunk, how many terms autograd sums in one microbatch, by identity of each
            parameter that gets a gradient. The owner of this object keeps the parameters alive.
        names: Names of these parameters, for errors.
    """

    def __init__(
        self, terms: Sequence[_Terms] = (), names: Mapping[nn.Parameter, str] | None = None
    ) -> None:
        self._terms = terms
        self._overlaps = _overlaps(terms, terms)
        # Other engines that share parameters; they and their graphs may be freed at any time.
        self._others: list[tuple[weakref.ref[BackwardTask], _Overlaps]] = []
        # For each pass of this step: names of the parameters that eager work has added to.
        self._eager: dict[int, dict[int, str]] = {}
        self._names = dict(names or {})
        self.begin_step()
        self.end_step()
        watch_eager_gradients(self._names, self, self._note_eager_work)
        if any(terms):
            _introduce(self)

    def begin_step(self) -> None:
        """Forget the passes of the last step."""
        self._id = -1
        self._entered: tuple[tuple[int, bool], ...] = ()
        self._eager.clear()
        self._is_alone = not self._others
        self._is_in_step = True

    def end_step(self) -> None:
        """Stop recording eager work."""
        self._is_in_step = False

    def enter(self, c: int, label: str, *, is_fresh: bool) -> None:
        """Record that a microbatch of chunk ``c`` runs backward.

        Args:
            c: Index of the chunk.
            label: Label of the slot, for errors.
            is_fresh: Whether the parameters that it trains had no gradient before.

        Raises:
            ReplayMismatchError: The pass has already added to one of these parameters, and eager
                training would add in another order.
        """
        task = _task_id()
        if task == self._id or not self._is_alone:
            self._enter_further(task, c, label, is_fresh)
        else:
            self._id, self._entered = task, ((c, is_fresh),)

    def _enter_further(self, task: int, c: int, label: str, is_fresh: bool) -> None:
        if task != self._id:
            self._id, self._entered = task, ()
        for overlaps, entered in self._passes():
            for other, was_fresh in entered:
                is_one_term = overlaps.get((c, other))
                if is_one_term is not None and not (is_one_term and was_fresh):
                    raise ReplayMismatchError(
                        f"{label}: one backward pass runs through several microbatches that add "
                        "to the same parameter. Eager training adds these up before it adds them "
                        "to the gradient; replays cannot, so the last bits would differ.\n"
                        "  To do: call backward() for each microbatch (and each chunk that shares "
                        "a parameter), or ask for an eager step (`step(eager=True)`)."
                    )
        if task in self._eager:
            for place, name in self._eager[task].items():
                if place in self._terms[c]:
                    raise _shared_with_eager_work(name)
        if all(other != c for other, _ in self._entered):
            self._entered += ((c, is_fresh),)

    def _note_eager_work(self, parameter: nn.Parameter) -> None:
        """Record a gradient that eager autograd has added; refuse it after a replay's."""
        if not self._is_in_step:
            return
        task, place, name = _task_id(), id(parameter), self._names[parameter]
        if task == self._id and any(place in self._terms[c] for c, _ in self._entered):
            raise _shared_with_eager_work(name)
        self._eager.setdefault(task, {})[place] = name
        self._is_alone = False

    def _passes(self) -> Iterator[tuple[_Overlaps, tuple[tuple[int, bool], ...]]]:
        """Yield the chunks that the pass has entered, in this engine and in others."""
        yield self._overlaps, self._entered
        for reference, overlaps in self._others:
            other = reference()
            if other is not None and other._id == self._id:
                yield overlaps, other._entered


def _shared_with_eager_work(name: str) -> ReplayMismatchError:
    return ReplayMismatchError(
        f"{name} gets a gradient from a replay and from eager work in one backward pass. Eager "
        "training adds these up before it adds them to .grad; a replay adds its part directly, so "
        "the last bits would differ.\n"
        "  To do: call backward() for each of the two, move that work into the chunk, or ask for "
        "an eager step (`step(eager=True)`)."
    )


_known: weakref.WeakSet[BackwardTask] = weakref.WeakSet()
_introducing = threading.Lock()  # ranks may be threads


def _introduce(new: BackwardTask) -> None:
    """Link engines that share parameters."""
    with _introducing:
        for known in _known:
            known._others = [pair for pair in known._others if pair[0]() is not None]
            if overlaps := _overlaps(new._terms, known._terms):
                new._others.append((weakref.ref(known), overlaps))
                new._is_alone = known._is_alone = False
                mirrored = {(d, c): is_one for (c, d), is_one in overlaps.items()}
                known._others.append((weakref.ref(new), mirrored))
        _known.add(new)


def _overlaps(some: Iterable[_Terms], others: Sequence[_Terms]) -> _Overlaps:
    """Return which chunks share parameters, and whether each adds a single term to them."""
    return {
        (c, d): all(mine[p] == theirs[p] == 1 for p in common)
        for c, mine in enumerate(some)
        for d, theirs in enumerate(others)
        if (common := mine.keys() & theirs.keys())
    }
