"""Capture sessions of one engine: again without a bank, if that bank alone failed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from chunkgraph.engine.banks import BankSamples, StepBanks
from chunkgraph.engine.capture.failure import SessionWatch
from chunkgraph.engine.capture.joint_capture import JointCapture, capture_together
from chunkgraph.engine.capture.session import SessionSettings
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.decide.reasons import Agree
from chunkgraph.engine.defaults import rank_label
from chunkgraph.engine.options import VerifyMode
from chunkgraph.engine.signature import Call
from chunkgraph.engine.verify import Surroundings, Verifier, new_verifier
from chunkgraph.engine.watch.captured_model import check_surroundings
from chunkgraph.errors import CaptureError

__all__ = ["Capturer"]

MakeSamples = Callable[[], Mapping[Hashable, Sequence[Call]]]


@dataclass(frozen=True)
class Capturer:
    """Captures the chunks of one rank, together with all ranks.

    Attributes:
        chunks: of the rank.
        num_slots: of each chunk.
        settings: of every session.
        surroundings: of the eager passes of ``verify``; its backend makes the graphs.
        verify: see `CaptureOptions`.
        banks: loses those that could not be captured.
        samples: is told which banks are still wanted.
        agree: all ranks come to it together.
        drops_failed_banks: see `Banks`.
    """

    chunks: tuple[Chunk, ...]
    num_slots: tuple[int, ...]
    settings: SessionSettings
    surroundings: Surroundings
    verify: VerifyMode
    banks: StepBanks
    samples: BankSamples
    agree: Agree
    drops_failed_banks: bool

    def capture(self, make_samples: MakeSamples) -> tuple[JointCapture, Verifier | None]:
        """One session, or as many as it takes to find the banks that can be captured.

        Args:
            make_samples: gives calls of every chunk, by bank; what it raises is an error of this
                rank's session.

        Returns:
            How it went, and what verifies the graphs, if anything is to.
        """
        verifier: Verifier | None = None

        def prepare() -> tuple[Sequence[Chunk], Mapping[Hashable, Sequence[Call]]]:
            nonlocal verifier
            samples = make_samples()
            chunks = tuple(chunk.now() for chunk in self.chunks)
            for chunk in chunks:
                _refuse_sparse_gradients(chunk)
            for calls in samples.values():
                for chunk, call in zip(chunks, calls, strict=True):
                    check_surroundings(chunk.label, chunk.parameters)
                    if call.problem:
                        raise CaptureError(f"{chunk.label}: {call.problem}")
                    if chunk.check_sample is not None:
                        args, kwargs = call.arguments()
                        chunk.check_sample(*args, **kwargs)
            verifier = new_verifier(self.verify, chunks, samples, self.surroundings)
            return (chunks if verifier is None else verifier.chunks), samples

        def begin_bank(bank: Hashable) -> None:
            if verifier is not None:
                verifier.begin_bank(bank)

        while True:
            result = capture_together(
                prepare,
                self.num_slots,
                self.surroundings.backend,
                replace(self.settings, before_graph=begin_bank),
                SessionWatch(self.chunks, rank_label(self.chunks)),
                self.agree,
                in_lockstep=self.banks.keys if self.drops_failed_banks else (),
            )
            if result.failed_bank is None or len(self.banks.keys) == 1:
                return result, verifier
            self._drop_bank(result)

    def _drop_bank(self, result: JointCapture) -> None:
        assert result.failed_bank is not None
        key = self.banks.keys[result.failed_bank]
        self.banks.drop(key, "its capture failed")
        self.samples.wanted = self.banks.keys
        if result.is_told_here:
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
