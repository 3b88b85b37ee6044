"""No text makes the reader hang, fill memory or raise anything except a ConfigError."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.errors import ConfigError
from chunkgraph.settings import load_config
from chunkgraph.settings.yaml_text import parse_yaml, read_yaml

_LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in itertools.pairwise("abcdefghi")
)
_MERGES = "a: &a {x: 1, y: 2, z: 3}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n"
    for old, new in itertools.pairwise("abcdefghi")
)

_BAD = {
    "digits": ("a: " + "9" * 5000, "line 1, column 4: '999"),
    "sexagesimal": ("a: " + "1:" * 100_000 + "1", "is not a valid whole number"),
    "sexagesimal float": ("a: 1" + ":1" * 190 + ".5", "is not a valid number"),
    "int": ("a: !!int abc", "'abc' is not a valid whole number"),
    "float": ("a: !!float abc", "'abc' is not a valid number"),
    "bool": ("a: !!bool maybe", "'maybe' is not a valid truth value"),
    "timestamp": ("a: !!timestamp abc", "the tag !!timestamp is not allowed here"),
    "map of a list": ("a: !!map [1]", "the tag !!map"),
    "set": ("a: !!set {b, c}", "the tag !!set"),
    "object": ("a: !!python/object/apply:os.system [ls]", "the tag !!python/object/apply:os.s"),
    "long tag": ("a: !" + "m" * 5000 + " 1", "..."),
    "deep lists": ("a: " + "[" * 100_000, "nested deeper than 32 levels"),
    "deep blocks": ("- " * 100_000, "nested deeper than 32 levels"),
    "laughs": (_LAUGHS, "line 5, column 12: more than 20000 values after expanding aliases"),
    "merged laughs": (_MERGES, "more than 20000 values"),
    "many values": ("a: [" + "1," * 60_000 + "]", "more than 20000 values"),
    "itself": ("a: &a [*a]", "line 1, column 8: *a contains itself"),
    "no anchor": ("a: *b", "not valid YAML: found undefined alias 'b'"),
    "merge of a number": ("a: {<<: 1}", "<< takes a mapping"),
    "twice": ("a: {b: 1, 'b': 2}", "the key 'b' is written twice"),
    "twice by value": ("1: a\n1: b", "line 2, column 1: the key '1' is written twice"),
    "key of a list": ("? [a]\n: 1", "a key must be one word"),
    "NUL": ("a: 1\nb: \0", "line 2: not valid YAML: contains the character #x0000"),
    "long": ("a: " + "x" * 300_000, "longer than 262144 characters"),
}


@pytest.mark.parametrize(("text", "part"), _BAD.values(), ids=_BAD.keys())
def test_text_that_no_configuration_has_is_refused_at_once(text: str, part: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError) as error:
        parse_yaml(text, "here")
    assert time.monotonic() - started < 3
    message = str(error.value)
    assert message.startswith("here")
    assert part in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("\ufeffa: 1", {"a": 1}),
        ("a: 2024-99-99", {"a": "2024-99-99"}),
        ("a: 2024-01-01 10:00:00", {"a": "2024-01-01 10:00:00"}),
        ("a: =", {"a": "="}),
        ("a: !!str 1", {"a": "1"}),
        ("a: !!float 1", {"a": 1.0}),
        ("1: a\nyes: b\n~: c\n2024-01-01: d", {"1": "a", "yes": "b", "~": "c", "2024-01-01": "d"}),
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}),
        ("a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b}",
         {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 2}}),
        ("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b]}",
         {"a": {"x": 1}, "b": {"x": 2, "y": 2}, "c": {"x": 1, "y": 2}}),
        ("a: &a [1, 2]\nb: [*a, *a]", {"a": [1, 2], "b": [[1, 2], [1, 2]]}),
    ],
)  # fmt: skip
def test_what_yaml_is_used_for_is_read(text: str, value: object) -> None:
    assert parse_yaml(text, "here") == value


@given(st.text(alphabet="ab1.-:{}[],&*!?|>'\"#%@ \n\t~<=\\\0é", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_yaml(text, "here")
    except ConfigError as error:
        assert str(error).startswith("here")  # noqa: PT017  either is right


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.num_microbatches=2024-99-99", "expected a list of whole numbers"),
        ("train.seed=2024-99-99", "expected a whole number; got '2024-99-99' (text)"),
        ("train.num_microbatches=[" + "[1]," * 3000 + "]", "[0]: expected a whole number; got [1]"),
        ("x" * 5000 + "=1", "unknown key"),
        ("train." + "x" * 5000 + "=1", "unknown key"),
        ("model.layer_spec=" + "x" * 4000, "expected auto, local"),
        ("model.layer_spec=transfomer_engine", "Did you mean 'transformer_engine'?"),
        ("name=" + "x" * 5000, "text ends at 4096 characters"),
        ("train..lr=1", "unknown key ''"),
    ],
)
def test_an_override_is_refused_in_few_words(override: str, part: str) -> None:
    config = Path(__file__).parents[2] / "configs" / "cpu" / "gpt_pp2_vpp2_cpu.yaml"
    with pytest.raises(ConfigError) as error:
        load_config(config, [override])
    assert part in str(error.value)
    assert len(str(error.value)) < 1400


def test_an_override_below_what_is_no_section_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("train: [1]\n")
    with pytest.raises(ConfigError, match=r"train is not a section .*, but \[1\] \(list\)"):
        load_config(path, ["train.lr=1"])


def test_what_is_no_file_is_refused_in_time(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="nothing arrives in 2 seconds"):
        read_yaml(fifo)
    for path, part in {
        str(tmp_path): "Is a directory",
        "": "'': cannot read",
        "/dev/zero": "/dev/zero: larger than",
        "a\0b": "cannot read the configuration file: embedded null byte",
        "x" * 5000: "File name too long",
        str(tmp_path / "config" / "missing.yaml"): "No such file",
    }.items():
        with pytest.raises(ConfigError, match=part) as error:
            read_yaml(path)
        assert len(str(error.value)) < 400


def test_a_pipe_is_read() -> None:
    reader, writer = os.pipe()
    try:
        os.write(writer, b"a: 1\n")
        os.close(writer)
        assert read_yaml(f"/dev/fd/{reader}") == {"a": 1}
    finally:
        os.close(reader)


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for content in (b"a: 1\nb: \xff", "a: 1\n".encode("utf-16")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"line \d: the configuration file is not UTF-8"):
            read_yaml(path)
