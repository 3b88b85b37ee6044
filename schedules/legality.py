"""Which sizes form a pipeline, and which microbatch counts a schedule accepts.

The interleaved rules are those Megatron-core checks at the start of its interleaved schedule (same
in 0.16 and 0.19): the group size lies between the pipeline size and the number of microbatches, and
the last, partial group is empty or at least as large as the pipeline.
"""

from __future__ import annotations

from chunkgraph.errors import TopologyError

from .shape import PipelineShape

__all__ = [
    "check_shape",
    "check_sizes",
    "is_legal_count",
    "legal_counts",
    "nearest_legal_counts",
]


def is_legal_count(
    num_microbatches: int, *, num_ranks: int, num_chunks: int = 1, group_size: int | None = None
) -> bool:
    """Whether a step may have this many microbatches.

    With one chunk per rank every count from 1 is legal. ``group_size`` None means ``num_ranks``.
    """
    if num_chunks == 1:
        return num_microbatches >= 1
    group = num_ranks if group_size is None else group_size
    tail = num_microbatches % group
    return num_microbatches >= group >= num_ranks and (tail == 0 or tail >= num_ranks)


def legal_counts(
    up_to: int, *, num_ranks: int, num_chunks: int = 1, group_size: int | None = None
) -> tuple[int, ...]:
    """Every legal number of microbatches from 1 to ``up_to`` inclusive, ascending."""
    return tuple(
        count
        for count in range(1, up_to + 1)
        if is_legal_count(count, num_ranks=num_ranks, num_chunks=num_chunks, group_size=group_size)
    )


def nearest_legal_counts(
    num_microbatches: int, *, num_ranks: int, num_chunks: int = 1, group_size: int | None = None
) -> tuple[int, ...]:
    """The closest legal count below and the closest above, where they exist."""
    group = 1 if num_chunks == 1 else num_ranks if group_size is None else group_size
    least_tail = 1 if num_chunks == 1 else num_ranks
    if group < least_tail:
        return ()
    below, above = num_microbatches - 1, max(num_microbatches + 1, group)
    # A tail that is too small goes away downwards, and grows upwards.
    if below % group < least_tail:
        below -= below % group
    if 0 < above % group < least_tail:
        above += least_tail - above % group
    return (below, above) if below >= group else (above,)


def check_sizes(
    name: str,
    *,
    num_ranks: int,
    num_chunks: int,
    group_size: int | None,
    interleaves: bool,
) -> None:
    """Check everything about a family but the number of microbatches.

    Args:
        name: Schedule name, for the message.
        num_ranks: Pipeline-parallel size.
        num_chunks: Model chunks on each rank.
        group_size: Microbatch group size, None for ``num_ranks``.
        interleaves: Whether the schedule is made for several chunks on a rank.

    Raises:
        TopologyError: The sizes cannot form this pipeline.
    """
    for what, value in (("num_ranks", num_ranks), ("num_chunks", num_chunks)):
        if value < 1:
            raise TopologyError(f"schedule {name!r}: {what} is {value}, but must be at least 1")
    if not interleaves and num_chunks != 1:
        raise TopologyError(
            f"schedule {name!r} runs one model chunk on each rank, but num_chunks is {num_chunks}: "
            "use 'interleaved', or set the virtual pipeline size to 1"
        )
    if not interleaves:
        return
    if num_chunks == 1:
        raise TopologyError(
            f"schedule {name!r} needs at least 2 model chunks on each rank, but num_chunks is 1: "
            "use '1f1b', or set a virtual pipeline size of 2 or more"
        )
    if num_ranks == 1:
        raise TopologyError(
            f"schedule {name!r} needs at least 2 pipeline ranks, but num_ranks is 1 with "
            f"num_chunks {num_chunks}: with one rank set the virtual pipeline size to 1"
        )
    if group_size is not None and group_size < num_ranks:
        raise TopologyError(
            f"schedule {name!r}: the microbatch group size is {group_size}, but must be at least "
            f"the pipeline size {num_ranks}: leave it out to use {num_ranks}"
        )


def check_shape(name: str, shape: PipelineShape, *, interleaves: bool) -> None:
    """Check all the sizes of one schedule.

    Raises:
        TopologyError: With the numbers, the rule and the nearest legal microbatch counts.
    """
    check_sizes(
        name,
        num_ranks=shape.num_ranks,
        num_chunks=shape.num_chunks,
        group_size=shape.group_size,
        interleaves=interleaves,
    )
    sizes = {
        "num_ranks": shape.num_ranks,
        "num_chunks": shape.num_chunks,
        "group_size": shape.group_size,
    }
    if is_legal_count(shape.num_microbatches, **sizes):  # type: ignore[arg-type]
        return
    nearest = nearest_legal_counts(shape.num_microbatches, **sizes)  # type: ignore[arg-type]
    where = f"schedule {name!r}: num_microbatches {shape.num_microbatches}"
    advice = f"nearest legal: {' or '.join(map(str, nearest))}"
    if shape.num_chunks == 1:
        raise TopologyError(f"{where} is below 1 ({advice})")
    group = shape.num_ranks if shape.group_size is None else shape.group_size
    numbers = f"num_ranks {shape.num_ranks}, num_chunks {shape.num_chunks} and group size {group}"
    if shape.num_microbatches < group:
        raise TopologyError(
            f"{where} is not legal with {numbers}: it is smaller than one group ({advice})"
        )
    raise TopologyError(
        f"{where} is not legal with {numbers}: it leaves {shape.num_microbatches % group} for the "
        f"last group, which must get 0 or at least {shape.num_ranks} ({advice})"
    )
