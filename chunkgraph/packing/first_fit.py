"""Gather documents into microbatches: first fit, longest document first."""

from __future__ import annotations

from collections.abc import Iterable

from chunkgraph.packing.shape import PackedShape

__all__ = ["first_fit"]


def first_fit(
    documents: Iterable[tuple[int, int]], shape: PackedShape
) -> list[list[tuple[int, int]]]:
    """Put each document in the first microbatch that has room, longest document first.

    Args:
        documents: (index, tokens) of each document; none is longer than the shape allows.
        shape: the shape that every microbatch fits.

    Returns:
        The documents of each microbatch, longest first.
    """
    microbatches: list[list[tuple[int, int]]] = []
    free_rows: list[int] = []
    # Full microbatches are not searched again.
    open_indices: list[int] = []
    for place, length in sorted(documents, key=lambda document: (-document[1], document[0])):
        rows = shape.padded_length(length)
        chosen = next((index for index in open_indices if free_rows[index] >= rows), None)
        if chosen is None:
            chosen = len(microbatches)
            microbatches.append([])
            free_rows.append(shape.max_packed_tokens)
            open_indices.append(chosen)
        microbatches[chosen].append((place, length))
        free_rows[chosen] -= rows
        if free_rows[chosen] == 0 or len(microbatches[chosen]) == shape.max_documents:
            open_indices.remove(chosen)
    return microbatches
