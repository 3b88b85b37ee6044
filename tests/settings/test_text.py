from __future__ import annotations

import pytest

from chunkgraph._text import counted, did_you_mean, format_bytes, shorten, shown


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("shadwo", " Did you mean 'shadow'?"),
        ("SHADOW", " Did you mean 'shadow'?"),
        ("qqq", ""),
        ("shadow" * 100_000, ""),
    ],
)
def test_nearest_finds_a_choice_in_any_case_and_no_far_one(word: str, expected: str) -> None:
    assert did_you_mean(word, ("none", "poison", "shadow")) == expected


def test_a_value_in_a_message_is_cut_at_200_characters() -> None:
    assert shown("x" * 150) == "'" + "x" * 150 + "'"
    assert shorten("y" * 201) == "y" * 197 + "..."
    for value in (["ab"] * 10**6, {i: i for i in range(10**5)}, b"\0" * 10**7, "é" * 10**7):
        assert 20 < len(shown(value)) <= 200


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1023, "1023 B"),
        (1.5 * 2**20, "1.5 MiB"),
        (2**51, "2048.0 TiB"),
    ],
)
def test_format_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_one_is_singular() -> None:
    words = ("rank", "process", "microbatch")
    assert [counted(1, word) for word in words] == ["1 rank", "1 process", "1 microbatch"]
    assert [counted(2, word) for word in words] == ["2 ranks", "2 processes", "2 microbatches"]
