"""The documents of a step's microbatches, on the host: whether they fit, and what was announced."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from chunkgraph.engine import Agree
from chunkgraph.errors import ConfigError, PackingError, SlotError
from chunkgraph.megatron.features.packing.banks import BankKey, Buckets
from chunkgraph.packing import PackedShape, reason_not_to_fit

__all__ = ["Packings", "StepPackings", "misfit_of"]

Packings = Sequence[Sequence[int]]
"""For each microbatch of a step, the tokens of each of its documents."""


@dataclass(frozen=True)
class _Announced:
    """The step that comes next: what the caller said of it, and what follows from that."""

    packings: list[list[int]]
    said: str
    misfit: str
    keys: list[int]
    has_given_keys: bool


class StepPackings:
    """What one rank's steps are told of their packings.

    Args:
        buckets: what graphs are captured for.
        rank: named in errors.
        agree: to compare the shapes between ranks; None in a job of one.
        needs_buckets: whether other ranks' data bear on a microbatch's bucket, so that steps are
            told buckets that were agreed on.
        fills_rows: whether documents are to fill all rows of every microbatch.
        needs_tokens: whether to warn, once, of a document with a context-parallel piece that holds
            no token; see `needs_tokens_in_pieces`.

    Attributes:
        shape: the largest.
        keys: buckets of the microbatches of the step that was begun last.
        banks: and their banks.
        cut_for: banks to whose sequences offsets are cut (`OffsetCutter`); None for a microbatch
            that fits none, whose offsets are its own.
        misfit: why that step does not fit, whether it was announced or not; "" if it does.

    Raises:
        ConfigError: another rank has another shape.
    """

    def __init__(
        self,
        buckets: Buckets,
        rank: int,
        agree: Agree | None,
        *,
        needs_buckets: bool = False,
        fills_rows: bool = False,
        needs_tokens: bool = False,
    ) -> None:
        self.buckets = buckets
        self.shape = shape = buckets.shapes[buckets.keys[0]]
        self.keys: list[int] | None = None
        self.banks: list[BankKey] | None = None
        self.cut_for: list[BankKey | None] = []
        self.misfit = ""
        self._rank = rank
        self._fills_rows = fills_rows
        self._needs_tokens = needs_tokens
        self._needs_buckets = needs_buckets and len(buckets.keys) > 1
        self._announced: _Announced | None = None
        self._has_given_keys = False
        digest = zlib.crc32(repr(buckets.all_shapes).encode())
        if agree is not None and agree([digest, -digest]) != [digest, -digest]:
            raise ConfigError(
                f"rank {rank}: the packed shape is {shape}, and another on another rank. Give "
                "attach() the same `packing` on every rank."
            )

    def announced(
        self, packings: Packings, misfit: str, buckets: Sequence[int] | None = None
    ) -> str:
        """Remember what was announced; why it does not fit, or ""."""
        if self._announced is not None:
            raise SlotError(f"rank {self._rank}: the next step was announced already.")
        told = misfit or misfit_of(packings, self.shape, None, self._rank)
        keys = self._chosen(packings, buckets, told)
        self._announced = _Announced(_plain(packings), misfit, told, keys, buckets is not None)
        return told

    def withdraw(self) -> None:
        """Forget what was announced of the next step."""
        self._announced = None

    def begin(
        self,
        packings: Packings | None,
        misfit: str,
        num_microbatches: int,
        buckets: Sequence[int] | None = None,
    ) -> str | None:
        """What to tell the engine of the step that begins now; None: what was announced holds.

        Raises:
            ConfigError: nothing is known of the step, or it was announced otherwise.
            PackingError: a microbatch without documents, or a document without tokens.
        """
        announced = self._announced
        self._has_given_keys = buckets is not None or bool(announced and announced.has_given_keys)
        if packings is None and announced is None and not misfit:
            raise ConfigError(
                f"rank {self._rank}: a training step was given no packings. Attached with "
                "`packing`, every step takes packings=..., the lengths of the documents of each "
                "microbatch (also on ranks whose stage does not read tokens), or is announced."
            )
        if announced is None:
            if packings is None:
                if buckets is None and len(self.buckets.keys) > 1:
                    raise ConfigError(
                        f"rank {self._rank}: a step was told a misfit ({misfit}), but neither its "
                        "packings nor its buckets, so that stages do not know how long the "
                        "microbatches are that they receive. Give packings=... or buckets=..."
                    )
                if buckets is not None and len(buckets) != num_microbatches:
                    raise ConfigError(
                        f"rank {self._rank}: the step has {num_microbatches} microbatches, but "
                        f"buckets of {len(buckets)}. Give the rows of every microbatch."
                    )
                self.keys = None if buckets is None else list(buckets)
                rows = self.keys or [self.buckets.keys[0]] * num_microbatches
                self.banks = self.buckets.largest_banks(rows)
                self.cut_for = [None] * len(self.banks)
                self.misfit = misfit
                return misfit
            told = misfit or misfit_of(packings, self.shape, num_microbatches, self._rank)
            self._take(packings, self._chosen(packings, buckets, told), told)
            return told
        was, said = announced.packings, announced.said
        is_other = packings is not None and _plain(packings) != was
        is_other = is_other or (buckets is not None and list(buckets) != announced.keys)
        if is_other or (misfit and misfit != said) or len(was) != num_microbatches:
            raise ConfigError(
                f"rank {self._rank}: the step has {num_microbatches} microbatches with documents "
                f"of {packings} tokens, misfit {misfit!r}; announced were {len(was)} with {was}, "
                f"misfit {said!r}. The other ranks follow what was announced, so this one cannot "
                "do otherwise. Announce each step's own packings, in the order of the steps; "
                "withdraw() on all ranks takes back what was announced, which still holds."
            )
        self._announced = None
        self._take(was, announced.keys, announced.misfit)
        return None

    def _take(self, packings: Packings, keys: list[int], misfit: str) -> None:
        """These are the microbatches of the step that begins."""
        self.keys, self.misfit = keys, misfit
        self.banks = self.buckets.banks_of(packings, keys)
        self.cut_for = [
            bank if not misfit or reason_not_to_fit(lengths, self.shape) is None else None
            for lengths, bank in zip(packings, self.banks, strict=True)
        ]

    def rows(self, seq_length: int | None) -> list[int] | None:
        """Rows of each microbatch of the step that was begun last.

        Args:
            seq_length: of the schedule.

        Returns:
            None: all are as long as the schedule says. What fits no bucket has a length of its
            own, be the step announced or not, unless its buckets were given.
        """
        is_own = self.misfit and not self._has_given_keys and seq_length not in self.buckets.shapes
        return None if is_own else self.keys

    def _chosen(self, packings: Packings, given: Sequence[int] | None, misfit: str) -> list[int]:
        """The buckets of a step: those that were given, or the smallest that fit."""
        if self._needs_tokens and not misfit:
            self._warn_of_empty_pieces(packings)
        chosen = self._buckets_of(packings, given, misfit)
        if self._fills_rows and not misfit:
            for microbatch, (lengths, rows) in enumerate(zip(packings, chosen, strict=True)):
                if sum(lengths) != rows:
                    raise ConfigError(
                        f"rank {self._rank}, microbatch {microbatch}: its documents have "
                        f"{sum(lengths)} of {rows} rows. Attached with fills_rows, which lets "
                        "experts take every row, documents have to fill them; count what is left "
                        "into the last one, or leave fills_rows out."
                    )
        return chosen

    def _warn_of_empty_pieces(self, packings: Packings) -> None:
        shape = self.shape
        for microbatch, lengths in enumerate(packings):
            document = shape.first_with_empty_piece(lengths)
            if document is None:
                continue
            self._needs_tokens = False
            warnings.warn(
                f"rank {self._rank}, microbatch {microbatch}: document {document} has "
                f"{lengths[document]} tokens, and the last of its {shape.document_multiple} pieces "
                "for the context-parallel ranks has none. Where heads share keys "
                "(num_query_groups), Transformer Engine's attention may give such documents' keys "
                "gradients of memory that nobody wrote (its issue 2448), in eager training too; "
                "then graphs do not equal it. Leave out documents of fewer than "
                f"{shape.document_multiple**2} tokens, or count their padding as tokens: give "
                "attach() packing=PackedShape(..., counts_padding=True) and pack into that shape.",
                stacklevel=2,
            )
            return

    def _buckets_of(
        self, packings: Packings, given: Sequence[int] | None, misfit: str
    ) -> list[int]:
        if given is None:
            if self._needs_buckets:
                raise ConfigError(
                    f"rank {self._rank}: ranks share experts, so that microbatches of several of "
                    "them go through a chunk together, and the step was not told the buckets that "
                    "they agreed on. Give buckets=graphs.agree_on_buckets(packings), and make the "
                    "microbatches of these lengths."
                )
            return self.buckets.choose(packings)
        smallest = self.buckets.choose(packings)
        wrong = [
            microbatch
            for microbatch, (key, least) in enumerate(zip(given, smallest, strict=False))
            if not misfit and (key not in self.buckets.shapes or key < least)
        ]
        if wrong or len(given) != len(packings):
            raise ConfigError(
                f"rank {self._rank}: the buckets {list(given)} of a step do not hold its "
                f"{len(packings)} microbatches (the smallest that do: {smallest})."
            )
        return list(given)


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
