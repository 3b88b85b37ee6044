"""Read document lengths from a file: a Megatron index, a NumPy array, or plain numbers.

The index (``.idx``) of a Megatron dataset is little-endian: nine bytes ``MMIDIDX``, 0, 0; the
version (uint64, 1); a code for the token type (uint8); the number S of sequences and D of document
boundaries (uint64 each); then S lengths in tokens (int32), S byte offsets into the ``.bin`` file
(int64), and D boundaries (int64): the first sequence of each document, and S at the end. Multimodal
datasets append S modes (int8).
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chunkgraph._inputs import read_input
from chunkgraph._text import shorten, shown
from chunkgraph.errors import ConfigError
from chunkgraph.packing.offsets import MAX_TOKENS

_MAGIC = b"MMIDIDX\x00\x00"
_COUNTS = struct.Struct("<QBQQ")
_HEADER_BYTES = len(_MAGIC) + _COUNTS.size
_VERSION = 1
_TYPE_CODES = range(1, 9)
_MAX_DOCUMENTS = 2**20
"""Of a longer index only the beginning is read: millions of lengths tell no more."""
_MAX_TEXT_BYTES = 2 * 2**20
_MAX_ARRAY_BYTES = 8 * _MAX_DOCUMENTS + 1024
_WHAT = "the lengths"
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
    is_partial: bool = False
    """Whether only the beginning of the file was read."""


def read_lengths(path: Path) -> DocumentLengths:
    """Read the document lengths of a dataset.

    Args:
        path: a Megatron dataset (its ``.idx`` or ``.bin`` file, or their path without the suffix),
            a one-dimensional integer array (``.npy``), or a text file of whole numbers, in which a
            line of several numbers is one packed microbatch.

    Raises:
        ConfigError: the file cannot be read, is too large or has no document, or a length is
            invalid, for example beyond `MAX_TOKENS`.
    """
    index = _index_path(path)
    source = path if index is None else index
    name = shorten(str(source))
    head = read_input(source, _WHAT, _FORMATS, len(_MAGIC), is_whole=False)
    if index is not None or head == _MAGIC:
        header = read_input(source, _WHAT, _FORMATS, _HEADER_BYTES, is_whole=False)
        is_partial = max(_read_counts(header, name)) > _MAX_DOCUMENTS + 1
        lengths = _checked(read_megatron_index(source, _MAX_DOCUMENTS), None, name)
        return replace(lengths, is_partial=is_partial)
    if path.suffix == ".npy":
        return _checked(_read_array(path, name), None, name)
    return _read_text(path, name)


def _index_path(path: Path) -> Path | None:
    """Return the index file of a path; None if the path is another kind of file."""
    if path.suffix in (".idx", ".bin"):
        return path.with_suffix(".idx")
    if not path.name:
        # The current folder or the root, which can have no suffix.
        return None
    prefixed = path.with_name(f"{path.name}.idx")
    return prefixed if prefixed.is_file() and not path.is_file() else None


def _read_array(path: Path, name: str) -> NDArray[np.int64]:
    advice = "Pass an array with the lengths of a sample of the documents."
    content = read_input(path, _WHAT, advice, _MAX_ARRAY_BYTES)
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # noqa: BLE001 - damaged headers raise errors of many kinds
        raise ConfigError(
            f"{name}: not an array of numbers ({shorten(str(error))}). {_FORMATS}"
        ) from None
    if getattr(array, "ndim", 0) != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{name}: not a one-dimensional array of integers. {_FORMATS}")
    if array.dtype.kind == "u":
        array = np.minimum(array.astype(np.uint64), MAX_TOKENS + 1)  # int64 has no room for more
    lengths: NDArray[np.int64] = array.astype(np.int64)
    return lengths


def _read_text(path: Path, name: str) -> DocumentLengths:
    tokens: list[int] = []
    ends: list[int] = []
    advice = "Pass a sample of the lengths, or a .npy array."
    with io.BytesIO(read_input(path, _WHAT, advice, _MAX_TEXT_BYTES)) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                lengths = [int(part) for part in line.replace(b",", b" ").split()]
            except ValueError:
                beginning = line.decode("utf-8", "replace").strip()[:40]
                raise ConfigError(
                    f"{name}:{number}: {beginning!r} is not a whole number. {_FORMATS}"
                ) from None
            if lengths and (min(lengths) < 0 or sum(lengths) > MAX_TOKENS):
                raise ConfigError(
                    f"{name}:{number}: the lengths {shown(lengths)} are not all between 0 and "
                    f"{MAX_TOKENS}, also in sum. Split long documents, and write each document, or "
                    "each microbatch, on a line of its own."
                )
            tokens += lengths
            if lengths:
                ends.append(len(tokens))
    groups = np.array(ends, dtype=np.int64) if len(ends) != len(tokens) else None
    return _checked(np.array(tokens, dtype=np.int64), groups, name)


def _checked(
    tokens: NDArray[np.int64], ends: NDArray[np.int64] | None, name: str
) -> DocumentLengths:
    """Drop empty documents and the microbatches that have no others."""
    is_wrong = (tokens < 0) | (tokens > MAX_TOKENS)
    if is_wrong.any():
        document = int(np.argmax(is_wrong))
        raise ConfigError(
            f"{name}: document {document}: a document of {tokens[document]} tokens; a document has "
            f"0 to {MAX_TOKENS}. Split it, or leave it out."
        )
    is_empty = tokens == 0
    num_empty = int(is_empty.sum())
    if num_empty == len(tokens):
        raise ConfigError(
            f"{name}: no document with a token ({num_empty} empty documents). {_FORMATS}"
        )
    if ends is not None:
        num_dropped = np.concatenate([[0], np.cumsum(is_empty)])
        # A microbatch that loses all its documents disappears.
        ends = np.unique(ends - num_dropped[ends])
        ends = ends[ends > 0]
    return DocumentLengths(tokens=tokens[~is_empty], microbatch_ends=ends, num_empty=num_empty)


def read_megatron_index(path: Path, limit: int | None = None) -> NDArray[np.int64]:
    """Return the tokens of each document, int64 [documents], without reading the ``.bin`` file.

    With a limit, read only the documents in the first ``limit`` sequences.

    Raises:
        ConfigError: the file cannot be read, is damaged, or is not such an index.
    """
    name = shorten(str(path))
    header = read_input(path, _WHAT, _FORMATS, _HEADER_BYTES, is_whole=False)
    num_sequences, num_boundaries = _read_counts(header, name)
    size = path.stat().st_size
    expected = _HEADER_BYTES + num_sequences * _BYTES_PER_SEQUENCE
    expected += num_boundaries * _BYTES_PER_BOUNDARY
    # Check the size first: a broken header could ask for more than the host's memory.
    if size not in (expected, expected + num_sequences):
        raise ConfigError(
            f"{name}: {size} bytes, but {num_sequences} sequences and {num_boundaries} "
            f"document boundaries take {expected}. The file is damaged, or still being written."
        )
    num_read = min(num_sequences, limit or num_sequences)
    lengths = np.fromfile(path, dtype="<i4", count=num_read, offset=_HEADER_BYTES)
    boundaries = np.fromfile(
        path,
        dtype="<i8",
        count=min(num_boundaries, limit + 1 if limit else num_boundaries),
        offset=_HEADER_BYTES + num_sequences * _BYTES_PER_SEQUENCE,
    )
    if limit and max(num_sequences, num_boundaries - 1) > limit:
        boundaries = boundaries[boundaries <= num_read]
        lengths = lengths[: boundaries[-1] if len(boundaries) else None]
    return _documents(lengths, boundaries, name)


def _read_counts(header: bytes, name: str) -> tuple[int, int]:
    if not header.startswith(_MAGIC) or len(header) < _HEADER_BYTES:
        raise ConfigError(
            f"{name}: not the index of a Megatron dataset (it does not begin with MMIDIDX)."
        )
    version, type_code, num_sequences, num_boundaries = _COUNTS.unpack_from(header, len(_MAGIC))
    if version != _VERSION or type_code not in _TYPE_CODES:
        raise ConfigError(
            f"{name}: index version {version} with token type {type_code}; only version "
            f"{_VERSION} with types 1 to 8 is supported."
        )
    return int(num_sequences), int(num_boundaries)


def _documents(
    lengths: NDArray[np.int32], boundaries: NDArray[np.int64], name: str
) -> NDArray[np.int64]:
    num_sequences = len(lengths)
    # The index of an empty dataset may have no boundary.
    ends = (boundaries[0], boundaries[-1]) if len(boundaries) else (0, 0)
    is_rising = bool((boundaries[1:] >= boundaries[:-1]).all())
    if not is_rising or ends != (0, num_sequences) or (lengths < 0).any():
        raise ConfigError(
            f"{name}: the document boundaries do not rise from 0 to {num_sequences} sequences, or "
            "a sequence has a negative length. The file is damaged."
        )
    totals = np.zeros(num_sequences + 1, dtype=np.int64)
    np.cumsum(lengths, out=totals[1:])
    starts = totals[boundaries]
    documents: NDArray[np.int64] = starts[1:] - starts[:-1]
    return documents
