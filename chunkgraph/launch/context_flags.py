"""The flags of context-parallel sizes that change from microbatch to microbatch.

No torch here: the launcher looks at them before any process is started.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Literal

from chunkgraph.errors import ConfigError

__all__ = [
    "CONTEXTS",
    "ContextFlag",
    "ContextSizes",
    "add_context_flags",
    "contexts_from",
    "given_context_flags",
]


@dataclass(frozen=True)
class ContextFlag:
    """One flag.

    Attributes:
        name: as on the command line.
        help: what it means.
        choices: of its word; none where it takes sizes.
    """

    name: str
    help: str
    choices: tuple[str, ...] = ()

    @property
    def dest(self) -> str:
        """As in the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")


CONTEXTS = (
    ContextFlag(
        "--cuda-graph-cp-sizes",
        "How many of the data-parallel ranks may share a packed microbatch, powers of two: each "
        "microbatch has one of these sizes, and each size graphs of its own. Documents are spread "
        "anew in every step; --cuda-graph-max-packed-tokens are then those of one rank (default: "
        "none, every rank works on its own documents).",
    ),
    ContextFlag(
        "--cuda-graph-cp-eager-sizes",
        "Further sizes that microbatches may have, without graphs: steps with one run eagerly "
        "(default: none).",
    ),
    ContextFlag(
        "--cuda-graph-cp-schedule",
        "Which size a microbatch gets: the smallest that holds its documents, or, to try graphs "
        "out, one at random by --seed (default: smallest).",
        choices=("smallest", "random"),
    ),
)
"""All of them, that of the captured sizes first."""


@dataclass(frozen=True)
class ContextSizes:
    """What the flags ask for.

    Attributes:
        captured: sizes with graphs.
        eager: sizes without.
        schedule: which size a microbatch gets.
    """

    captured: tuple[int, ...]
    eager: tuple[int, ...] = ()
    schedule: Literal["smallest", "random"] = "smallest"

    @property
    def every(self) -> tuple[int, ...]:
        """All sizes that a microbatch may have, smallest first."""
        return tuple(sorted({*self.captured, *self.eager}))


def add_context_flags(group: Any) -> None:
    """Add them to a group of Megatron's parser; None where one is not given."""
    for flag in CONTEXTS:
        more: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "N"}
        if flag.choices:
            more = {"choices": flag.choices}
        group.add_argument(flag.name, default=None, help=flag.help, **more)


def given_context_flags(args: argparse.Namespace) -> list[str]:
    """Those that were given, as they stand on the command line."""
    given = {flag.name: getattr(args, flag.dest) for flag in CONTEXTS}
    return [f"{name} {_shown(value)}" for name, value in given.items() if value is not None]


def contexts_from(args: argparse.Namespace, max_packed_seqs: int) -> ContextSizes | None:
    """What they ask for; None: every microbatch is that of one rank.

    Args:
        args: with the flags of `add_context_flags`.
        max_packed_seqs: sequences of a packed microbatch; 0: none are packed.

    Raises:
        ConfigError: a value is out of range, or has no effect.
    """
    switch, eager_flag, schedule_flag = CONTEXTS
    given = given_context_flags(args)
    if not given:
        return None
    captured = getattr(args, switch.dest)
    if captured is None:
        raise ConfigError(
            f"{', '.join(given)} has no effect without {switch.name}; add it, or leave this out."
        )
    if not max_packed_seqs:
        raise ConfigError(
            f"{given[0]} has no effect without --cuda-graph-max-packed-seqs: only packed documents "
            "are spread over ranks. Add it, or leave this out."
        )
    eager = getattr(args, eager_flag.dest) or []
    for flag, sizes in ((switch, captured), (eager_flag, eager)):
        wrong = [size for size in sizes if size < 1 or size.bit_count() > 1]
        if wrong:
            raise ConfigError(
                f"{flag.name} {_shown(sizes)}: {wrong[0]} is no power of two, and groups of 1, 2, "
                "4, ... neighbours are to share microbatches. Leave it out."
            )
    both = sorted(set(captured) & set(eager))
    if both:
        raise ConfigError(
            f"{eager_flag.name} {_shown(eager)}: {both[0]} is in {switch.name} {_shown(captured)} "
            "too, with graphs. Leave it out of one of them."
        )
    schedule: Any = getattr(args, schedule_flag.dest) or schedule_flag.choices[0]
    return ContextSizes(tuple(sorted(set(captured))), tuple(sorted(set(eager))), schedule)


def _shown(value: Any) -> str:
    """As it stands on a command line."""
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
