"""`Capturer`: capture sessions of one engine, which all ranks run together.

All ranks keep their graphs, or none does. If one bank alone could not be captured, another session
follows without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from chunkgraph.engine.arguments import rank_label
from chunkgraph.engine.banks import BankSamples, StepBanks
from chunkgraph.engine.capture.captured_rank import CapturedRank
from chunkgraph.engine.capture.failure import SessionWatch, agree_on_cause, forget_frames
from chunkgraph.engine.capture.lockstep import Lockstep, StoppedElsewhere
from chunkgraph.engine.capture.session import SessionSettings, capture_session
from chunkgraph.engine.chunk import CaptureOptions, Chunk
from chunkgraph.engine.decide.reasons import Agree
from chunkgraph.engine.observer import Verifier, new_verifier
from chunkgraph.engine.tree import Call
from chunkgraph.errors import CaptureError, ChunkGraphError
from chunkgraph.graphs import GraphBackend

__all__ = ["Capturer", "JointCapture"]

MakeSamples = Callable[[], Mapping[Hashable, Sequence[Call]]]


@dataclass(frozen=True)
class JointCapture:
    """The outcome of a session of all ranks, on this rank.

    Attributes:
        captured: the rank's graphs; None if any rank failed.
        verifier: verifies them; None without a verify mode.
        error: if a rank failed, the error to raise here: this rank's own, or one with the cause.
        is_cause: whether the agreed cause comes from this rank, which alone warns.
        failed_bank: index of the only bank that could not be captured; None for other failures and
            for ranks that were not in lockstep.
    """

    captured: CapturedRank | None
    verifier: Verifier | None = None
    error: ChunkGraphError | None = None
    is_cause: bool = False
    failed_bank: int | None = None


@dataclass(frozen=True)
class Capturer:
    """Captures the chunks of one rank, together with all ranks.

    Attributes:
        chunks: chunks of the rank.
        num_slots: slots of each chunk.
        settings: settings of every session.
        backend: makes the graphs.
        options: see `CaptureOptions`.
        banks: the banks; those that cannot be captured are dropped from it.
        samples: the recorded calls; banks that are dropped are removed from its targets.
        agree: element-wise maximum over all ranks.
        drops_failed_banks: see `Banks`.
    """

    chunks: tuple[Chunk, ...]
    num_slots: tuple[int, ...]
    settings: SessionSettings
    backend: GraphBackend
    options: CaptureOptions
    banks: StepBanks
    samples: BankSamples
    agree: Agree
    drops_failed_banks: bool

    def capture(self, make_samples: MakeSamples) -> JointCapture:
        """Run one session, or as many as it takes to find the banks that can be captured.

        Args:
            make_samples: returns calls of every chunk, by bank; an error that it raises is an
                error of this rank's session.
        """
        while True:
            result = self._capture_together(make_samples)
            if result.failed_bank is None or len(self.banks.keys) == 1:
                return result
            self._drop_bank(self.banks.keys[result.failed_bank], result)

    def _capture_together(self, make_samples: MakeSamples) -> JointCapture:
        """Capture on this rank, and exchange the outcome with all ranks. Raises nothing."""
        banks = self.banks.keys if self.drops_failed_banks else ()
        lockstep = Lockstep(self.agree) if self.drops_failed_banks else None
        watch = SessionWatch(self.chunks, rank_label(self.chunks))
        own_error: ChunkGraphError | None = None
        captured: CapturedRank | None = None
        verifier: Verifier | None = None
        try:
            samples = make_samples()
            chunks = self._checked_chunks(samples)
            verifier = new_verifier(self.options, chunks, samples, self.backend, self.settings.host)
            captured = self._capture_here(chunks, samples, watch, lockstep)
            if lockstep is not None:
                lockstep.finish()
        except StoppedElsewhere as stop:
            forget_frames(stop)
        except Exception as error:  # noqa: BLE001
            # Any error: the other ranks are about to exchange outcomes.
            own_error = watch.explain(error)
            forget_frames(error)
            if lockstep is not None:
                lockstep.fail()
        cause, is_cause = agree_on_cause(self.agree, "" if own_error is None else str(own_error))
        if not cause:
            return JointCapture(captured, verifier)
        failed_bank = None
        if lockstep is not None:
            is_of_bank = own_error is not None and lockstep.bank is not None
            (number,) = self.agree([banks.index(lockstep.bank) + 1 if is_of_bank else 0])
            failed_bank = number - 1 if number else None
        state = "stopped capturing, since" if captured is None else "captured, but"
        if captured is not None:
            captured.release()
            captured = None
        self.backend.release_cached_memory()
        error_here = own_error or CaptureError(
            f"{watch.label}: {state} another rank could not; all ranks dropped their graphs. "
            f"Its message:\n{cause}"
        )
        return JointCapture(None, None, error_here, is_cause, failed_bank=failed_bank)

    def _checked_chunks(self, samples: Mapping[Hashable, Sequence[Call]]) -> tuple[Chunk, ...]:
        """Return the chunks as they are now, once they can be captured from these calls."""
        chunks = tuple(chunk.now() for chunk in self.chunks)
        for chunk in chunks:
            _refuse_sparse_gradients(chunk)
        for calls in samples.values():
            for chunk, call in zip(chunks, calls, strict=True):
                if call.problem:
                    raise CaptureError(f"{chunk.label}: {call.problem}")
                if chunk.check_sample is not None:
                    args, kwargs = call.arguments()
                    chunk.check_sample(*args, **kwargs)
        return chunks

    def _capture_here(
        self,
        chunks: tuple[Chunk, ...],
        samples: Mapping[Hashable, Sequence[Call]],
        watch: SessionWatch,
        lockstep: Lockstep | None,
    ) -> CapturedRank:
        """Run this rank's session, part by part with the other ranks if there is a lockstep."""
        settings = self.settings
        if lockstep is not None:
            lockstep.begin(None)
            settings = replace(settings, before_graph=lockstep.begin)
        with watch.watching(settings) as settings:
            return capture_session(chunks, self.num_slots, samples, self.backend, settings)

    def _drop_bank(self, key: Hashable, result: JointCapture) -> None:
        self.banks.drop(key, "its capture failed")
        self.samples.targets = self.banks.keys
        if result.is_cause:
            warnings.warn(
                f"{result.error}\nAll ranks go on without graphs of {key}; steps with such a "
                "microbatch run eagerly.",
                stacklevel=7,
            )


def _refuse_sparse_gradients(chunk: Chunk) -> None:
    for path, part in chunk.module.named_modules() if chunk.module is not None else ():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise CaptureError(
                f"{chunk.label}: {path or 'it'} is an embedding with sparse=True, whose gradient "
                "is a sparse tensor of a size that depends on values. Use sparse=False."
            )
