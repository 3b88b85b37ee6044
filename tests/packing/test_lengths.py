from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.errors import ConfigError
from chunkgraph.packing import DocumentLengths, ReadOptions, ValueKind, read_lengths


def groups(document_lengths: DocumentLengths) -> list[list[int]]:
    """Return the microbatches of a file that has any."""
    assert document_lengths.microbatch_ends is not None
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


def test_blanks_and_commas_separate(tmp_path: Path):
    path = tmp_path / "lengths"
    path.write_text("\n3, 4\r\n\n 5\t6,7 \n")
    assert groups(read_lengths(path)) == [[3, 4], [5, 6, 7]]


@pytest.mark.parametrize(
    ("options", "lines", "tokens"),
    [
        ({}, [{"length": 3}, {"length": 4}], [3, 4]),
        ({}, [{"text": "no", "length": 3}], [3]),
        ({}, [{"input_ids": [9, 9, 9]}], [3]),
        ({}, [{"text": "12345"}], [2]),
        ({}, [{"text": "\u00e9\u00e9"}, {"text": ""}], [1]),
        ({"bytes_per_token": 1.0}, [{"text": "\u00e9\u00e9a"}], [5]),
        ({}, [{"messages": [{"role": "user", "content": "1234"}, {"content": "5"}]}], [2]),
        ({"key": "n"}, [{"length": 3, "n": 7}], [7]),
        ({"key": "n", "kind": ValueKind.TOKENS}, [{"n": [1, 1]}], [2]),
    ],
)
def test_values_of_json_lines(tmp_path: Path, options, lines, tokens):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    document_lengths = read_lengths(path, ReadOptions(**options))
    assert document_lengths.tokens.tolist() == tokens
    assert document_lengths.microbatch_ends is None
    is_text = "length" not in lines[0] and not {"text", "messages"}.isdisjoint(lines[0])
    assert ("estimated" in document_lengths.source) == is_text


def test_lengths_of_one_line_are_one_microbatch(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    # Lists of one number per line are microbatches too.
    path.write_text('{"lengths": [3]}\n{"lengths": []}\n{"lengths": [4]}\n')
    assert groups(read_lengths(path)) == [[3], [4]]
    path.write_text('{"x": [3, 4]}\n{"x": [0]}\n{"x": [0, 5]}\n')
    document_lengths = read_lengths(path, ReadOptions(key="x", kind=ValueKind.LENGTHS))
    assert groups(document_lengths) == [[3, 4], [5]]
    assert document_lengths.num_empty == 2


@pytest.mark.parametrize("first", ["[4]", "[]", "[3, 4]"])
@pytest.mark.parametrize(("other", "kind"), [("7", "a number"), ('"seven"', "a text")])
def test_lists_and_numbers_of_json_lines_are_not_mixed(tmp_path: Path, first, other, kind):
    """In either order: the last line does not decide the kind of the others."""
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"lengths": {first}}}\n\n{{"lengths": {other}}}\n')
    with pytest.raises(ConfigError, match=rf":3: 'lengths' has {kind}, but line 1 has a list"):
        read_lengths(path)
    path.write_text(f'{{"lengths": {other}}}\n{{"lengths": {first}}}\n')
    with pytest.raises(ConfigError, match=rf":2: 'lengths' has a list, but line 1 has {kind}"):
        read_lengths(path)


def test_one_estimate_among_lengths_is_reported(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"x": "12345"}\n{"x": 7}\n')
    document_lengths = read_lengths(path, ReadOptions(key="x"))
    assert document_lengths.tokens.tolist() == [2, 7]
    assert "estimated" in document_lengths.source


