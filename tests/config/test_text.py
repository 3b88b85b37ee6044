from __future__ import annotations

import pytest

from chunkgraph._text import did_you_mean, format_bytes, name_list


def test_did_you_mean_asks_only_when_something_is_near() -> None:
    assert did_you_mean("num_layer", ["num_layers", "seed"]) == " Did you mean 'num_layers'?"
    assert did_you_mean("qqq", ["num_layers", "seed"]) == ""


def test_name_list_is_sorted() -> None:
    assert name_list({"b", "a"}) == "a, b"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (2**40, "1.0 TiB"),
        (2**51, "2048.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_format_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
