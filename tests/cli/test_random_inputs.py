"""Random command lines and files end with a message: no traceback, raw escape or long wait."""

from __future__ import annotations

import importlib
import io
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunkgraph.cli import doctor
from chunkgraph.cli.__main__ import main
from chunkgraph.errors import WorkerError
from chunkgraph.jobs.launcher import Launcher

ROOT = Path(__file__).parents[2]
# With CHUNKGRAPH_RANDOM_INPUTS=5000 there are more, other ones each time, also for launch --plan,
# which first imports Megatron.
NUM_INPUTS = int(os.environ.get("CHUNKGRAPH_RANDOM_INPUTS", "0"))
MOST_S, MOST_BYTES = 3.0, 300e6

pytestmark = pytest.mark.usefixtures("restored_sigterm")

ODD = ["", "-", "--", "=", "0", "-1", "1e999", "nan", "inf", "9" * 400, "null", "{a: [", "*x"]
ODD += [
    "\x1b[31mred\x07",
    "é\u202e\u2028",
    "\udcff",
    "[" * 300,
    "!!python/name:os.system",
    "../..",
    "/dev/zero",
]
words = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
    st.integers().map(str),
)


def mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any] = words) -> Any:
    """Return seven times of eight what ``usual`` does; `st.one_of` forgets repetitions."""
    return st.sampled_from([usual] * 7 + [odd]).flatmap(lambda chosen: chosen)


def keys_of(path: Path) -> list[str]:
    """Return the section.key names of a configuration file."""
    keys, section = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"( *)(\w+):", line):
            section = section if match[1] else match[2]
            keys.append(f"{section}.{match[2]}" if match[1] else section)
    return keys


CONFIGS = sorted((ROOT / "configs").glob("?pu/*.yaml"))
KEYS = sorted({key for path in CONFIGS for key in keys_of(path)})


@st.composite
def mutated(draw: Any, seeds: list[bytes]) -> bytes:
    """Return one of these files with up to four pieces replaced, doubled or removed."""
    content = draw(st.sampled_from(seeds))
    pieces = st.one_of(
        words.map(lambda w: w.encode(errors="surrogateescape")), st.binary(max_size=6)
    )
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 4]))):
        begin, end = sorted(draw(st.tuples(*[st.integers(0, len(content))] * 2)))
        end = draw(st.sampled_from([begin, min(begin + 1, end), min(begin + 9, end), end]))
        middle = draw(st.one_of(pieces, st.just(2 * content[begin:end])))
        content = content[:begin] + middle + content[end:]
    return content


def npy(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array(values))
    return stream.getvalue()


FILES = {
    ".yaml": mutated([path.read_bytes() for path in CONFIGS]),
    ".csv": mutated([path.read_bytes() for path in sorted((ROOT / "schedules").glob("*.csv"))]),
    ".txt": mutated([b"12\n7\n900\n", b"3 4 5\n9 9\n", b'{"length": 7}\n', b"[1, 2]\n"]),
    ".npy": mutated([npy([5, 9, 2]), npy([1.5]), npy(["x"]), npy([[3, 4], [5, 6]])]),
    ".idx": mutated([b"MMIDIDX\0\0" + bytes(range(60)), b"MMIDIDX\0\0" + bytes(80)]),
    ".py": st.sampled_from(
        [b"", b"import sys\nsys.exit(3)", b"x = (", b"raise ValueError('\\x1b[3m')"]
    ),
}


def files(suffix: str) -> st.SearchStrategy[Any]:
    """Return what stands for a file of this kind in a command line, or a word."""
    return mostly(FILES[suffix].map(lambda content: (suffix, content)))


configs = st.one_of(files(".yaml"), st.sampled_from(list(map(str, CONFIGS))))
sizes = mostly(st.integers(1, 8).map(str))
values = mostly(st.one_of(sizes, st.sampled_from(["[2, 4]", "0.5", "true", "null"])))
overrides = st.tuples(mostly(st.sampled_from(KEYS)), values).map("=".join)
memory = mostly(st.sampled_from(["80GiB", "1MiB", "9PiB"]))


