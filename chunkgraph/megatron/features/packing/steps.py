"""Plan steps on the host: the banks of microbatches, misfits, and announcements.

A step is described by the documents of its microbatches (and their rows, if ranks agreed on them),
or, with changing context-parallel sizes, by the bank of each microbatch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chunkgraph.engine import Agree, Banks
from chunkgraph.errors import ConfigError, PackingError, SlotError
from chunkgraph.megatron.feature import StepInputs, StepPlan
from chunkgraph.megatron.features.packing.bank import PackedBank, derived_call, digest_of_plan
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.packing import reason_not_to_fit

Packings = Sequence[Sequence[int]]
"""For each microbatch of a step, the tokens of each of its documents."""


@dataclass(frozen=True)
class _Contents:
    """The contents of a step.

    Attributes:
        inputs: The caller's inputs for the step.
        misfit: Reason why the contents do not fit, or ""; graphs may be missing even if they fit.
        banks: The bank of each microbatch; None if no bank has its rows.
        rows: The rows of each microbatch; None for the schedule's ``seq_length``.
        cut_for: The banks to whose sequences offsets are cut; None for a microbatch that fits no
            bank and keeps its offsets.
    """

    inputs: StepInputs
    misfit: str
    banks: Sequence[PackedBank | None]
    rows: list[int] | None
    cut_for: Sequence[PackedBank | None]


class StepPlans:
    """Plans one rank's steps from their inputs.

    Args:
        banks: The banks of this rank.
        rank: The rank, for errors.
        missing_graphs: Returns the reason why some banks have no graphs, or "".
        pins_rows: Whether calls have the caller's rows and are padded to those of their bank.
        needs_buckets: Whether a microbatch's length depends on other ranks' data, so that steps
            need lengths on which the ranks agreed.

    Attributes:
        banks: The banks that the engine captures.
        names_banks: Whether reports name the bank of a replay.
        inputs: Fields of `StepInputs` that training steps take with ``misfit``.
        shapes: Packed shapes with the most sequences, by rows, largest first.
        all_shapes: All packed shapes, largest first.
        has_lengths: Whether microbatches have one of several lengths, depending on documents.
        agree_on_rows: Element-wise maximum over all ranks, for `agree_on_buckets`.
    """

    agree_on_rows: Agree | None = None

    def __init__(
        self,
        banks: PackedBanks,
        rank: int,
        *,
        missing_graphs: Callable[[Sequence[Hashable]], str] = lambda _: "",
        pins_rows: bool = False,
        needs_buckets: bool = False,
    ) -> None:
        self._changes_size = changes_size = banks.groups is not None
        self.inputs = ("contexts",) if changes_size else ("packings", "buckets")
        self.banks = Banks(banks.keys, derived_call, drops_failed=changes_size)
        self.names_banks = len(banks.keys) > 1 or changes_size
        self.shapes = {} if changes_size else banks.by_rows
        self.all_shapes = () if changes_size else tuple(bank.shape for bank in banks.keys)
        self._banks = banks
        self.has_lengths = len(self.shapes) > 1
        self._rank = rank
        self._missing_graphs = missing_graphs
        self.pins_rows = pins_rows
        self._needs_buckets = needs_buckets and self.has_lengths
        self._announced: _Contents | None = None

    def announce(self, inputs: StepInputs) -> tuple[str, int]:
        """Store the next step's contents; return their misfit and the digest of their schedule."""
        if self._announced is not None:
            raise SlotError(f"rank {self._rank}: the next step is already announced.")
        if inputs.contexts is None and inputs.packings is None:
            raise self._missing()
        self._announced = contents = self._contents(inputs)
        return self._misfit_now(contents), digest_of_plan(contents.banks)

    def withdraw(self) -> None:
        """Discard the announcement of the next step."""
        self._announced = None

    def plan(self, inputs: StepInputs, schedule: Mapping[str, Any]) -> StepPlan:
        """Plan the step that begins; check it against the announcement, if any.

        Raises:
            ConfigError: The step has no inputs, or they differ from the announced ones.
            PackingError: A microbatch has no documents, or a document has no tokens.
        """
        announced, num_microbatches = self._announced, schedule["num_microbatches"]
        if announced is None:
            contents = self._contents(inputs, num_microbatches)
        else:
            self._refuse_another(inputs, announced, num_microbatches)
            contents = announced
        self._announced = None
        misfit = self._misfit_now(contents)
        return StepPlan(
            contents.banks,
            misfit if announced is None else None,
            digest_of_plan(contents.banks),
            misfit,
            rows=self._rows(contents, schedule.get("seq_length")),
            cut_for=contents.cut_for,
            pinned=self._pinned(contents),
        )

    def plan_forwards(self, inputs: StepInputs, schedule: Mapping[str, Any]) -> StepPlan:
        """Plan a forward-only step, which leaves announcements as they are.

        Without inputs it is eager if there are several banks, or rows are padded.
        """
        if self._changes_size or inputs.packings is None:
            return StepPlan()
        contents = self._contents(inputs, schedule["num_microbatches"])
        return StepPlan(
            contents.banks,
            self._misfit_now(contents),
            rows=self._rows(contents, schedule.get("seq_length")),
            cut_for=contents.cut_for,
            pinned=self._pinned(contents),
        )

    def keywords(self, plan: StepPlan, schedule: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keywords of a schedule, with the sizes to which rows are padded."""
        if not plan.pinned:
            return schedule
        sizes = {"seq_length": self._banks.largest_shape.max_packed_tokens, "micro_batch_size": 1}
        others = {name: value for name, value in schedule.items() if name != "decoder_seq_length"}
        return {**others, **sizes}

    def _pinned(self, contents: _Contents) -> Sequence[tuple[int, PackedBank]]:
        """Return rows and banks of microbatches whose calls are padded; empty if none is."""
        if not self.pins_rows or contents.misfit or contents.inputs.packings is None:
            return ()
        pairs = zip(contents.inputs.packings, contents.banks, strict=True)
        return [(sum(own) // b.size, b) for own, b in pairs if b is not None]

    def agree_on_buckets(self, packings: Packings) -> list[int]:
        """Choose the smallest length that holds each microbatch on every rank.

        Raises:
            ConfigError: Context-parallel sizes change.
        """
        if self._changes_size:
            raise ConfigError("Microbatches whose context-parallel sizes change have no buckets.")
        return self._banks.choose(packings, self.agree_on_rows)

    # -- contents of a step --------------------------------------------------------------------

    def _contents(self, inputs: StepInputs, num_microbatches: int | None = None) -> _Contents:
        """Return the contents of a step.

        Args:
            inputs: The caller's inputs.
            num_microbatches: Number of microbatches of the step; None if not known yet.
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
        if num_microbatches not in (None, len(banks)):
            raise ConfigError(
                f"rank {self._rank}: the step has {num_microbatches} microbatches, but contexts "
                f"for {len(banks)}. Pass the bank of every microbatch (PackedBanks.of_schedule)."
            )
        return _Contents(replace(inputs, contexts=banks), inputs.misfit, banks, None, banks)

    def _contents_of_packings(
        self, inputs: StepInputs, packings: Packings, num_microbatches: int | None
    ) -> _Contents:
        largest = self._banks.largest_shape
        misfit = inputs.misfit or self._misfit_of(packings, num_microbatches)
        rows = self._microbatch_rows(packings, inputs.buckets, misfit)
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

    def _misfit_of(self, packings: Packings, num_microbatches: int | None) -> str:
        """Return why the packings of a step do not fit the largest shape, or ""."""
        if num_microbatches not in (None, len(packings)):
            raise ConfigError(
                f"rank {self._rank}: the step has {num_microbatches} microbatches, but "
                f"{len(packings)} packings. Pass the document lengths of every microbatch."
            )
        reasons = []
        for microbatch, lengths in enumerate(packings):
            try:
                reasons.append(reason_not_to_fit(lengths, self._banks.largest_shape))
            except PackingError as error:
                raise PackingError(
                    f"rank {self._rank}, microbatch {microbatch}: {error}"
                ) from error
        return next((reason.value for reason in reasons if reason is not None), "")

    def _contents_of_rows(self, inputs: StepInputs, num_microbatches: int) -> _Contents:
        """Return the contents of a step that is not replayed and has unknown documents."""
        rows = None if inputs.buckets is None else list(inputs.buckets)
        if rows is None and self.has_lengths:
            raise ConfigError(
                f"rank {self._rank}: a step has a misfit ({inputs.misfit}), but neither "
                "packings nor buckets, so stages do not know the length of the "
                "microbatches that they receive. Pass packings=... or buckets=..."
            )
        if rows is not None and len(rows) != num_microbatches:
            raise ConfigError(
                f"rank {self._rank}: the step has {num_microbatches} microbatches, but "
                f"buckets for {len(rows)}. Pass the rows of every microbatch."
            )
        longest = self._banks.largest_shape.max_packed_tokens
        banks = [
            self._banks.most_sequences(self.shapes[n]) if n in self.shapes else None
            for n in rows or [longest] * num_microbatches
        ]
        return _Contents(inputs, inputs.misfit, banks, rows, [None] * num_microbatches)

    def _misfit_now(self, contents: _Contents) -> str:
        """Return why a step cannot be replayed, or ""; graphs of a bank may be gone by now."""
        return contents.misfit or self._missing_graphs(contents.banks)

    def _rows(self, contents: _Contents, seq_length: int | None) -> list[int] | None:
        """Return the rows of each microbatch; None if all have the schedule's ``seq_length``.

        A step that fits no bank uses the schedule's length, announced or not, unless the caller
        passed rows.
        """
        if not self.has_lengths or (self.pins_rows and contents.misfit):
            return None
        has_buckets = contents.inputs.buckets is not None
        is_unbanked = contents.misfit and not has_buckets and seq_length not in self.shapes
        return None if is_unbanked else contents.rows

    def _refuse_another(
        self, inputs: StepInputs, announced: _Contents, num_microbatches: int
    ) -> None:
        """Refuse a step whose contents differ from the announced ones."""
        expected, banks = announced.inputs, announced.banks
        contexts, packings = inputs.contexts, inputs.packings
        is_different = (
            (packings is not None and _plain(packings) != expected.packings)
            or (inputs.buckets is not None and list(inputs.buckets) != announced.rows)
            or (inputs.misfit and inputs.misfit != expected.misfit)
            or len(banks) != num_microbatches
        )
        if contexts is not None:
            # Different documents may have the same sizes.
            is_different = is_different or list(contexts) != list(banks)
            is_different = is_different or digest_of_plan(contexts) not in (
                0,
                digest_of_plan(banks),
            )
        if not is_different:
            return
        name = self.inputs[0]
        raise ConfigError(
            f"rank {self._rank}: the step differs from its announcement. It has "
            f"{num_microbatches} microbatches with {name} {getattr(inputs, name)}, misfit "
            f"{inputs.misfit!r}; announced: {len(banks)} with {getattr(expected, name)}, misfit "
            f"{expected.misfit!r}; their schedules must be the same. The other ranks follow the "
            "announcement, so this rank must follow it too. Announce the contents of each step, "
            "in the order of the steps. The announcement stays in effect until all ranks call "
            "withdraw()."
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
            f"rank {self._rank}: a training step has no {name}. With this `packing`, pass "
            f"{name}=..., {hint}, to every step, or announce the step with them."
        )

    # -- rows ----------------------------------------------------------------------------------

    def _microbatch_rows(
        self, packings: Packings, rows: Sequence[int] | None, misfit: str
    ) -> list[int]:
        """Return the rows of a step's microbatches: the caller's, or the fewest."""
        if rows is None and self._needs_buckets:
            raise ConfigError(
                f"rank {self._rank}: ranks share experts, so microbatches of several ranks "
                "go through a chunk together, but the step has no buckets on which they "
                "agreed. Pass buckets=graphs.agree_on_buckets(packings), and create the "
                "microbatches with these lengths."
            )
        smallest = self._banks.choose(packings)
        chosen = smallest if rows is None else list(rows)
        is_too_small = any(
            not misfit and (n not in self.shapes or n < least)
            for n, least in zip(chosen, smallest, strict=False)
        )
        if is_too_small or len(chosen) != len(packings):
            raise ConfigError(
                f"rank {self._rank}: the buckets {chosen} of a step do not hold its "
                f"{len(packings)} microbatches (the smallest that do: {smallest})."
            )
        if self._banks.fills_rows and not (misfit or self.pins_rows):
            for microbatch, (lengths, num_rows) in enumerate(zip(packings, chosen, strict=True)):
                if sum(lengths) != num_rows:
                    raise ConfigError(
                        f"rank {self._rank}, microbatch {microbatch}: its documents have "
                        f"{sum(lengths)} of {num_rows} rows. With fills_rows, which lets "
                        "experts take every row, documents must fill them; count the remaining "
                        "rows in the last document, or leave fills_rows out."
                    )
        return chosen


def refuse_unknown(inputs: StepInputs, plans: StepPlans | None) -> None:
    """Refuse inputs of a step that ``plans`` do not take; None takes none.

    Raises:
        ConfigError: There is such an input; the message names it.
    """
    known = () if plans is None else (*plans.inputs, "misfit")
    for name, value in vars(inputs).items():
        if name not in known and value is not None and not (name == "misfit" and not value):
            raise ConfigError(
                f"The step has {name} ({value}), but the chunk graphs were attached without them. "
                "Pass attach() a packed shape (packing=PackedShape(...)), or for contexts the "
                "banks (packing=PackedBanks.of_limits(...))."
            )


def _plain(packings: Packings) -> list[list[int]]:
    return [[int(length) for length in lengths] for lengths in packings]
