"""Read document lengths from a file: a Megatron index, a NumPy array, or plain numbers.

The index (``.idx``) of a Megatron dataset is little-endian: nine bytes ``MMIDIDX``, 0, 0; the
version (uint64, 1); a code for the token type (uint8); the number S of sequences and D of document
boundaries (uint64 each); then S lengths in tokens (int32), S byte offsets into the ``.bin`` file
(int64), and D boundaries (int64): the first sequence of each document, and S at the end. Multimodal
datasets append S modes (int8).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chunkgraph._text import shorten, shown
from chunkgraph.errors import ConfigError
from chunkgraph.packing.offsets import MAX_TOKENS

__all__ = ["DocumentLengths", "read_lengths", "read_megatron_index"]

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_COUNTS = struct.Struct("<QBQQ")
_HEADER_BYTES = len(_MAGIC) + _COUNTS.size
_VERSION = 1
_TYPE_CODES = range(1, 9)
_BYTES_PER_SEQUENCE = 4 + 8
_BYTES_PER_BOUNDARY = 8
_FORMATS = "Pass a Megatron dataset, a .npy array, or document lengths, one per line."


@dataclass(frozen=True, eq=False, kw_only=True)
class DocumentLengths:
    """The document lengths of a file."""

    tokens: NDArray[np.int64]
    """Tokens of each document that is not empty, [documents]."""
    microbatch_ends: NDArray[np.int64] | None
    """End of each microbatch in ``tokens``, [microbatches]; None for a file of documents."""
    num_empty: int
    """Number of documents without a token; ``tokens`` leaves them out."""


def read_lengths(path: Path) -> DocumentLengths:
    """Read the document lengths of a dataset.

    Args:
        path: a Megatron dataset (its ``.idx`` or ``.bin`` file, or their path without the suffix),
            a one-dimensional integer array (``.npy``), or a text file of whole numbers, in which a
            line of several numbers is one packed microbatch.

    Raises:
        ConfigError: the file cannot be read or has no document, or a length is invalid, for example
            beyond `MAX_TOKENS`.
    """
    source = path
    try:
        index = _index_path(path)
        source = path if index is None else index
        if source.exists() and not (source.is_file() or source.is_dir()):
            # The file is opened twice; the second read would miss the beginning.
            raise ConfigError(
                f"{path}: a pipe or device, but lengths are read twice. Write them to a file."
            )
        with source.open("rb") as stream:
            head = stream.read(len(_MAGIC))
        if index is not None or head == _MAGIC:
            return _checked(read_megatron_index(source), None, source)
        if path.suffix == ".npy":
            return _checked(_read_array(path), None, path)
        return _read_text(path)
    except OSError as error:
        raise ConfigError(
            f"{shorten(str(source))}: cannot read the lengths: {error.strerror or error}."
        ) from None


def _index_path(path: Path) -> Path | None:
    """Return the index file of a path; None if the path is another kind of file."""
    if path.suffix in (".idx", ".bin"):
        return path.with_suffix(".idx")
    if not path.name:
        # The current folder or the root, which can have no suffix.
        return None
    prefixed = path.with_name(f"{path.name}.idx")
    return prefixed if prefixed.is_file() and not path.is_file() else None


def _read_array(path: Path) -> NDArray[np.int64]:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(
            f"{path}: not an array of numbers ({shorten(str(error))}). {_FORMATS}"
        ) from None
    if getattr(array, "ndim", 0) != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{path}: not a one-dimensional array of integers. {_FORMATS}")
    if array.dtype.kind == "u":
        array = np.minimum(array.astype(np.uint64), MAX_TOKENS + 1)  # int64 has no room for more
    lengths: NDArray[np.int64] = array.astype(np.int64)
    return lengths


def _read_text(path: Path) -> DocumentLengths:
    tokens: list[int] = []
    ends: list[int] = []
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                lengths = [int(part) for part in line.replace(b",", b" ").split()]
            except ValueError:
                beginning = line.decode("utf-8", "replace").strip()[:40]
                raise ConfigError(
                    f"{path}:{number}: {beginning!r} is not a whole number. {_FORMATS}"
                ) from None
            if lengths and (min(lengths) < 0 or sum(lengths) > MAX_TOKENS):
                raise ConfigError(
                    f"{path}:{number}: the lengths {shown(lengths)} are not all between 0 and "
                    f"{MAX_TOKENS}, also in sum. Split long documents, and write each document, or "
                    "each microbatch, on a line of its own."
                )
            tokens += lengths
            if lengths:
                ends.append(len(tokens))
    groups = np.array(ends, dtype=np.int64) if len(ends) != len(tokens) else None
    return _checked(np.array(tokens, dtype=np.int64), groups, path)


def _checked(
    tokens: NDArray[np.int64], ends: NDArray[np.int64] | None, path: Path
) -> DocumentLengths:
    """Drop empty documents and the microbatches that have no others."""
    is_wrong = (tokens < 0) | (tokens > MAX_TOKENS)
    if is_wrong.any():
        document = int(np.argmax(is_wrong))
        raise ConfigError(
            f"{path}: document {document}: a document of {tokens[document]} tokens; a document has "
            f"0 to {MAX_TOKENS}. Split it, or leave it out."
        )
    is_empty = tokens == 0
    num_empty = int(is_empty.sum())
    if num_empty == len(tokens):
        raise ConfigError(
            f"{path}: no document with a token ({num_empty} empty documents). {_FORMATS}"
        )
    if ends is not None:
        num_dropped = np.concatenate([[0], np.cumsum(is_empty)])
        # A microbatch that loses all its documents disappears.
        ends = np.unique(ends - num_dropped[ends])
        ends = ends[ends > 0]
    return DocumentLengths(tokens=tokens[~is_empty], microbatch_ends=ends, num_empty=num_empty)


def read_megatron_index(path: Path) -> NDArray[np.int64]:
    """Return the tokens of each document, int64 [documents], without reading the ``.bin`` file.

    Raises:
        ConfigError: the file is damaged, or is not such an index.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        num_sequences, num_boundaries = _read_counts(stream.read(_HEADER_BYTES), path)
    expected = _HEADER_BYTES + num_sequences * _BYTES_PER_SEQUENCE
    expected += num_boundaries * _BYTES_PER_BOUNDARY
    # Check the size first: a broken header could ask for more than the host's memory.
    if size not in (expected, expected + num_sequences):
        raise ConfigError(
            f"{path}: {size} bytes, but {num_sequences} sequences and {num_boundaries} "
            f"document boundaries take {expected}. The file is damaged, or still being written."
        )
    lengths = np.fromfile(path, dtype="<i4", count=num_sequences, offset=_HEADER_BYTES)
    boundaries = np.fromfile(
        path,
        dtype="<i8",
        count=num_boundaries,
        offset=_HEADER_BYTES + num_sequences * _BYTES_PER_SEQUENCE,
    )
    return _documents(lengths, boundaries, path)