def options(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Return some options with their values."""
    each = [
        st.tuples(st.just(f"--{name.replace('_', '-')}"), value) for name, value in values.items()
    ]
    return st.lists(st.one_of(*each), max_size=3).map(lambda pairs: [w for p in pairs for w in p])


def line(command: str, *parts: st.SearchStrategy[list[Any]]) -> st.SearchStrategy[list[Any]]:
    return st.tuples(*parts).map(
        lambda lists: [command, *(word for part in lists for word in part)]
    )


outputs = st.sampled_from(["-", "out", "none/out", "/", "out.svg"])
LINES = st.one_of(
    line(
        "plan",
        st.lists(configs, max_size=1),
        st.lists(overrides, max_size=2),
        options(
            pp=sizes, vpp=sizes, group_size=sizes, num_microbatches=sizes, gpu_memory=memory,
            schedule=st.one_of(files(".csv"), st.sampled_from(["zb-h1", "interleaved", "zbv"])),
            json=outputs, svg=outputs, html=outputs, trace=outputs,
        ),
    ),
    line(
        "packing",
        st.one_of(*map(files, (".txt", ".npy", ".idx"))).map(lambda word: [word]),
        options(
            target_fallback=mostly(st.just("2%")), max_packed_tokens=values,
            global_batch_size=sizes, context_parallel_size=sizes,
        ),
    ),
    line("config", st.lists(configs, min_size=1, max_size=1), st.lists(overrides, max_size=3)),
    line(
        "train",
        st.lists(configs, min_size=1, max_size=1),
        st.lists(overrides, max_size=3),
        options(json=outputs),
    ),
    line("doctor", st.lists(words, max_size=1), options(json=outputs)),
    line(
        "launch",
        st.sampled_from([[], ["--plan"]] if NUM_INPUTS else [[]]),
        options(
            nproc_per_node=sizes, gpu_memory=memory, config=configs, device=mostly(st.just("cpu"))
        ),
        files(".py").map(lambda word: [word]),
        st.lists(words, max_size=2),
    ),
    st.lists(words, max_size=3),
)  # fmt: skip


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[Any]], tuple[object, str]]:
    """Return a function that runs a command line in this process: its exit code and output."""

    def start(_launcher: Launcher) -> None:
        raise WorkerError("no ranks in this test")

    monkeypatch.setattr(Launcher, "run", start)
    importlib.import_module("torch")  # some commands do, which takes time and memory
    monkeypatch.setattr(doctor, "_LOOKS_WITH_TORCH", ())
    monkeypatch.chdir(tmp_path)
    for config in CONFIGS:  # others extend them
        shutil.copy(config, config.name)

    def run(arguments: list[Any]) -> tuple[object, str]:
        argv = [word if isinstance(word, str) else f"file{word[0]}" for word in arguments]
        for suffix, content in (word for word in arguments if not isinstance(word, str)):
            Path(f"file{suffix}").write_bytes(content)
        # A plan runs the script in this process.
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(sys, "argv", ["chunkgraph"]),
            mock.patch.object(sys, "path", [*sys.path]),
        ):
            try:
                code: object = main(argv)
            except SystemExit as end:
                code = end.code
        return code, "".join(capsys.readouterr())

    if NUM_INPUTS:  # import Megatron
        run(["launch", "--plan", (".py", b"")])
    return run


@settings(
    max_examples=NUM_INPUTS or 150,
    derandomize=not NUM_INPUTS,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(arguments=LINES)
def test_any_input_ends_with_a_message(
    run: Callable[[list[Any]], tuple[object, str]], arguments: list[Any]
) -> None:
    statm = Path("/proc/self/statm")
    used_bytes = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0
    start = time.perf_counter()
    code, output = run(arguments)
    assert time.perf_counter() - start < MOST_S
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert not used_bytes or peak_bytes - used_bytes < MOST_BYTES
    assert code in (0, 1, 2)
    assert "Traceback (most recent call last)" not in output
    raw = {c for c in output if not c.isprintable() and c not in "\n\t"}
    assert not raw
