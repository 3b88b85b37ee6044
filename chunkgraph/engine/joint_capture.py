"""Run the capture sessions of all ranks together: all ranks keep their graphs, or none does.

If one bank alone could not be captured, another session follows without it. All ranks report the
same cause of a failure.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name

from chunkgraph.engine.agreement import Agree, agree_on_cause, lost_ranks_named
from chunkgraph.engine.arguments import rank_label
from chunkgraph.engine.banks import StepBanks
from chunkgraph.engine.capture.graph_set import GraphSet
from chunkgraph.engine.capture.layers import LayerWatch
from chunkgraph.engine.capture.refusals import refuse_sparse_gradients
from chunkgraph.engine.capture.session import SessionSettings, capture_session
from chunkgraph.engine.chunk import CaptureOptions, Chunk
from chunkgraph.engine.observer import Observer
from chunkgraph.engine.program import FORWARD_ONLY
from chunkgraph.engine.tree import Call
from chunkgraph.errors import CaptureError, ChunkGraphError, WorkerError
from chunkgraph.graphs import GraphBackend, capture_failure

MakeSamples = Callable[[], Mapping[Hashable, Sequence[Call]]]


@dataclass(frozen=True)
class JointCapture:
    """The outcome of a session of all ranks, on this rank.

    Attributes:
        captured: the rank's graphs; None if any rank failed.
        verifier: verifies them; None without a verify mode.
        error: if a rank failed, the error to raise here: this rank's own, or one with the cause.
        is_cause: whether the agreed cause comes from this rank, which alone warns.
        failed_bank: index of the only bank that could not be captured; None for other failures.
    """

    captured: GraphSet | None
    verifier: Observer | None = None
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
        agree: element-wise maximum over all ranks.
    """

    chunks: tuple[Chunk, ...]
    num_slots: tuple[int, ...]
    settings: SessionSettings
    backend: GraphBackend
    options: CaptureOptions
    banks: StepBanks
    agree: Agree

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
            key = self.banks.keys[result.failed_bank]
            self.banks.drop(key)
            if result.is_cause:
                warnings.warn(
                    f"{result.error}\nAll ranks go on without graphs of {key}; steps with such a "
                    "microbatch run eagerly.",
                    stacklevel=6,
                )

    def _capture_together(self, make_samples: MakeSamples) -> JointCapture:
        """Capture on this rank, and exchange the outcome with all ranks, unless one is lost."""
        lockstep = Lockstep(self.agree, has_limit=self.settings.limit is not None)
        layers = LayerWatch()
        label = rank_label(self.chunks)
        own_error: ChunkGraphError | None = None
        captured: GraphSet | None = None
        verifier: Observer | None = None
        try:
            samples = make_samples()
            chunks = self._checked_chunks(samples)
            lockstep.begin(None)
            if lockstep.some_have_limits:
                own = "has no limit of" if self.settings.limit is None else "limits its"
                raise CaptureError(
                    f"{label} {own} slots, unlike other ranks, so they would wait for each other "
                    "forever.\n  To do: set max_slots, or max_slot_memory, on all ranks or on none."
                )
            settings = replace(
                self.settings,
                begin_part=lockstep.begin,
                any_rank=lockstep.any_rank,
                layers=layers,
            )
            with lost_ranks_named(), layers.watching(self.chunks):
                captured = capture_session(chunks, self.num_slots, samples, self.backend, settings)
            if self.options.verify != "none":  # loaded only if it is needed
                make = resolve_name("chunkgraph.engine.verify:VERIFIERS")[self.options.verify]
                around = self.backend, self.settings.host
                verifier = make(chunks, samples, captured, *around, self.options)
            lockstep.finish()
        except StoppedElsewhere as stop:
            _forget_frames(stop)
        except WorkerError:  # nothing can be agreed without a rank
            raise
        except Exception as error:  # noqa: BLE001
            # Any error: the other ranks are about to exchange outcomes.
            own_error = _explained(error, label, layers.layer)
            _forget_frames(error)
            lockstep.fail()
        cause, is_cause = agree_on_cause(self.agree, "" if own_error is None else str(own_error))
        if not cause:
            return JointCapture(captured, verifier)
        failed_bank = None
        if self.banks.drops_failed:
            is_of_bank = own_error is not None and lockstep.bank is not None
            (number,) = self.agree([self.banks.keys.index(lockstep.bank) + 1 if is_of_bank else 0])
            failed_bank = number - 1 if number else None
        state = "stopped capturing, since" if captured is None else "captured, but"
        if captured is not None:
            captured.release()
            captured = verifier = None
        self.backend.release_workspaces()
        error_here = own_error or CaptureError(
            f"{label}: {state} another rank could not; all ranks dropped their graphs. "
            f"Its message:\n{cause}"
        )
        return JointCapture(None, None, error_here, is_cause, failed_bank)

    def _checked_chunks(self, samples: Mapping[Hashable, Sequence[Call]]) -> tuple[Chunk, ...]:
        """Return the chunks as they are now, once they can be captured from these calls."""
        chunks = tuple(
            _without_backward(chunk.now(), [calls[c] for calls in samples.values()])
            for c, chunk in enumerate(self.chunks)
        )
        for chunk in chunks:
            refuse_sparse_gradients(chunk)
        for calls in samples.values():
            for chunk, call in zip(chunks, calls, strict=True):
                if call.problem:
                    raise CaptureError(f"{chunk.label}: {call.problem}")
                if chunk.parameters and call.backward is not None and call.backward.shares_pass:
                    raise CaptureError(
                        f"{chunk.label}: one backward pass runs through several of its calls, "
                        "which eager training adds up before it adds to a gradient; replays "
                        "cannot, so the last bits would differ.\n"
                        "  To do: pass both inputs in one call, concatenated, or call backward() "
                        "for each."
                    )
                if chunk.check_sample is not None:
                    args, kwargs = call.arguments()
                    chunk.check_sample(*args, **kwargs)
        return chunks


