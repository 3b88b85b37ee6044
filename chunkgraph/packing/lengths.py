"""Read document lengths from a file: a Megatron index, JSON lines, or plain numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chunkgraph._text import shorten, shown
from chunkgraph.errors import ConfigError
from chunkgraph.packing.json_value import ValueKind, find_key, token_counts
from chunkgraph.packing.megatron_index import MAGIC, read_megatron_index
from chunkgraph.packing.offsets import MAX_TOKENS

__all__ = ["DocumentLengths", "ReadOptions", "read_lengths"]

_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_LINES_PER_REPORT = 4096

Progress = Callable[[int, int], None]
"""A function called with the number of bytes read and the total."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options for reading JSON lines; other formats have none."""

    key: str | None = None
    """The key that holds the document; None: look for a usual one."""
    kind: ValueKind = ValueKind.AUTO
    bytes_per_token: float = 4.0
    """UTF-8 bytes per token, to estimate the tokens of text."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DocumentLengths:
    """The document lengths of a file."""

    tokens: NDArray[np.int64]
    """Tokens of each document that is not empty, [documents]."""
    microbatch_ends: NDArray[np.int64] | None
    """End of each microbatch in ``tokens``, [microbatches]; None for a file of documents."""
    num_empty: int
    """Number of documents without a token; ``tokens`` leaves them out."""
    source: str
    """A description of the file, for reports."""


def read_lengths(
    path: Path, options: ReadOptions | None = None, progress: Progress | None = None
) -> DocumentLengths:
    """Read the document lengths of a dataset.

    Args:
        path: a Megatron dataset (its ``.idx`` or ``.bin`` file, or their path without the suffix),
            JSON lines, or a text file of whole numbers. A line of several numbers is one packed
            microbatch.
        options: how to read JSON lines.
        progress: called from time to time while lines are read.

    Raises:
        ConfigError: the file cannot be read or has no document, or a line is invalid, for example
            a length beyond `MAX_TOKENS`.
    """
    options = options or ReadOptions()
    report = progress or _no_progress
    try:
        index = _index_path(path)
        if index is not None:
            return _read_index(index, path)
        if path.exists() and not (path.is_file() or path.is_dir()):
            # The file is opened twice; the second read would miss the beginning.
            msg = f"{path}: a pipe or device, but lengths are read twice. Write them to a file."
            raise ConfigError(msg)
        with path.open("rb") as stream:
            head = stream.read(4096)
        if head.startswith(MAGIC):
            return _read_index(path, path)
        if path.suffix in _JSON_SUFFIXES or head.lstrip().startswith(b"{"):
            return _read_lines(path, _JsonLine(path, options), report)
        return _read_lines(path, _NumberLine(path), report)
    except OSError as error:
        msg = f"{shorten(str(path))}: cannot read the lengths: {error.strerror or error}."
        raise ConfigError(msg) from None


def _no_progress(_done: int, _total: int) -> None:
    pass


def _index_path(path: Path) -> Path | None:
    """Return the index file of a path; None if the path is another kind of file."""
    if path.suffix == ".idx":
        return path
    if path.suffix == ".bin":
        return path.with_suffix(".idx")
    if not path.name:
        # The current folder or the root, which can have no suffix.
        return None
    prefixed = path.with_name(f"{path.name}.idx")
    return prefixed if prefixed.is_file() and not path.is_file() else None


def _read_index(index: Path, path: Path) -> DocumentLengths:
    tokens = read_megatron_index(index)
    if tokens.size and tokens.max() > MAX_TOKENS:
        document = int(np.argmax(tokens > MAX_TOKENS))
        raise ConfigError(_too_long(f"{index}: document {document}", int(tokens[document])))
    return _without_empty(tokens, None, f"Megatron index {index}", path)


def _too_long(where: str, length: int) -> str:
    return (
        f"{where}: a document of {shown(length)} tokens; a document has at most {MAX_TOKENS}. "
        "Split it, or leave it out."
    )


class _NumberLine:
    """Parse a line of whole numbers, separated by blanks or commas."""

    source = "numbers"
    # A line with one number is a document. Whether any line has more is known at the end.
    has_microbatches = False

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, line: bytes, number: int) -> list[int]:
        try:
            return [int(part) for part in line.replace(b",", b" ").split()]
        except ValueError:
            beginning = line.decode("utf-8", "replace").strip()[:40]
            msg = (
                f"{self._path}:{number}: {beginning!r} is not a whole number. Pass a Megatron "
                "dataset, JSON lines, or document lengths, one per line."
            )
            raise ConfigError(msg) from None


class _JsonLine:
    """Parse a line with a JSON object.

    The first line decides the key and whether lines are documents or whole microbatches. Mixed
    lines would be ambiguous.
    """

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self._path = path
        self._options = options
        self._key = options.key
        self._first: tuple[int, str] | None = None
        self._is_estimated = False
        self.source = "JSON lines"
        self.has_microbatches = False

    def __call__(self, line: bytes, number: int) -> list[int]:
        where = f"{self._path}:{number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            msg = f"{where}: not JSON: {error}. JSON lines have one object per line."
            raise ConfigError(msg) from None
        except RecursionError:
            msg = f"{where}: nested too deeply. JSON lines have one object per line."
            raise ConfigError(msg) from None
        self._key = find_key(value, self._key, where)
        counts = token_counts(
            value[self._key],
            self._options.kind,
            where=f"{where}: {shown(self._key)}",
            key=self._key,
            bytes_per_token=self._options.bytes_per_token,
        )
        self._is_estimated |= counts.is_estimated
        estimated = (
            f", tokens estimated at {self._options.bytes_per_token:g} bytes each"
            if self._is_estimated
            else ""
        )
        self.source = f"JSON lines, key {shown(self._key)}{estimated}"
        if self._first is None:
            self._first = number, _kind(value[self._key])
            self.has_microbatches = counts.is_microbatch
        if counts.is_microbatch != self.has_microbatches:
            first_number, first = self._first
            msg = (
                f"{where}: {shown(self._key)} has {_kind(value[self._key])}, but line "
                f"{first_number} has {first}. A list is a packed microbatch, anything else one "
                "document: use one kind on all lines."
            )
            raise ConfigError(msg)
        return counts.tokens


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    return "a text" if isinstance(value, str) else "a number"


def _read_lines(path: Path, parse: _NumberLine | _JsonLine, report: Progress) -> DocumentLengths:
    tokens: list[int] = []
    ends: list[int] = []
    for number, line in _lines(path, report):
        parsed = parse(line, number)
        if any(length < 0 for length in parsed):
            msg = f"{path}:{number}: the length {shown(min(parsed))} is negative."
            raise ConfigError(msg)
        total = sum(parsed)
        if total > MAX_TOKENS:
            where, longest = f"{path}:{number}", max(parsed)
            if longest > MAX_TOKENS:
                raise ConfigError(_too_long(where, longest))
            msg = (
                f"{where}: lengths of {total} tokens in all; a microbatch has at most "
                f"{MAX_TOKENS}. Write each microbatch, or each document, on its own line."
            )
            raise ConfigError(msg)
        tokens += parsed
        if parsed:
            ends.append(len(tokens))
    has_microbatches = parse.has_microbatches or len(ends) != len(tokens)
    groups = np.array(ends, dtype=np.int64) if has_microbatches else None
    source = f"{parse.source}, a microbatch on each line" if has_microbatches else parse.source
    return _without_empty(np.array(tokens, dtype=np.int64), groups, source, path)


def _lines(path: Path, report: Progress) -> Iterator[tuple[int, bytes]]:
    total = path.stat().st_size
    done = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            done += len(line)
            if number % _LINES_PER_REPORT == 0:
                report(done, total)
            if line.strip():
                yield number, line
    report(total, total)


def _without_empty(
    tokens: NDArray[np.int64], ends: NDArray[np.int64] | None, source: str, path: Path
) -> DocumentLengths:
    """Drop empty documents and the microbatches that have no others."""
    is_empty = tokens == 0
    num_empty = int(is_empty.sum())
    if not len(tokens):
        msg = (
            f"{path}: no document with a token: the file is empty. Pass a Megatron dataset, JSON "
            "lines, or document lengths, one per line."
        )
        raise ConfigError(msg)
    if num_empty == len(tokens):
        msg = f"{path}: no document with a token ({source}, {num_empty} empty documents)."
        raise ConfigError(msg)
    if num_empty:
        if ends is not None:
            num_dropped = np.concatenate([[0], np.cumsum(is_empty)])
            # A microbatch that loses all its documents disappears.
            ends = np.unique(ends - num_dropped[ends])
            ends = ends[ends > 0]
        tokens = tokens[~is_empty]
    return DocumentLengths(tokens=tokens, microbatch_ends=ends, num_empty=num_empty, source=source)
