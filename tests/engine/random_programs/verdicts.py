"""Runs a random program eagerly and with graphs, and says whether they are equal."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass

from chunkgraph.errors import ChunkGraphError

from .programs import Program
from .world import World


@dataclass(frozen=True)
class Verdict:
    """What a program shows.

    Attributes:
        kind: "equal"; "refused", by one of chunkgraph's errors; "allowed", where eager refuses
            what graphs do; or "different".
        why: the refusal, or the difference.
        num_replays: of the run with graphs.
    """

    kind: str
    why: str = ""
    num_replays: int = 0


def compare(program: Program) -> Verdict:
    """Run a program both ways, from the same seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _compare(program)


def _compare(program: Program) -> Verdict:
    eager, theirs = _run(program, uses_graphs=False)
    graphs, ours = _run(program, uses_graphs=True)
    num = graphs.num_replays
    both = zip(eager.log, graphs.log, strict=False)
    for expected, got in both:
        if expected != got:
            if isinstance(ours, ChunkGraphError) and got.step == graphs.step:
                return Verdict("refused", f"late: {type(ours).__name__} at {graphs.where}: {ours}", num)
            which = expected.label if expected.label == got.label else f"{expected.label} / {got.label}"
            return Verdict("different", f"{which}:\n  eager {expected}\n  graphs {got}", num)
    if isinstance(ours, ChunkGraphError):
        return Verdict("refused", f"{type(ours).__name__} at {graphs.where}: {ours}", num)
    if ours is not None and (theirs is None or graphs.where != eager.where):
        shown = "".join(traceback.format_exception(ours)[-8:])
        return Verdict("different", f"at {graphs.where}, eager raises {theirs!r} at {eager.where}: {shown}", num)
    if theirs is not None and ours is None:
        return Verdict("allowed", f"at {eager.where}: {type(theirs).__name__}: {theirs}", num)
    if len(eager.log) != len(graphs.log):
        return Verdict("different", f"{len(eager.log)} values seen, {len(graphs.log)}", num)
    return Verdict("equal", f"both raise {theirs!r}" if theirs is not None else "", num)


def _run(program: Program, *, uses_graphs: bool) -> tuple[World, Exception | None]:
    world = World(program, uses_graphs=uses_graphs)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - any that the program raises is compared
        return world, error
    return world, None