class StoppedElsewhere(Exception):  # noqa: N818
    """Another rank's session failed, so this rank's ends too. Never leaves the engine."""


class Lockstep:
    """Exchange failures between all ranks before each part of a session.

    Without it, a rank learns of another's failure only after its own session. If collectives run
    inside the session (in capture warmup, in test replays, and in every capture of the CPU
    recorder), it would wait forever in a collective that the failed rank never enters.

    Ranks have different numbers of graphs: a rank that has captured all of its graphs keeps
    answering until every rank has. Ranks with common collectives capture in the same order.

    Args:
        agree: element-wise maximum over all ranks.
        has_limit: whether this rank limits its slots.

    Attributes:
        bank: the bank whose graphs this rank captures; None if not a single bank.
        some_have_limits: whether some ranks limit their slots, and others do not.
    """

    def __init__(self, agree: Agree, *, has_limit: bool = False) -> None:
        self._agree = agree
        self._limits = int(has_limit), int(not has_limit)
        self.some_have_limits = self._has_ended = False
        self.bank: Hashable | None = None

    def begin(self, bank: Hashable | None) -> None:
        """Begin the next part of this rank's session.

        Raises:
            StoppedElsewhere: another rank failed.
        """
        self._ask(has_failed=False, is_working=True)
        self.bank = bank

    def any_rank(self, is_true: bool) -> bool:
        """Return whether ``is_true`` on a rank that asks now; ranks that begin a part say no.

        Raises:
            StoppedElsewhere: another rank failed.
        """
        return self._ask(has_failed=False, is_working=True, is_true=is_true)

    def finish(self) -> None:
        """Wait for the other ranks, after this rank has captured all of its graphs.

        Raises:
            StoppedElsewhere: another rank failed.
        """
        self.bank = None
        while not self._has_ended:
            self._ask(has_failed=False, is_working=False)

    def fail(self) -> None:
        """Report to the other ranks that this rank failed."""
        if not self._has_ended:
            self._ask(has_failed=True, is_working=False)

    def _ask(self, *, has_failed: bool, is_working: bool, is_true: bool = False) -> bool:
        values = [int(has_failed), int(is_working), int(is_true), *self._limits]
        some_failed, some_work, some_true, *limits = self._agree(values)
        self.some_have_limits = all(limits)
        self._has_ended = bool(some_failed) or not some_work
        if some_failed and not has_failed:
            raise StoppedElsewhere
        return bool(some_true)


def _explained(error: Exception, label: str, layer: str) -> ChunkGraphError:
    """Return the error of a session to report, with the layer that raised it, if any."""
    failure = error
    if not isinstance(failure, ChunkGraphError):
        failure = capture_failure(label, error)
        failure.__cause__ = error
    if not isinstance(failure, CaptureError) or not layer:
        return failure
    what, advice, rest = str(failure).partition("\n  To do:")
    report = type(failure)(f"{what}\n  in layer {layer}{advice}{rest}")
    report.__cause__ = failure
    return report


def _without_backward(chunk: Chunk, samples: Sequence[Call]) -> Chunk:
    """Return a chunk that trains nothing, such as a frozen first stage, as one without a backward.

    Others are returned as they are. A slot of a chunk without a backward is free at once, so its
    results are copied.
    """
    takes_gradients = any(sample.takes_gradients for sample in samples)
    if chunk.parameters or takes_gradients or not chunk.enables_grad:
        return chunk
    return replace(chunk, program=FORWARD_ONLY, copies_outputs=None)


def _forget_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and its causes, which hold a failed session's memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
