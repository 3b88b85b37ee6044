"""Read a text as documents, and draw sequences of one length from all of it, end to end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chunkgraph._text import shown
from chunkgraph.data.vocabulary import END_OF_DOCUMENT
from chunkgraph.errors import ConfigError

__all__ = ["PackedText", "generator", "read_documents"]

_SHIPPED = Path(__file__).with_name("persuasion.txt")
"""The text in the package; for its origin and licence see SOURCES.md next to it."""


def read_documents(path: str | Path | None = None) -> list[bytes]:
    """Read the documents of a text, which blank lines separate.

    Args:
        path: a text file, read as bytes; None: the shipped text.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    try:
        text = Path(path or _SHIPPED).read_bytes()
    except OSError as error:
        msg = (
            f"data.path: cannot read {shown(str(path))}: {error.strerror or error}. Name a text "
            "file, or set data.path to null for the text that is shipped."
        )
        raise ConfigError(msg) from None
    paragraphs = re.split(rb"\n[ \t]*(?:\n[ \t]*)+", text.replace(b"\r\n", b"\n"))
    documents = [paragraph.strip(b"\n") for paragraph in paragraphs if paragraph.strip()]
    if not documents:
        msg = f"data.path: {shown(str(path))} is empty."
        raise ConfigError(msg)
    return documents


def generator(seed: int, step: int, microbatch: int, dp_rank: int) -> np.random.Generator:
    """Return the random numbers of one microbatch, the same for every run of a seed."""
    return np.random.Generator(np.random.Philox([seed, step, microbatch, dp_rank]))


class PackedText:
    """Deterministic microbatches of a text.

    The documents, each followed by an end-of-document token, form one stream. A sequence is
    ``seq_length`` tokens of it and the token that follows.

    Args:
        documents: the bytes of each document.
        seq_length: tokens of a sequence.
        seed: seed of the order in which sequences are drawn.

    Attributes:
        num_sequences: number of different sequences.

    Raises:
        ConfigError: the text is shorter than one sequence.
    """

    def __init__(self, documents: Sequence[bytes], *, seq_length: int, seed: int) -> None:
        end = [END_OF_DOCUMENT]
        parts = [part for d in documents for part in (np.frombuffer(d, dtype=np.uint8), end)]
        self._stream = np.concatenate(parts, dtype=np.int64)
        self._seq_length = seq_length
        self._seed = seed
        self.num_sequences = (len(self._stream) - 1) // seq_length
        if self.num_sequences < 1:
            msg = (
                f"The text has {len(self._stream)} tokens, fewer than the {seq_length + 1} that a "
                f"sequence of model.seq_length {seq_length} needs. Shorten the sequence, or set "
                "data.path to a longer text."
            )
            raise ConfigError(msg)

    @classmethod
    def from_file(cls, path: str | Path | None, *, seq_length: int, seed: int) -> PackedText:
        """Pack a text file; None: the shipped text.

        Raises:
            ConfigError: the file cannot be read, or is shorter than one sequence.
        """
        return cls(read_documents(path), seq_length=seq_length, seed=seed)

    def batch(
        self, step: int, microbatch: int, micro_batch_size: int, dp_rank: int = 0
    ) -> NDArray[np.int64]:
        """Draw one microbatch with replacement, [micro_batch_size, seq_length + 1].

        Args:
            step: training step, from 0.
            microbatch: microbatch of the step, from 0.
            micro_batch_size: number of sequences.
            dp_rank: data-parallel rank.
        """
        rng = generator(self._seed, step, microbatch, dp_rank)
        starts = rng.integers(self.num_sequences, size=micro_batch_size) * self._seq_length
        batch: NDArray[np.int64] = self._stream[starts[:, None] + np.arange(self._seq_length + 1)]
        return batch
