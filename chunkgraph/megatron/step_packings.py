"""The documents of a step's microbatches, on the host: whether they fit, and what was announced."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from chunkgraph.engine import Agree
from chunkgraph.errors import ConfigError, PackingError, SlotError
from chunkgraph.packing import PackedShape, reason_not_to_fit

__all__ = ["Packings", "StepPackings", "misfit_of"]

Packings = Sequence[Sequence[int]]
"""For each microbatch of a step, the tokens of each of its documents."""


class StepPackings:
    """What one rank's steps are told of their packings.

    Args:
        shape: what graphs are captured for.
        rank: named in errors.
        agree: to compare the shape between ranks; None in a job of one.

    Raises:
        ConfigError: another rank has another shape.
    """

    def __init__(self, shape: PackedShape, rank: int, agree: Agree | None) -> None:
        self.shape = shape
        self._rank = rank
        self._announced: tuple[list[list[int]], str] | None = None
        digest = zlib.crc32(repr(shape).encode())
        if agree is not None and agree([digest, -digest]) != [digest, -digest]:
            raise ConfigError(
                f"rank {rank}: the packed shape is {shape}, and another on another rank. Give "
                "attach() the same `packing` on every rank."
            )

    def announced(self, packings: Packings, misfit: str) -> str:
        """Remember what was announced; why it does not fit, or ""."""
        if self._announced is not None:
            raise SlotError(f"rank {self._rank}: the next step was announced already.")
        told = misfit or misfit_of(packings, self.shape, None, self._rank)
        self._announced = _plain(packings), misfit
        return told

    def begin(self, packings: Packings | None, misfit: str, num_microbatches: int) -> str | None:
        """What to tell the engine of the step that begins now; None: what was announced holds.

        Raises:
            ConfigError: nothing is known of the step, or it was announced otherwise.
            PackingError: a microbatch without documents, or a document without tokens.
        """
        announced, self._announced = self._announced, None
        if packings is None and announced is None and not misfit:
            raise ConfigError(
                f"rank {self._rank}: a training step was given no packings. Attached with "
                "`packing`, every step takes packings=..., the lengths of the documents of each "
                "microbatch (also on ranks whose stage does not read tokens), or is announced."
            )
        if announced is None:
            if packings is None:
                return misfit
            return misfit or misfit_of(packings, self.shape, num_microbatches, self._rank)
        was, said = announced
        is_other = packings is not None and _plain(packings) != was
        if is_other or (misfit and misfit != said) or len(was) != num_microbatches:
            raise ConfigError(
                f"rank {self._rank}: the step has {num_microbatches} microbatches with documents "
                f"of {packings} tokens, misfit {misfit!r}; announced were {len(was)} with {was}, "
                f"misfit {said!r}. The other ranks follow what was announced, so this one cannot "
                "do otherwise. Announce each step's own packings, in the order of the steps."
            )
        return None


def misfit_of(
    packings: Packings, shape: PackedShape, num_microbatches: int | None, rank: int
) -> str:
    """Why the packings of a step do not fit, or "".

    Args:
        packings: of all microbatches of the step, of this rank's data.
        shape: what graphs are captured for.
        num_microbatches: of the step; None where it is not known yet.
        rank: named in errors.

    Raises:
        ConfigError: there are not as many packings as microbatches.
        PackingError: a microbatch without documents, or a document without tokens.
    """
    if num_microbatches is not None and len(packings) != num_microbatches:
        raise ConfigError(
            f"rank {rank}: the step has {num_microbatches} microbatches, but {len(packings)} "
            "packings. Give the document lengths of every microbatch of the step."
        )
    found = ""
    for microbatch, lengths in enumerate(packings):
        try:
            reason = reason_not_to_fit(lengths, shape)
        except PackingError as error:
            raise PackingError(f"rank {rank}, microbatch {microbatch}: {error}") from error
        if reason is not None and not found:
            found = reason.value
    return found


def _plain(packings: Packings) -> list[list[int]]:
    return [[int(length) for length in lengths] for lengths in packings]
