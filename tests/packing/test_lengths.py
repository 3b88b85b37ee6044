from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.errors import ConfigError
from chunkgraph.packing import DocumentLengths, read_lengths


def groups(document_lengths: DocumentLengths) -> list[list[int]]:
    """Return the microbatches of a file that has any."""
    ends = document_lengths.microbatch_ends.tolist()
    tokens = document_lengths.tokens.tolist()
    return [tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=10))
def test_numbers_are_documents_or_microbatches(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lengths") / "lengths.txt"
    path.write_text("\n".join(" ".join(map(str, line)) for line in lines))
    left = [[n for n in line if n] for line in lines]
    tokens = [n for line in left for n in line]
    if not tokens:
        with pytest.raises(ConfigError, match="no document with a token"):
            read_lengths(path)
        return
    document_lengths = read_lengths(path)
    assert document_lengths.tokens.tolist() == tokens
    assert document_lengths.num_empty == sum(map(len, lines)) - len(tokens)
    if max(map(len, lines)) > 1:
        assert groups(document_lengths) == [line for line in left if line]
    else:
        assert document_lengths.microbatch_ends is None


def test_the_longest_that_offsets_count(tmp_path: Path):
    path = tmp_path / "lengths.txt"
    path.write_text(f"{2**31 - 1}\n" * 3)
    assert read_lengths(path).tokens.tolist() == [2**31 - 1] * 3
    path.write_text(f"{2**31 - 2} 1\n" * 2)
    assert groups(read_lengths(path)) == [[2**31 - 2, 1]] * 2


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.uint64])
def test_arrays(tmp_path: Path, dtype):
    path = tmp_path / "lengths.npy"
    np.save(path, np.array([3, 0, 5], dtype=dtype))
    document_lengths = read_lengths(path)
    assert document_lengths.tokens.tolist() == [3, 5]
    assert (document_lengths.num_empty, document_lengths.microbatch_ends) == (1, None)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1.5]), "not a one-dimensional array of integers"),
        (np.array([{}]), "not an array of numbers"),
        (np.array([3, -1]), "document 1: a document of -1 tokens"),
        (np.array([2**64 - 1], dtype=np.uint64), "document 0: a document of 2147483648 tokens"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, array, message):
    path = tmp_path / "lengths.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(ConfigError, match=message) as error:
        read_lengths(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "3\nfour\n", r"a\.txt:2: 'four' is not a whole number"),
        ("a.txt", "3\n-4\n", r"a\.txt:2: the lengths \[-4\] are not all between 0 and"),
        ("a.txt", "0\n0\n", "2 empty documents"),
        ("a.txt", "3 4\n1 2147483647", r"a\.txt:2: .* also in sum\. .* on a line of its own"),
        ("a.jsonl", '{"length": 3}', "is not a whole number. Pass a Megatron dataset, a .npy"),
        ("a.npy", "", "not an array of numbers"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_lengths(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["lengths", "data.idx"])
def test_a_pipe_is_refused(tmp_path: Path, name):
    """One without a writer never begins."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="it is not a regular file"):
        read_lengths(tmp_path / name)
