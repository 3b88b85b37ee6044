"""Runs a random program eagerly and with graphs, and compares the results."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass, replace

from chunkgraph.errors import ChunkGraphError, MemoryPlanError, VerifyError

from .programs import Program
from .world import World


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison.

    Attributes:
        kind: "equal"; "refused", by one of chunkgraph's errors; "allowed", where eager refuses
            what graphs do or refuse later; or "different".
        why: the refusal, or the difference.
        num_replays: number of replays in the run with graphs.
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
    eager, theirs = run(program, uses_graphs=False)
    graphs, ours = run(program, uses_graphs=True)
    num = graphs.num_replays
    refused = Verdict("refused", f"{type(ours).__name__} at {graphs.where}: {ours}", num)
    if isinstance(ours, (VerifyError, MemoryPlanError)):
        # An expected refusal, where the engine also refuses the program.
        without = replace(program, verify="none")
        if without != program and _compare(without).kind == "refused":
            return refused
        return replace(refused, kind="different")
    for expected, actual in zip(eager.log, graphs.log, strict=False):
        if expected == actual:
            continue
        if isinstance(ours, ChunkGraphError) and actual.step == graphs.step:
            return refused  # at the end of the step that differs
        labels = dict.fromkeys((expected.label, actual.label))
        shown = f"{' / '.join(labels)}:\n  eager  {expected}\n  graphs {actual}"
        return Verdict("different", shown, num)
    if isinstance(ours, ChunkGraphError):
        return refused
    if ours is not None and (theirs is None or eager.where not in graphs.places):
        shown = "".join(traceback.format_exception(ours)[-8:])
        where = f"at {graphs.where} (eager raises {theirs!r} at {eager.where})"
        return Verdict("different", f"{where}: {shown}", num)
    if theirs is not None:
        kind = "equal" if ours is not None and graphs.where == eager.where else "allowed"
        return Verdict(kind, f"{type(theirs).__name__} at {eager.where}: {theirs}", num)
    if len(eager.log) != len(graphs.log):
        return Verdict("different", f"{len(eager.log)} values seen, {len(graphs.log)}", num)
    return Verdict("equal", "", num)


def run(program: Program, *, uses_graphs: bool) -> tuple[World, Exception | None]:
    """Run a program; return its end and its error."""
    world = World(program, uses_graphs=uses_graphs)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - whatever a program raises is compared
        return world, error
    return world, None
