"""Compare modes, hooks and layers of modules that a forward calls, other than the chunk's own.

They are in globals, closures, lists or hidden attributes. Their numbers and flags are those of
`LayerSettings`, their tensors those of `OutsideTensors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from chunkgraph.engine.watch.holders import HOOK_DICTS
from chunkgraph.errors import ReplayMismatchError

__all__ = ["OtherModules"]


class OtherModules:
    """The present state of the modules.

    Args:
        label: Label of the chunk.
        layers: Each layer of the modules with its name.
    """

    def __init__(self, label: str, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self._label = label
        self._names = [name for name, _ in layers]
        self._attributes = [vars(layer) for _, layer in layers]
        self._captured = self._now()

    def check(self) -> None:
        """Compare all layers.

        Raises:
            ReplayMismatchError: One has changed; the message names it.
        """
        now = self._now()
        if now == self._captured:
            return
        changes = ", ".join(
            name
            for name, captured, present in zip(self._names, self._captured, now, strict=True)
            if captured != present
        )
        raise ReplayMismatchError(
            f"{self._label}: the mode, the hooks or the layers of {changes} were changed after "
            "capture, and the forward calls them; a replay would ignore this. Release the graphs "
            "and capture again, or ask for an eager step (`step(eager=True)`)."
        )

    def _now(self) -> list[Any]:
        return [
            (
                own.get("training"),
                [*map(id, own["_modules"].values())],
                [[*(own.get(hooks) or ())] for hooks in HOOK_DICTS],
            )
            for own in self._attributes
        ]
