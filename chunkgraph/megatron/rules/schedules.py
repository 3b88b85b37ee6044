"""The rules of a schedule's name, from a file, a program or a command line."""

from __future__ import annotations

from chunkgraph.schedules import FILE_SUFFIX, Placement, get_family, list_schedules
from chunkgraph.settings.rule import Facts, Rule

__all__ = ["SCHEDULE_RULES", "SLOT_RULES"]


def _is_named(f: Facts) -> bool:
    name = f.schedule
    return name not in (None, "auto") and not name.endswith(FILE_SUFFIX)


def _is_unknown(f: Facts) -> object:
    known = list_schedules()
    return _is_named(f) and f.schedule not in known and {"known": ", ".join(known)}


def _is_in_v(f: Facts) -> bool:
    known = _is_named(f) and f.schedule in list_schedules()
    return known and get_family(f.schedule).placement is not Placement.LOOP


SCHEDULE_RULES = (
    Rule(
        "schedule: there is no such schedule; use auto, a CSV file of actions, or one of {known}",
        _is_unknown,
    ),
    Rule(
        "schedule: it places stages in a V, but Megatron's pipelines are loops (rank r holds the "
        "stages r, r + size, ...); use zb-h1 or interleaved-zb",
        _is_in_v,
    ),
)
"""Rules of a schedule's name, from a file, a program or a command line."""
SLOT_RULES = (
    Rule(
        "schedule: it holds every microbatch of a step at once, and chunk graphs have slots for a "
        "fixed number; use 1f1b or zb-h1, or train without graphs",
        lambda f: (
            f.captures is not False  # None outside of a configuration file: graphs are on
            and _is_named(f)
            and f.schedule in list_schedules()
            and not get_family(f.schedule).is_bounded
        ),
    ),
)
"""Rules of a schedule that drives chunk graphs."""
