"""The context-parallel sizes of a step's microbatches: which banks they need, and what was said."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from chunkgraph.engine import Agree
from chunkgraph.errors import ConfigError, SlotError
from chunkgraph.megatron.features.contexts.banks import ContextBanks
from chunkgraph.megatron.features.contexts.key import ContextBank, digest_of_plan

__all__ = ["StepContexts"]


class StepContexts:
    """What one rank's training steps are told of the banks of their microbatches.

    Args:
        banks: of this rank.
        misfit_of: why microbatches of these banks cannot be replayed, or "".
        rank: named in errors.
        agree: to compare the banks between ranks; None in a job of one.

    Attributes:
        misfit: why the step that began last was not to be replayed, or "".

    Raises:
        ConfigError: another rank has other banks.
    """

    def __init__(
        self,
        banks: ContextBanks,
        misfit_of: Callable[[Sequence[ContextBank]], str],
        rank: int,
        agree: Agree | None = None,
    ) -> None:
        self.banks = banks
        self._misfit_of = misfit_of
        self._rank = rank
        self._announced: tuple[Sequence[ContextBank], str] | None = None
        self.misfit = ""
        banks.refuse_others(rank, agree)

    def announced(self, keys: Sequence[ContextBank] | None, misfit: str) -> str:
        """Remember what was announced; why it cannot be replayed, or "".

        Raises:
            SlotError: the next step was announced already.
            ConfigError: the banks are missing.
            ReplayMismatchError: a microbatch has another process group than its graphs.
        """
        if self._announced is not None:
            raise SlotError(f"rank {self._rank}: the next step was announced already.")
        if keys is None:
            raise self._missing()
        self.banks.check(keys)
        self._announced = copy.copy(keys), misfit  # its caller may change it
        return misfit or self._misfit_of(keys)

    def withdraw(self) -> None:
        """Forget what was announced of the next step."""
        self._announced = None

    def begin(
        self, keys: Sequence[ContextBank] | None, misfit: str, num_microbatches: int
    ) -> tuple[str | None, Sequence[ContextBank]]:
        """What to tell the engine of the step that begins now (None: what was announced holds).

        Returns:
            That, and the bank of each microbatch.

        Raises:
            ConfigError: nothing is known of the step, or it was announced otherwise.
            ReplayMismatchError: a microbatch has another process group than its graphs.
        """
        if self._announced is not None:
            was, said = self._announced
            # The same sizes may be those of other documents.
            is_other = keys is not None and (
                list(keys) != list(was) or digest_of_plan(keys) not in (0, digest_of_plan(was))
            )
            if is_other or (misfit and misfit != said) or len(was) != num_microbatches:
                given = "none" if keys is None else f"of {list(keys)}"
                raise ConfigError(
                    f"rank {self._rank}: the step has {num_microbatches} microbatches, contexts "
                    f"{given}, misfit {misfit!r}; announced were {list(was)}, misfit "
                    f"{said!r}, and the schedules they are of have to be the same. The other ranks "
                    "follow what was announced, which still holds. Announce each step's own "
                    "banks, in the order of the steps; withdraw() on all ranks takes it back."
                )
            self._announced = None
            self.misfit = said or self._misfit_of(was)
            return None, was
        if keys is None:
            raise self._missing()
        self.banks.check(keys)
        if len(keys) != num_microbatches:
            raise ConfigError(
                f"rank {self._rank}: the step has {num_microbatches} microbatches, but contexts of "
                f"{len(keys)}. Give the bank of every microbatch (ContextBanks.of_schedule)."
            )
        self.misfit = misfit or self._misfit_of(keys)
        return self.misfit, copy.copy(keys)

    def _missing(self) -> ConfigError:
        return ConfigError(
            f"rank {self._rank}: a training step was given no contexts. Attached with `contexts`, "
            "every step takes contexts=..., the bank of each microbatch "
            "(ContextBanks.of_schedule), or is announced."
        )
