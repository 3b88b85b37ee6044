"""Chunk graphs of a rank whose context-parallel group changes from microbatch to microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from chunkgraph.engine import Banks, CaptureOptions, Chunk, ChunkGraphs, Host, StepMode
from chunkgraph.engine.decide.reasons import Agree
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.process_groups import before_groups_end
from chunkgraph.megatron.features.contexts.banks import ContextBanks
from chunkgraph.megatron.features.contexts.groups import HeldGroups, capturing_banks
from chunkgraph.megatron.features.contexts.key import ContextBank, digest_of_plan

__all__ = ["ContextGraphs"]


class ContextGraphs:
    """`ChunkGraphs` with a bank for each context-parallel size.

    All communicators of the banks are set up before anything is captured, largest first; the ranks
    capture in lockstep; a bank that some rank cannot capture is dropped on all of them. A step with
    a microbatch of a size without graphs is eager on all ranks, and counted with its reason.

    Args:
        chunks: see `ChunkGraphs`.
        num_slots: for each chunk, the most microbatches it ever has in flight for any number of
            microbatches; the scheduler's limits may make it fewer.
        banks: of this rank.
        options: see `CaptureOptions`.
        agree: element-wise maximum over all ranks; None: there is one rank.
        more: further arguments of `ChunkGraphs`.

    Attributes:
        engine: the chunk graphs themselves.
        banks: of this rank.

    Raises:
        ConfigError: another rank has other banks.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module | Chunk],
        num_slots: Sequence[int],
        banks: ContextBanks,
        *,
        options: CaptureOptions | None = None,
        agree: Agree | None = None,
        **more: Any,
    ) -> None:
        self.banks = banks
        banks.refuse_others(banks.groups.rank, agree)
        self._held = HeldGroups(
            [
                module
                for chunk in chunks
                if (module := chunk.module if isinstance(chunk, Chunk) else chunk) is not None
            ]
        )
        first = chunks[0]
        parameters = first.parameters if isinstance(first, Chunk) else first.parameters()
        self._device = next(iter(parameters)).device

        graphs = self

        class EngineHost(Host):
            def capturing(self) -> AbstractContextManager[None]:
                used = bool(graphs.engine.num_warmup_passes)
                return capturing_banks(
                    banks.groups, graphs._held, graphs._device, are_used_before=used
                )

        self.engine = ChunkGraphs(
            # Attention is given the process group of each microbatch in an attribute, which
            # `HeldGroups` puts back.
            [
                replace(
                    c if isinstance(c, Chunk) else Chunk.from_module(c, f"chunk {i}"),
                    may_leave_values=True,
                )
                for i, c in enumerate(chunks)
            ],
            banks.limits.num_slots(num_slots),
            options=options,
            agree=agree,
            host=EngineHost(),
            takes_misfits=True,
            banks=Banks(banks.keys, banks.derive, drops_failed=True),
            **more,
        )
        banks.groups.hold(self.engine)
        before_groups_end(self.engine.release)
        self.callables = self.engine.callables
        self._announced: list[ContextBank] | None = None  # of the next training step

    @property
    def counters(self) -> Any:
        """Captures, replays and eager fallbacks so far."""
        return self.engine.counters

    @contextmanager
    def step(
        self, banks: Sequence[ContextBank], *, misfit: str = "", **arguments: Any
    ) -> Iterator[StepMode]:
        """One call of the schedule; all ranks of the job enter it together.

        Args:
            banks: of each microbatch of this rank (`ContextBanks.of_schedule`).
            misfit: why the step is not to be replayed for another reason, or "".
            arguments: see `ChunkGraphs.step`.

        Raises:
            ReplayMismatchError: a microbatch has another process group than its graphs.
            ConfigError: on all ranks: the banks are of different schedules. On this rank: others
                were announced.
        """
        self.banks.check(banks)
        is_training = not arguments.get("forward_only")
        if is_training and self._announced is not None and list(banks) != self._announced:
            raise ConfigError(
                f"The step has microbatches of {list(banks)}; announced were {self._announced}. "
                "The other ranks follow what was announced. Announce each step's own banks; "
                "withdraw() on all ranks takes back what was announced, which still holds."
            )
        # What was announced holds, even if banks were dropped or tried again since.
        told = misfit or (None if self._announced is not None else self.engine.misfit_of(banks))
        if is_training:
            self._announced = None
        with (
            self.engine.step(
                len(banks),
                misfit=told,
                banks=banks,
                plan_digest=digest_of_plan(banks),
                **arguments,
            ) as mode,
            self._held.put_back(is_replayed=mode is StepMode.REPLAY),
        ):
            yield mode

    def announce(self, banks: Sequence[ContextBank], misfit: str = "") -> None:
        """Say of the next training step which banks it has; see `ChunkGraphs.announce`."""
        self.banks.check(banks)
        self.engine.announce(
            misfit or self.engine.misfit_of(banks), plan_digest=digest_of_plan(banks)
        )
        self._announced = list(banks)

    def withdraw(self) -> None:
        """Take back what was announced; see `ChunkGraphs.withdraw`."""
        self.engine.withdraw()
        self._announced = None

    def release(self) -> None:
        """Drop the graphs; process groups may be destroyed after it."""
        self.engine.release()
