"""Read document lengths from the index file (``.idx``) of a Megatron dataset.

The file is little-endian: nine bytes ``MMIDIDX``, 0, 0; the version (uint64, 1); a code for the
token type (uint8); the number S of sequences and D of document boundaries (uint64 each); then S
lengths in tokens (int32), S byte offsets into the ``.bin`` file (int64), and D boundaries (int64):
the first sequence of each document, and S at the end. Multimodal datasets append S modes (int8).
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chunkgraph.errors import ConfigError

__all__ = ["MAGIC", "read_megatron_index"]

MAGIC = b"MMIDIDX\x00\x00"

_OLD_MAGIC = b"TNTIDX\x00\x00"
_COUNTS = struct.Struct("<QBQQ")
_HEADER_BYTES = len(MAGIC) + _COUNTS.size
_VERSION = 1
_TYPE_CODES = range(1, 9)
_BYTES_PER_SEQUENCE = 4 + 8
_BYTES_PER_BOUNDARY = 8


def read_megatron_index(path: Path) -> NDArray[np.int64]:
    """Return the tokens of each document, int64 [documents], without reading the ``.bin`` file.

    Raises:
        ConfigError: the file cannot be read, is damaged, or is not such an index.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            num_sequences, num_boundaries = _read_counts(stream.read(_HEADER_BYTES), path)
        expected = _HEADER_BYTES + num_sequences * _BYTES_PER_SEQUENCE
        expected += num_boundaries * _BYTES_PER_BOUNDARY
        # Check the size first: a broken header could ask for more than the host's memory.
        if size not in (expected, expected + num_sequences):
            msg = (
                f"{path}: {size} bytes, but {num_sequences} sequences and {num_boundaries} "
                f"document boundaries take {expected}. The file is damaged, or still being written."
            )
            raise ConfigError(msg)
        lengths = np.fromfile(path, dtype="<i4", count=num_sequences, offset=_HEADER_BYTES)
        boundaries = np.fromfile(
            path,
            dtype="<i8",
            count=num_boundaries,
            offset=_HEADER_BYTES + num_sequences * _BYTES_PER_SEQUENCE,
        )
    except OSError as error:
        msg = f"{path}: cannot read the index: {error.strerror or error}."
        raise ConfigError(msg) from None
    return _documents(lengths, boundaries, path)


def _read_counts(header: bytes, path: Path) -> tuple[int, int]:
    if header.startswith(_OLD_MAGIC):
        msg = (
            f"{path}: an index of the older TNTIDX format. Preprocess the data with Megatron-core."
        )
        raise ConfigError(msg)
    if not header.startswith(MAGIC) or len(header) < _HEADER_BYTES:
        msg = f"{path}: not the index of a Megatron dataset (it does not begin with MMIDIDX)."
        raise ConfigError(msg)
    version, type_code, num_sequences, num_boundaries = _COUNTS.unpack_from(header, len(MAGIC))
    if version != _VERSION or type_code not in _TYPE_CODES:
        msg = (
            f"{path}: index version {version} with token type {type_code}; only version "
            f"{_VERSION} with types 1 to 8 is supported."
        )
        raise ConfigError(msg)
    return int(num_sequences), int(num_boundaries)


def _documents(
    lengths: NDArray[np.int32], boundaries: NDArray[np.int64], path: Path
) -> NDArray[np.int64]:
    num_sequences = len(lengths)
    is_rising = bool((boundaries[1:] >= boundaries[:-1]).all())
    # The index of an empty dataset may have no boundary.
    ends = (boundaries[0], boundaries[-1]) if len(boundaries) else (0, 0)
    if not is_rising or ends != (0, num_sequences):
        msg = (
            f"{path}: the document boundaries do not rise from 0 to {num_sequences} sequences. "
            "The file is damaged."
        )
        raise ConfigError(msg)
    if num_sequences and lengths.min() < 0:
        index = int(np.argmax(lengths < 0))
        msg = f"{path}: sequence {index} has a length of {lengths[index]}. The file is damaged."
        raise ConfigError(msg)
    totals = np.zeros(num_sequences + 1, dtype=np.int64)
    np.cumsum(lengths, out=totals[1:])
    starts = totals[boundaries]
    documents: NDArray[np.int64] = starts[1:] - starts[:-1]
    return documents
