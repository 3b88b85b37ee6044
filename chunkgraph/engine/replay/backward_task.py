"""Backward passes that run through several captured microbatches at once.

Eager training adds up what one pass gives a parameter before it adds the sum to the gradient; a
replay adds what its microbatch gives at once. The bits are the same only if there was no gradient
before and each microbatch gives the parameter one term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from chunkgraph.errors import ReplayMismatchError

__all__ = ["BackwardTask"]

_task_id = torch._C._current_graph_task_id


class BackwardTask:
    """The backward pass that is running.

    Args:
        shared: for each chunk, the chunks (itself too) that have parameters in common with it, and
            whether each of them gives every such parameter one term.
    """

    def __init__(self, shared: Sequence[Mapping[int, bool]] = ()) -> None:
        self._shared = shared
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        self._id = -1
        self._chunks: dict[int, bool] = {}

    def enter(self, c: int, label: str, *, is_fresh: bool) -> None:
        """Note that a microbatch of chunk ``c`` is run backward.

        Args:
            c: index of the chunk.
            label: of its slot, for errors.
            is_fresh: whether the parameters that it trains had no gradient before.

        Raises:
            ReplayMismatchError: the pass has added to one of these parameters already, and eager
                training would add in another order.
        """
        task = _task_id()
        if task != self._id:
            self._id, self._chunks = task, {c: is_fresh}
            return
        for other, was_fresh in self._chunks.items():
            is_one_term = self._shared[c].get(other)
            if is_one_term is not None and not (is_one_term and was_fresh):
                raise ReplayMismatchError(
                    f"{label}: one backward pass runs through several microbatches that add to the "
                    "same parameter. Eager training adds these up before it adds them to the "
                    "gradient; replays cannot, and the last bits would differ.\n"
                    "  To do: call backward() for each microbatch (and each chunk that shares a "
                    "parameter), or ask for an eager step (`step(eager=True)`)."
                )
        self._chunks.setdefault(c, is_fresh)