def test_the_longest_that_offsets_count(tmp_path: Path):
    path = tmp_path / "lengths.txt"
    path.write_text(f"{2**31 - 1}\n" * 3)
    assert read_lengths(path).tokens.tolist() == [2**31 - 1] * 3
    path.write_text(f"{2**31 - 2} 1\n" * 2)
    assert groups(read_lengths(path)) == [[2**31 - 2, 1]] * 2


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", "3\nfour\n", {}, r"a\.txt:2: 'four' is not a whole number"),
        ("a.txt", "3\n-4\n", {}, r"a\.txt:2: the length -4 is negative"),
        ("a.txt", "", {}, "the file is empty. Pass a Megatron dataset"),
        ("a.txt", "0\n0\n", {}, "2 empty documents"),
        ("a.txt", "9" * 30, {}, r"a\.txt:1: a document of 9+ tokens"),
        ("a.txt", "1\n1000000000000", {}, r"a\.txt:2: a document of 1000000000000 tokens"),
        ("a.txt", "4611686018427387904\n" * 4 + "5\n", {}, r"a\.txt:1: a document of 46\d+ tokens"),
        ("a.txt", "3 4\n1 2147483648", {}, r"a\.txt:2: a document of 2147483648 tokens"),
        (
            "a.txt",
            "3 4\n1 2147483647",
            {},
            r"a\.txt:2: .* 2147483648 tokens in all; .* own line",
        ),
        ("a.jsonl", '{"length": 2147483648}', {}, r"a\.jsonl:1: a document of 2147483648 tokens"),
        ("a.jsonl", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}", {}, r"a\.jsonl:1: nested too"),
        (
            "a.jsonl",
            '{"text": "ab"}',
            {"bytes_per_token": 1e-320},
            r"a\.jsonl:1: .* inf tokens",
        ),
        ("a.jsonl", '{"text": "ab"}', {"bytes_per_token": 5e-10}, r"are 4e\+09 tokens"),
        ("a.txt", "3.5", {}, "'3.5' is not a whole number"),
        ("a.bin2", "\x00\x01\x02", {}, "is not a whole number"),
        ("a.jsonl", '{"length": 3}\n{"length"\n', {}, r"a\.jsonl:2: not JSON"),
        ("a.jsonl", "[3]", {}, r"a\.jsonl:1: a JSON list, not an object"),
        ("a.jsonl", '{"b": 1, "a": 2}', {}, r"none of the keys is a usual one \(a, b\).*--key"),
        ("a.jsonl", '{"text": "a"}', {"key": "txt"}, "no key 'txt' .* Did you mean 'text'"),
        ("a.jsonl", '{"length": 1}\n{"text": "a"}', {}, r"a\.jsonl:2: no key 'length'"),
        ("a.jsonl", '{"length": 1.5}', {}, "'length' is not a length, tokens or text: 1.5"),
        ("a.jsonl", '{"length": true}', {}, "is not a length"),
        ("a.jsonl", '{"length": -1}', {}, "the length -1 is negative"),
        ("a.jsonl", '{"text": "a"}', {"kind": ValueKind.TOKENS}, "not what --value tokens takes"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, name, content, options, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_lengths(path, ReadOptions(**options))
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read the lengths: No such file"):
        read_lengths(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match="cannot read the lengths: Is a directory"):
        read_lengths(tmp_path)
    # A dataset's suffix cannot follow these names.
    for nameless in (Path(), Path("/")):
        with pytest.raises(ConfigError, match="cannot read the lengths: Is a directory"):
            read_lengths(nameless)
    with pytest.raises(ConfigError, match="cannot read the lengths: File name too long"):
        read_lengths(tmp_path / ("x" * 300))


def test_a_pipe_is_refused(tmp_path: Path):
    """The beginning of a pipe's content would be missing, as in ``--lengths <(...)``."""
    reader, writer = os.pipe()
    os.write(writer, b"3\n4\n")
    os.close(writer)
    try:
        with pytest.raises(ConfigError, match="a pipe or device, but lengths are read twice"):
            read_lengths(Path(f"/proc/self/fd/{reader}"))
    finally:
        os.close(reader)


def test_progress_ends_at_the_whole(tmp_path: Path):
    path = tmp_path / "lengths.txt"
    path.write_text("7\n" * 10_000)
    seen: list[tuple[int, int]] = []
    read_lengths(path, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 3
    assert seen == sorted(seen)
    assert seen[-1] == (20_000, 20_000)
