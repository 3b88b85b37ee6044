"""Documents gathered into microbatches: first fit, longest first, a window at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from chunkgraph.errors import PackingError
from chunkgraph.packing.offsets import check_lengths, whole_number
from chunkgraph.packing.shape import PackedShape

__all__ = ["first_fit", "schedule_microbatches"]


def schedule_microbatches(
    lengths: Iterable[int], shape: PackedShape, *, window: int = 1024
) -> Iterator[tuple[int, ...]]:
    """Gather a stream of documents into microbatches that fit a shape.

    The longest document of a window goes first, into the first microbatch that has room. All
    microbatches of a window are final but the emptiest: its documents wait for the next window. The
    result is a function of the arguments alone, so every rank that reads the same lengths finds the
    same microbatches.

    Args:
        lengths: Tokens of each document; read a window ahead of what is given out.
        shape: The shape that every microbatch fits.
        window: Documents looked at together. Larger wastes less and mixes the order more.

    Yields:
        The documents of one microbatch, as rising places in ``lengths``.

    Raises:
        PackingError: A document has less than one token or is longer than the shape allows, or the
            window is no whole number of at least 1.
    """
    num_together = whole_number(window)
    if num_together is None or num_together < 1:
        msg = f"The window is {window!r}; it is a whole number of documents, at least 1 document."
        raise PackingError(msg)
    numbered = enumerate(lengths)
    waiting: list[tuple[int, int]] = []
    while fresh := list(itertools.islice(numbered, num_together)):
        _check(fresh, shape)
        *full, emptiest = first_fit([*waiting, *fresh], shape)
        for documents in full:
            yield _places(documents)
        waiting = emptiest
    if waiting:
        yield _places(waiting)


def _check(fresh: Sequence[tuple[int, int]], shape: PackedShape) -> None:
    first = fresh[0][0]
    where = f"documents {first} to {fresh[-1][0]}"
    tokens = check_lengths([length for _, length in fresh], where)
    index = int(tokens.argmax())
    if tokens[index] > shape.document_limit:
        msg = (
            f"document {first + index} has {tokens[index]} tokens, more than the "
            f"{shape.document_limit} that a document may have. Truncate or split it first."
        )
        raise PackingError(msg)


def first_fit(
    documents: Iterable[tuple[int, int]], shape: PackedShape
) -> list[list[tuple[int, int]]]:
    """Microbatches of (place, tokens), in the order they were begun, the emptiest last."""
    microbatches: list[list[tuple[int, int]]] = []
    free: list[int] = []
    # Those with no room for even the shortest document are not asked again.
    open_ones: list[int] = []
    for place, length in sorted(documents, key=lambda document: (-document[1], document[0])):
        rows = shape.padded_length(length)
        chosen = next((index for index in open_ones if free[index] >= rows), None)
        if chosen is None:
            chosen = len(microbatches)
            microbatches.append([])
            free.append(shape.max_packed_tokens)
            open_ones.append(chosen)
        microbatches[chosen].append((place, length))
        free[chosen] -= rows
        if free[chosen] == 0 or len(microbatches[chosen]) == shape.max_documents:
            open_ones.remove(chosen)
    emptiest = max(range(len(free)), key=lambda index: (free[index], index))
    microbatches.append(microbatches.pop(emptiest))
    return microbatches


def _places(documents: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(sorted(place for place, _ in documents))
