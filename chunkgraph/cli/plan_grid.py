"""Draw one step for ``chunkgraph plan``, on the terminal and as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chunkgraph.schedules import (
    CostModel,
    Op,
    PipelineShape,
    Schedule,
    Simulation,
    draw_svg,
    simulate,
    text_panels,
)
from chunkgraph.schedules.draw_text import legend
from chunkgraph.slots import assign_slots

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MAX_PANELS", "Grid", "too_large"]

MAX_PANELS = 16
"""Maximum number of printed panels (stretches of time) without ``--full``."""

_MAX_ACTIONS = 10_000
# A drawing has a row for each of them.
_MAX_RANKS = 256
# Named colours: a terminal with few colours would merge finer ones.
_STYLES = {
    Op.F: "white on blue",
    Op.B: "black on green",
    Op.I: "black on cyan",
    Op.W: "black on yellow",
}


def too_large(shape: PipelineShape, max_actions: int = _MAX_ACTIONS) -> str | None:
    """Explain why a step cannot be simulated and what to do; None if it can."""
    num_actions = 2 * shape.num_microbatches * shape.num_stages
    if shape.num_ranks > _MAX_RANKS:
        return f"the step has {shape.num_ranks} ranks, and at most {_MAX_RANKS} are simulated"
    if num_actions <= max_actions:
        return None
    return (
        f"the step has {num_actions} forwards and backwards, and at most {max_actions} are "
        "simulated. Choose fewer microbatches or stages to see how it goes"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A simulated step.

    Attributes:
        simulation: The timeline.
        slots: Slot of every (stage, microbatch).
        ranks: Ranks to draw.
    """

    simulation: Simulation
    slots: Mapping[tuple[int, int], int]
    ranks: Sequence[int]

    @classmethod
    def of(cls, schedule: Schedule, ranks: Sequence[int], costs: CostModel | None) -> Grid:
        """Simulate a schedule."""
        return cls(simulation=simulate(schedule, costs), slots=assign_slots(schedule), ranks=ranks)

    def as_svg(self) -> str:
        """Draw the whole picture."""
        return draw_svg(self.simulation, slots=self.slots, ranks=self.ranks)

    def print(self, console: Console, *, is_full: bool) -> None:
        """Print the whole step, or its beginning."""
        from rich.text import Text

        panels = text_panels(
            self.simulation, slots=self.slots, width=console.width, ranks=self.ranks
        )
        shown = panels if is_full else panels[:MAX_PANELS]
        digits = len(str(max(self.ranks)))
        for panel in shown:
            console.print(f"time {panel.start_ms:g} to {panel.end_ms:g}", style="dim")
            for rank, cells in panel.rows:
                line = Text(f"rank {rank:>{digits}} |")
                for cell in cells:
                    # The gap after an action stays white, so that neighbours do not run together.
                    text = cell.text.rstrip(" ")
                    line.append(text, style="" if cell.op is None else _STYLES[cell.op])
                    line.append(cell.text[len(text) :])
                line.rstrip()
                console.print(line, soft_wrap=True)
            console.print()
        if len(panels) > len(shown):
            rest = len(panels) - len(shown)
            console.print(f"... {rest} more panels: --full prints them, --svg FILE draws them")
        how_to_read = legend(self.simulation.schedule, has_slots=True)
        console.print(how_to_read, style="dim", soft_wrap=True)