def _read_counts(header: bytes, path: Path) -> tuple[int, int]:
    if header.startswith(_OLD_MAGIC):
        raise ConfigError(
            f"{path}: an index of the older TNTIDX format. Preprocess the data with Megatron-core."
        )
    if not header.startswith(_MAGIC) or len(header) < _HEADER_BYTES:
        raise ConfigError(
            f"{path}: not the index of a Megatron dataset (it does not begin with MMIDIDX)."
        )
    version, type_code, num_sequences, num_boundaries = _COUNTS.unpack_from(header, len(_MAGIC))
    if version != _VERSION or type_code not in _TYPE_CODES:
        raise ConfigError(
            f"{path}: index version {version} with token type {type_code}; only version "
            f"{_VERSION} with types 1 to 8 is supported."
        )
    return int(num_sequences), int(num_boundaries)


def _documents(
    lengths: NDArray[np.int32], boundaries: NDArray[np.int64], path: Path
) -> NDArray[np.int64]:
    num_sequences = len(lengths)
    is_rising = bool((boundaries[1:] >= boundaries[:-1]).all())
    # The index of an empty dataset may have no boundary.
    ends = (boundaries[0], boundaries[-1]) if len(boundaries) else (0, 0)
    if not is_rising or ends != (0, num_sequences):
        raise ConfigError(
            f"{path}: the document boundaries do not rise from 0 to {num_sequences} sequences. "
            "The file is damaged."
        )
    if num_sequences and lengths.min() < 0:
        index = int(np.argmax(lengths < 0))
        raise ConfigError(
            f"{path}: sequence {index} has a length of {lengths[index]}. The file is damaged."
        )
    totals = np.zeros(num_sequences + 1, dtype=np.int64)
    np.cumsum(lengths, out=totals[1:])
    starts = totals[boundaries]
    documents: NDArray[np.int64] = starts[1:] - starts[:-1]
    return documents
