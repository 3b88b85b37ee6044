"""The default random generator of a device in a capture, and the states that it can be set to.

A replay draws from the state that the generator has at that time. Captured work can save this state
and set it again. Activation recomputation does so in two graphs: the forward's graph saves the
state, and the backward's graph *resumes* it. Other states and seeds are refused, since a replay
would not set them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from chunkgraph.errors import IllegalOperationError
from chunkgraph.graphs.legality import illegal_operation
from chunkgraph.graphs.random_state import draws, explicit_generator, thread_generator

__all__ = ["CapturedGenerator", "DrawOffsets", "SavedState"]

_ATTRIBUTE = "_chunkgraph_saved_in_capture"


@dataclass
class DrawOffsets:
    """Where an eager pass stood in the sequences of its random generators, relative to its start.

    The generators are the device's default one and those that are declared; each has a sequence.

    Attributes:
        at_saves: For each time that the pass saved the random state, by generator: the number of
            the sequence from which it drew then, and the offset in it. None if the default
            generator was switched to a sequence of no declared generator.
        at_end: The offset in each sequence at the end of the pass.
    """

    at_saves: list[tuple[tuple[int, int], ...] | None] = field(default_factory=list)
    at_end: tuple[int, ...] = ()


@dataclass(eq=False)
class SavedState:
    """A random state that captured work saved.

    Attributes:
        owner: Identifies the capture.
        index: Number of the save in its capture, from 0.
        resumed: The state from which the work drew then; None if it had resumed none.
        num_draws: Number of draws from ``resumed`` until the save.
        value: What the backend needs to set the state.
    """

    owner: Any
    index: int
    resumed: SavedState | None
    num_draws: int
    value: Any = None

    @staticmethod
    def of(state: torch.Tensor) -> SavedState | None:
        """Return the saved state that a tensor stands for; None if it comes from elsewhere."""
        return getattr(state, _ATTRIBUTE, None)


class CapturedGenerator:
    """Replace a device's default generator in a capture.

    A state of this capture can only be set again, not drawn from: a replay would draw other
    numbers. A backend resumes states of other captures; the base class, for a generator that
    captured work does not draw from, does nothing in replays.

    Args:
        label: Name of the graph in errors.
        owner: Identifies the capture; default a new object.
    """

    def __init__(self, label: str, owner: object = None) -> None:
        self._label = label
        self._owner = owner or object()
        self._resumed: SavedState | None = None
        self._num_draws: Counter[SavedState | None] = Counter()
        self._may_draw = True
        self.num_saves = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(thread_generator(), name)

    def save(self, _saved: SavedState, /) -> None:
        """Save the current state, in every replay."""

    def switch_to(self, _saved: SavedState, /) -> bool:
        """Set a state, in every replay; return whether captured work can draw from it."""
        return True

    def get_state(self) -> torch.Tensor:
        """Return the state, which `set_state` accepts in this and other captures."""
        return self.marked(thread_generator().get_state())

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        """Continue from a state that `get_state` returned.

        Raises:
            IllegalOperationError: The state comes from elsewhere.
        """
        self.accept(state)
        return thread_generator().set_state(state)

    def draw(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Count a draw of ``func`` if it uses the default generator.

        Raises:
            IllegalOperationError: A replay could not repeat the state that was restored before.
        """
        if not draws(func) or explicit_generator(args, kwargs) is not None:
            return
        if _draws_nothing(func, args, kwargs):
            return
        if not self._may_draw:
            raise illegal_operation(
                str(func),
                "draws random numbers after the random state was restored, and a replay could not "
                "restore it (it can in the recomputation of a checkpoint that is in no other one)",
                self._label,
                "do not nest checkpoints with dropout, and use num_warmup_passes of 1 or more; or "
                "set the dropout of what is recomputed to 0.",
            )
        self._num_draws[self._resumed] += 1

    def finish(self) -> None:
        """Check the end of the captured work.

        Raises:
            IllegalOperationError: A restored state is still set.
        """
        if self._resumed is not None or not self._may_draw:
            raise self._refused("torch.set_rng_state")

    def marked(self, state: torch.Tensor) -> torch.Tensor:
        """Return ``state``, which from now on stands for the current one."""
        num_draws = self._num_draws[self._resumed]
        saved = SavedState(self._owner, self.num_saves, self._resumed, num_draws)
        self.num_saves += 1
        self.save(saved)
        setattr(state, _ATTRIBUTE, saved)
        return state

    def accept(self, state: torch.Tensor) -> None:
        """Set the state that ``state`` stands for.

        Raises:
            IllegalOperationError: It stands for none.
        """
        saved = SavedState.of(state)
        if saved is None:
            raise self._refused("torch.set_rng_state")
        is_own = saved.owner is self._owner
        self._resumed = saved.resumed if is_own else saved
        is_unchanged = self._num_draws[self._resumed] == (saved.num_draws if is_own else 0)
        # The numbers of a state that another graph had resumed are not among that graph's own.
        is_known = is_own or saved.resumed is None
        self._may_draw = self.switch_to(saved) and is_unchanged and is_known

    def manual_seed(self, _seed: int) -> torch.Generator:
        """Raise IllegalOperationError."""
        raise self._refused("torch.manual_seed")

    def seed(self) -> int:
        """Raise IllegalOperationError."""
        raise self._refused("torch.seed")

    def _refused(self, what: str) -> IllegalOperationError:
        return illegal_operation(
            what,
            "sets the random state, which a replay would not repeat (only a state that the "
            "captured work itself saved can be set)",
            self._label,
        )


def _draws_nothing(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether ``func`` is attention or dropout with a probability of 0, or in evaluation."""
    arguments = func._schema.arguments
    values = {a.name: a.default_value for a in arguments}
    values |= {a.name: v for a, v in zip(arguments, args, strict=False)} | kwargs
    if func is torch.ops.aten.native_dropout.default:
        return values["train"] is False
    return values.get("dropout_p") == 0.0
