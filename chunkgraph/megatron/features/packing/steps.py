"""What a step's microbatches hold, on the host: their banks, whether they fit, what was announced.

A step is described by the documents of its microbatches (and their rows, where ranks agreed on
them), or where context-parallel sizes change, by the bank of each.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chunkgraph.engine import Agree
from chunkgraph.errors import ConfigError, PackingError, SlotError
from chunkgraph.megatron.features.packing.bank import PackedBank, digest_of_plan
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.derived_calls import derived_call
from chunkgraph.megatron.features.packing.params import refuse_other_length
from chunkgraph.megatron.step import StepInputs, StepPlan, StepPlanner
from chunkgraph.packing import PackedShape, reason_not_to_fit

__all__ = ["Packings", "StepPlans", "misfit_of"]

Packings = Sequence[Sequence[int]]
"""For each microbatch of a step, the tokens of each of its documents."""


@dataclass(frozen=True)
class _Contents:
    """What a step holds.

    Attributes:
        inputs: what the caller said of it.
        misfit: why it does not fit, or ""; graphs may be missing for what fits.
        banks: of each microbatch; None: its rows are of no bank.
        rows: of each microbatch; None: as many as the schedule says.
        cut_for: banks to whose sequences offsets are cut; None for a microbatch that fits none,
            whose offsets are its own.
    """

    inputs: StepInputs
    misfit: str
    banks: Sequence[PackedBank | None]
    rows: list[int] | None
    cut_for: Sequence[PackedBank | None]


class StepPlans(StepPlanner):
    """Plans one rank's steps from what they are given.

    Args:
        banks: of this rank.
        rank: named in errors.
        agree: to compare the banks between ranks; None in a job of one.
        missing_graphs: says why microbatches of some banks have no graphs, or "".
        needs_buckets: whether other ranks' data bear on a microbatch's length, so that steps are
            given lengths that were agreed on.
        needs_tokens: whether to warn, once, of a document with a context-parallel piece that holds
            no token; see `needs_tokens_in_pieces`.

    Attributes:
        has_lengths: whether microbatches have one of several lengths, by their documents.
        agree_on_rows: element-wise maximum over all ranks, for `agree_on_buckets`.

    Raises:
        ConfigError: another rank has other banks.
    """

    agree_on_rows: Agree | None = None

    def __init__(
        self,
        banks: PackedBanks,
        rank: int,
        agree: Agree | None,
        *,
        missing_graphs: Callable[[Sequence[Hashable]], str] = lambda _: "",
        needs_buckets: bool = False,
        needs_tokens: bool = False,
    ) -> None:
        banks.refuse_others(rank, agree)
        self._changes_size = changes_size = banks.groups is not None
        self.inputs = ("contexts",) if changes_size else ("packings", "buckets")
        self.keys = banks.keys
        self.derive = derived_call
        self.drops_failed = changes_size
        self.shapes = {} if changes_size else banks.by_rows
        self.all_shapes = () if changes_size else [bank.shape for bank in banks.keys]
        self._banks = banks
        self.has_lengths = len(self.shapes) > 1
        self._rank = rank
        self._missing_graphs = missing_graphs
        self._needs_buckets = needs_buckets and self.has_lengths
        self._needs_tokens = needs_tokens
        self._announced: _Contents | None = None

    def announce(self, inputs: StepInputs) -> tuple[str, int]:
        """Remember what the next step holds; return its misfit and the digest of its schedule."""
        if self._announced is not None:
            raise SlotError(f"rank {self._rank}: the next step was announced already.")
        if inputs.contexts is None and inputs.packings is None:
            raise self._missing()
        self._announced = contents = self._contents(inputs)
        return self._misfit_now(contents), digest_of_plan(contents.banks)

    def withdraw(self) -> None:
        """Forget what was announced of the next step."""
        self._announced = None

    def plan(self, inputs: StepInputs, schedule: Mapping[str, Any]) -> StepPlan:
        """Plan the step that begins, which holds what was announced.

        Raises:
            ConfigError: nothing is known of the step, or it was announced otherwise.
            PackingError: a microbatch without documents, or a document without tokens.
            ReplayMismatchError: a microbatch has another process group than its graphs.
        """
        refuse_other_length(schedule)
        announced, num_microbatches = self._announced, schedule["num_microbatches"]
        if announced is None:
            contents = self._contents(inputs, num_microbatches)
        else:
            self._refuse_another(inputs, announced, num_microbatches)
            contents = announced
        self._announced = None
        misfit = self._misfit_now(contents)
        return StepPlan(
            misfit if announced is None else None,
            misfit,
            contents.banks,
            digest_of_plan(contents.banks),
            rows=self._rows(contents, schedule.get("seq_length")),
            cut_for=contents.cut_for,
        )

    def agree_on_buckets(self, packings: Packings) -> list[int]:
        """Choose the smallest length that holds each microbatch on every rank."""
        if self._changes_size:
            return super().agree_on_buckets(packings)
        return self._banks.choose(packings, self.agree_on_rows)

    def name(self, key: Hashable) -> str:
        """Name a bank, if there are several."""
        return str(key) if len(self.keys) > 1 or self._changes_size else ""

    # -- what a step holds ---------------------------------------------------------------------

    def _contents(self, inputs: StepInputs, num_microbatches: int | None = None) -> _Contents:
        """Settle what a step holds.

        Args:
            inputs: what the caller says of it.
            num_microbatches: of the step; None: not known yet.
        """
        if inputs.contexts is not None:
            return self._contents_of_banks(inputs, num_microbatches)
        if inputs.packings is not None:
            return self._contents_of_packings(inputs, inputs.packings, num_microbatches)
        if self._changes_size or not inputs.misfit:
            raise self._missing()
        assert num_microbatches is not None
        return self._contents_of_rows(inputs, num_microbatches)

    def _contents_of_banks(self, inputs: StepInputs, num_microbatches: int | None) -> _Contents:
        banks = copy.copy(inputs.contexts)  # its caller may change it
        assert banks is not None
        self._banks.check(banks)
        if num_microbatches not in (None, len(banks)):
            raise ConfigError(
                f"rank {self._rank}: the step has {num_microbatches} microbatches, but contexts of "
                f"{len(banks)}. Give the bank of every microbatch (PackedBanks.of_schedule)."
            )
        return _Contents(replace(inputs, contexts=banks), inputs.misfit, banks, None, banks)

    def _contents_of_packings(
        self, inputs: StepInputs, packings: Packings, num_microbatches: int | None
    ) -> _Contents:
        largest = self._banks.largest_shape
        misfit = inputs.misfit or misfit_of(packings, largest, num_microbatches, self._rank)
        rows = self._chosen_rows(packings, inputs.buckets, misfit)
        banks = [
            self._banks.fewest_sequences(lengths, self.shapes[n]) if n in self.shapes else None
            for lengths, n in zip(packings, rows, strict=True)
        ]
        cut_for = [
            bank if not misfit or reason_not_to_fit(lengths, largest) is None else None
            for lengths, bank in zip(packings, banks, strict=True)
        ]
        plain = replace(inputs, packings=_plain(packings))
        return _Contents(plain, misfit, banks, rows, cut_for)

    def _contents_of_rows(self, inputs: StepInputs, num_microbatches: int) -> _Contents:
        """Settle a step that is not replayed, of whose documents nothing is known."""
        rows = None if inputs.buckets is None else list(inputs.buckets)
        if rows is None and self.has_lengths:
            raise ConfigError(
                f"rank {self._rank}: a step was told a misfit ({inputs.misfit}), but neither its "
                "packings nor its buckets, so that stages do not know how long the "
                "microbatches are that they receive. Give packings=... or buckets=..."
            )
        if rows is not None and len(rows) != num_microbatches:
            raise ConfigError(
                f"rank {self._rank}: the step has {num_microbatches} microbatches, but "
                f"buckets of {len(rows)}. Give the rows of every microbatch."
            )
        longest = self._banks.largest_shape.max_packed_tokens
        banks = [
            self._banks.most_sequences(self.shapes[n]) if n in self.shapes else None
            for n in rows or [longest] * num_microbatches
        ]
        return _Contents(inputs, inputs.misfit, banks, rows, [None] * num_microbatches)

    def _misfit_now(self, contents: _Contents) -> str:
        """Say why a step cannot be replayed, or ""; graphs of a bank may be gone by now."""
        return contents.misfit or self._missing_graphs(contents.banks)

    def _rows(self, contents: _Contents, seq_length: int | None) -> list[int] | None:
        """Return the rows of each microbatch; None: all are as long as the schedule says.

        What fits no bank has a length of its own, announced or not, unless its rows were given.
        """
        if not self.has_lengths:
            return None
        has_given_rows = contents.inputs.buckets is not None
        is_own = contents.misfit and not has_given_rows and seq_length not in self.shapes
        return None if is_own else contents.rows

    def _refuse_another(
        self, inputs: StepInputs, announced: _Contents, num_microbatches: int
    ) -> None:
        """Refuse a step that holds something else than what was announced."""
        said, was = announced.inputs, announced.banks
        contexts, packings = inputs.contexts, inputs.packings
        is_other = (
            (packings is not None and _plain(packings) != said.packings)
            or (inputs.buckets is not None and list(inputs.buckets) != announced.rows)
            or (inputs.misfit and inputs.misfit != said.misfit)
            or len(was) != num_microbatches
        )
        if contexts is not None:
            # The same sizes may be those of other documents.
            is_other = is_other or list(contexts) != list(was)
            is_other = is_other or digest_of_plan(contexts) not in (0, digest_of_plan(was))
        if not is_other:
            return
        name = self.inputs[0]
        raise ConfigError(
            f"rank {self._rank}: the step has {num_microbatches} microbatches with {name} "
            f"{getattr(inputs, name)}, misfit {inputs.misfit!r}; announced were {len(was)} with "
            f"{getattr(said, name)}, misfit {said.misfit!r}; the schedules they are of have to be "
            "the same. The other ranks follow what was announced, so this one cannot do otherwise. "
            "Announce what each step holds, in the order of the steps; withdraw() on all ranks "
            "takes back what was announced, which still holds."
        )

    def _missing(self) -> ConfigError:
        name = self.inputs[0]
        hint = (
            "the bank of each microbatch (PackedBanks.of_schedule)"
            if self._changes_size
            else "the lengths of the documents of each microbatch (also on ranks whose stage does "
            "not read tokens)"
        )
        return ConfigError(
            f"rank {self._rank}: a training step was given no {name}. Attached with this "
            f"`packing`, every step takes {name}=..., {hint}, or is announced with them."
        )

    # -- rows ----------------------------------------------------------------------------------

    def _chosen_rows(
        self, packings: Packings, rows: Sequence[int] | None, misfit: str
    ) -> list[int]:
        """Return the rows of a step's microbatches: those that were given, or the fewest."""
        if self._needs_tokens and not misfit:
            self._warn_of_empty_pieces(packings)
        chosen = self._checked_rows(packings, rows, misfit)
        if self._banks.fills_rows and not misfit:
            for microbatch, (lengths, num_rows) in enumerate(zip(packings, chosen, strict=True)):
                if sum(lengths) != num_rows:
                    raise ConfigError(
                        f"rank {self._rank}, microbatch {microbatch}: its documents have "
                        f"{sum(lengths)} of {num_rows} rows. Attached with fills_rows, which lets "
                        "experts take every row, documents have to fill them; count what is left "
                        "into the last one, or leave fills_rows out."
                    )
        return chosen

    def _checked_rows(
        self, packings: Packings, rows: Sequence[int] | None, misfit: str
    ) -> list[int]:
        if rows is None and self._needs_buckets:
            raise ConfigError(
                f"rank {self._rank}: ranks share experts, so that microbatches of several of "
                "them go through a chunk together, and the step was not told the buckets that "
                "they agreed on. Give buckets=graphs.agree_on_buckets(packings), and make the "
                "microbatches of these lengths."
            )
        smallest = self._banks.choose(packings)
        if rows is None:
            return smallest
        is_too_small = any(
            not misfit and (n not in self.shapes or n < least)
            for n, least in zip(rows, smallest, strict=False)
        )
        if is_too_small or len(rows) != len(packings):
            raise ConfigError(
                f"rank {self._rank}: the buckets {list(rows)} of a step do not hold its "
                f"{len(packings)} microbatches (the smallest that do: {smallest})."
            )
        return list(rows)

    def _warn_of_empty_pieces(self, packings: Packings) -> None:
        shape = self._banks.largest_shape
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


def misfit_of(
    packings: Packings, shape: PackedShape, num_microbatches: int | None, rank: int
) -> str:
    """Say why the packings of a step do not fit, or "".

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
    misfit = ""
    for microbatch, lengths in enumerate(packings):
        try:
            reason = reason_not_to_fit(lengths, shape)
        except PackingError as error:
            raise PackingError(f"rank {rank}, microbatch {microbatch}: {error}") from error
        if reason is not None and not misfit:
            misfit = reason.value
    return misfit


def _plain(packings: Packings) -> list[list[int]]:
    return [[int(length) for length in lengths] for lengths in packings]
