"""Read a text as documents of bytes, and draw sequences of one length or whole documents of it.

Every byte is a token, and one more token ends a document. Draws depend on their seed alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chunkgraph._inputs import read_input
from chunkgraph._text import shown
from chunkgraph.errors import ConfigError

__all__ = [
    "END_OF_DOCUMENT",
    "NUM_TOKENS",
    "DocumentRow",
    "Documents",
    "PackedText",
    "read_documents",
]

END_OF_DOCUMENT = 256
"""Token after the last byte of a document."""
NUM_TOKENS = 257
"""Number of tokens: 256 bytes and the end of a document. Models may round up their tables."""

_SHIPPED = Path(__file__).with_name("persuasion.txt")
"""The text in the package; for its origin and licence see SOURCES.md next to it."""

_MAX_BYTES = 6 * 2**20
_ADVICE = "Name a text file, or set data.path to null for the text that is shipped."


def read_documents(path: str | Path | None = None) -> list[bytes]:
    """Read the documents of a text, which blank lines separate.

    Args:
        path: a text file, read as bytes; None: the shipped text.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    text = read_input(path or _SHIPPED, "the text of data.path", _ADVICE, _MAX_BYTES)
    paragraphs = re.split(rb"\n[ \t]*(?:\n[ \t]*)+", text.replace(b"\r\n", b"\n"))
    documents = [paragraph.strip(b"\n") for paragraph in paragraphs if paragraph.strip()]
    if not documents:
        raise ConfigError(f"data.path: {shown(str(path))} is empty.")
    return documents


def _generator(seed: int, step: int, microbatch: int, dp_rank: int) -> np.random.Generator:
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
        text = b"\0".join([*documents, b""])
        self._stream = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        ends = np.cumsum([len(document) + 1 for document in documents], dtype=np.int64) - 1
        self._stream[ends] = END_OF_DOCUMENT
        self._seq_length = seq_length
        self._seed = seed
        self.num_sequences = (len(self._stream) - 1) // seq_length
        if self.num_sequences < 1:
            raise ConfigError(
                f"The text has {len(self._stream)} tokens, fewer than the {seq_length + 1} that a "
                f"sequence of model.seq_length {seq_length} needs. Shorten the sequence, or set "
                "data.path to a longer text."
            )

    def batch(
        self, step: int, microbatch: int, micro_batch_size: int, dp_rank: int = 0
    ) -> NDArray[np.int64]:
        """Draw one microbatch with replacement, [micro_batch_size, seq_length + 1].

        Steps, and the microbatches of a step, are numbered from 0.
        """
        rng = _generator(self._seed, step, microbatch, dp_rank)
        starts = rng.integers(self.num_sequences, size=micro_batch_size) * self._seq_length
        batch: NDArray[np.int64] = self._stream[starts[:, None] + np.arange(self._seq_length + 1)]
        return batch


@dataclass(frozen=True, eq=False)
class DocumentRow:
    """The documents of one microbatch, end to end, without padding.

    Attributes:
        tokens: tokens of all documents, [sum of lengths].
        labels: the token after each token, [sum of lengths]; the end of document after its last.
        lengths: tokens of each document.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    lengths: tuple[int, ...]

    @classmethod
    def of_documents(cls, documents: Sequence[NDArray[np.integer]]) -> DocumentRow:
        """Return the row of the tokens of these documents, in order; it may be empty."""
        lengths = tuple(len(document) for document in documents)
        tokens = np.concatenate([np.empty(0, np.int64), *documents], dtype=np.int64)
        labels = np.append(tokens[1:], END_OF_DOCUMENT)[: len(tokens)]
        labels[np.cumsum(lengths, dtype=np.int64) - 1] = END_OF_DOCUMENT
        return cls(tokens, labels, lengths)


class Documents:
    """Deterministic microbatches of whole documents.

    A document longer than a row is split into parts, and each part is a document. A row is filled
    with documents drawn with replacement as long as they fit; their number is not limited.

    Args:
        documents: the bytes of each document; at least one is not empty.
        num_tokens: tokens of a row.
        seed: seed of the order in which documents are drawn.
        multiple: documents are padded to a multiple of this many rows, which count as well; divides
            ``num_tokens``.
    """

    def __init__(
        self, documents: Sequence[bytes], *, num_tokens: int, seed: int, multiple: int = 1
    ) -> None:
        self.num_tokens = num_tokens
        self.seed = seed
        self.multiple = multiple
        self._parts = [
            np.frombuffer(document[start : start + num_tokens], dtype=np.uint8)
            for document in documents
            for start in range(0, len(document), num_tokens)
        ]

    def row(self, step: int, microbatch: int, dp_rank: int = 0) -> DocumentRow:
        """Draw one microbatch of a data-parallel rank, by step and microbatch, both from 0."""
        return DocumentRow.of_documents(self.draw(_generator(self.seed, step, microbatch, dp_rank)))

    def draw(self, rng: np.random.Generator) -> list[NDArray[np.uint8]]:
        """Return the documents of a microbatch."""
        drawn: list[NDArray[np.uint8]] = []
        num_free = self.num_tokens
        while True:
            part = self._parts[int(rng.integers(len(self._parts)))]
            num_free -= -(-len(part) // self.multiple) * self.multiple
            if num_free < 0:
                return drawn
            drawn.append(part)
