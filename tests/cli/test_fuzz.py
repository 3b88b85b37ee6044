"""Any command line and file ends soon with exit code 0, 1 or 2, and never in a traceback.

``CHUNKGRAPH_FUZZ_CASES`` and ``CHUNKGRAPH_FUZZ_SEED`` choose how many random command lines are run
and which; with ``pytest -s`` a summary is printed. A failure names the seed and the case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_type_hints

import pytest

from chunkgraph._text import shown
from chunkgraph.cli import train
from chunkgraph.cli.__main__ import main
from chunkgraph.schedules import list_schedules
from chunkgraph.settings import Config, load_config, to_yaml

_NUM_CASES = int(os.environ.get("CHUNKGRAPH_FUZZ_CASES", "250"))
_SEED = int(os.environ.get("CHUNKGRAPH_FUZZ_SEED", "28"))
_LIMIT_S = 3.0
_LONGEST_LINE = 2000


_CONFIGS = {
    path.stem: to_yaml(load_config(path)).encode()
    for path in sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
}
_CHARACTERS = "ab1.-+:{}[],&*!?|>'\"#%@`~<=/\\ \n\té\udcff"
_NUMBERS = ("0", "1", "2", "3", "4", "6", "8", "12", "16", "-1", "100", "1000")
_HUGE = (
    *("99999", "100000", "1000000000", "4294967296", "2147483648", "9223372036854775807"),
    *("9223372036854775808", "1" + "0" * 40, "9" * 4000, "9" * 5000, "-" + "9" * 5000),
)
_NO_NUMBERS = ("", " ", "x", "1.5", "1e3", "nan", "inf", "0x10", "1_0", "٣", "é", "--", "1 2", "½")
_YAML = (
    *("", "~", "null", "true", "yes", "''", "abc", "1.5", "1e3", "1e400", ".nan", ".inf", "-.inf"),
    *("2024-99-99", "2024-01-01", "2024-01-01 99:99:99", "1:30", "1:2:3.5", "1_0", "0b", "0x"),
    *("!!int abc", "!!int ''", "!!int", "!!float abc", "!!bool maybe", "!!timestamp abc"),
    *("!!map [1]", "!!seq {a: 1}", "!!binary abc", "!!set {a}", "!!omap [a: 1]", "!!str 1", "! 1"),
    *("!!python/object/apply:os.getcwd []", "!x y", "0x" + "f" * 3000, "1:" * 3000 + "1"),
    *("[]", "[1, 2]", "[4, 6, 8]", "[1, x]", "[[1]]", "{}", "{a: 1}", "{a: 1, a: 2}", "[" * 3000),
    *("{a: " * 500, "- " * 500, "*a", "&a [*a]", "&a 1", "<<", "=", "{<<: 1}", "? [a]\n: b"),
    *("cpu", "cuda", "auto", "shadwo", "local", "transformer_engine", "M-M*", "M|-", "a.b:c"),
    *(
        "x" * 5000,
        "[" + "1," * 3000 + "]",
        '"\\0"',
        '"\\ud800"',
        "'",
        '"',
        "%",
        "@",
        "|",
        ">",
        "a: b: c",
    ),
)
_FILES: tuple[bytes, ...] = (
    *(
        b"",
        b"\n",
        b"# only\n",
        b"[]",
        b"1",
        b"a",
        b"model:",
        b"model: {}\ntrain: {}\n",
        b"\xff\xfe",
    ),
    *(
        b"\xef\xbb\xbfname: a\n",
        "name: a".encode("utf-16"),
        b"\x00",
        b"a: \x01",
        b"\x7fELF",
        b"---\n---",
    ),
    b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(
        b"%c: &%c [%s]\n" % (c + 1, c + 1, b",".join([b"*%c" % c] * 9)) for c in b"abcdefgh"
    ),
    *(b"[" * 5000, b"{a: " * 5000, b"- " * 5000, b"? " * 5000, b"a: " + b"9" * 5000),
    *(b"a: " + b"x" * 300_000, b"a: [" + b"1," * 30_000 + b"]", b"x: y\n" * 5000),
)


@dataclasses.dataclass(frozen=True)
class _Files:
    """Names of what may be read and written."""

    folder: Path
    readable: Sequence[str]
    writable: Sequence[str]


def random_case(rng: random.Random, folder: Path) -> list[str]:
    """Draw the arguments of one command; make the files that they name in an empty folder."""
    files = _make_files(folder)
    arguments = rng.choice(list(_COMMANDS.values()))(rng, files)
    if rng.random() < 0.05:
        arguments.insert(rng.randrange(len(arguments) + 1), _text(rng))
    # No process can receive this character.
    return [argument.replace("\0", "") for argument in arguments]


def _make_files(folder: Path) -> _Files:
    (folder / "folder").mkdir()
    (folder / "file").write_text("x\n")
    (folder / "link").symlink_to("file")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("made")
    places = ["file", "link", "dangling", "new", "folder/new"]
    wrong = ["folder", "missing/new", "file/new", "loop", "x" * 300, "\udcff", "a b.svg"]
    paths = [str(folder / name) for name in (*places, *wrong)]
    return _Files(folder, [*paths, "/dev/zero"], [*paths, "-", "", "/", f"{folder}/"])


def _plan(rng: random.Random, files: _Files) -> list[str]:
    arguments = ["plan"]
    if rng.random() < 0.4:
        arguments += [_config(rng, files), *_overrides(rng)]
    options = {
        "--pp": _number,
        "--vpp": _number,
        "--group-size": _number,
        "--num-microbatches": _number,
        "--rank": _number,
        "--schedule": lambda rng: rng.choice((*list_schedules(), "auto", "1F1B", "")),
        "--cuda-graph-max-packed-tokens": _number,
        "--cuda-graph-cp-sizes": _number,
        "--costs": lambda rng: rng.choice(("F=1,B=2", "F=1,I=3,W=0.1", "F=1", "", *files.readable)),
        "--compare": None,
        "--svg": lambda rng: rng.choice(files.writable),
        "--json": lambda rng: rng.choice(files.writable),
        "--full": None,
    }
    if len(arguments) == 1:
        arguments += ["--pp", _number(rng)]
    return [*arguments, *_options(rng, options)]


def _train(rng: random.Random, files: _Files) -> list[str]:
    options = {
        "--json": lambda rng: rng.choice(files.writable),
        "--run-dir": lambda rng: rng.choice(files.writable),
        "--debug": None,
    }
    del options["--debug"]  # it shows tracebacks on purpose
    return ["train", _config(rng, files), *_overrides(rng), *_options(rng, options)]


def _packing(rng: random.Random, files: _Files) -> list[str]:
    options = {
        "--target-fallback": lambda rng: rng.choice(("0%", "1%", "50%", "0.1", "1", "x%", "nan")),
        "--max-packed-tokens": _number,
        "--max-document-tokens": _number,
        "--max-packed-seqs": _number,
        "--num-microbatches": _number,
        "--data-parallel-size": _number,
        "--global-batch-size": _number,
        "--context-parallel-size": _number,
        "--pad-seq-to-mult": _number,
        "--bytes-per-token": lambda rng: rng.choice(("4", "1e-300", "1e300", "0.5", "inf", "-1")),
        "--long-documents": lambda rng: rng.choice(("truncate", "split", "keep", "")),
        "--key": lambda rng: rng.choice(("length", "text", "a", "x" * 1000)),
        "--value": lambda rng: rng.choice(("auto", "length", "lengths", "tokens", "text")),
        "--seed": _number,
        "--json": lambda rng: rng.choice(files.writable),
    }
    return ["packing", "--lengths", _lengths(rng, files), *_options(rng, options)]


_COMMANDS = {"plan": _plan, "train": _train, "packing": _packing}


def _options(
    rng: random.Random, options: dict[str, Callable[[random.Random], str] | None]
) -> Iterator[str]:
    for name in rng.sample(sorted(options), min(len(options), rng.choice((0, 1, 2, 2, 3, 5)))):
        make = options[name]
        yield name
        if make is not None:
            yield make(rng)


def _number(rng: random.Random) -> str:
    return rng.choice(rng.choices((_NUMBERS, _HUGE, _NO_NUMBERS), (14, 2, 1))[0])


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(_CHARACTERS, k=rng.choice((1, 3, 10, 40))))


def _value(rng: random.Random) -> str:
    return rng.choice((_number, _text, lambda rng: rng.choice(_YAML)))(rng)


def _keys(cls: type = Config, before: str = "") -> Iterator[str]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield f"{before}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _keys(hints[field.name], f"{before}{field.name}.")


_KEYS = tuple(_keys())


def _overrides(rng: random.Random) -> Iterator[str]:
    for _ in range(rng.choice((0, 0, 1, 1, 3))):
        key = rng.choice(_KEYS)
        if rng.random() < 0.15:
            at = rng.randrange(len(key))
            key = key[:at] + _text(rng) + key[at + rng.randrange(3) :]
        yield f"{key}={_value(rng)}"


def _config(rng: random.Random, files: _Files) -> str:
    if rng.random() < 0.1:
        return rng.choice(files.readable)
    path = files.folder / "config.yaml"
    if rng.random() < 0.15:
        path.write_bytes(rng.choice(_FILES))
        return str(path)
    # A machine without a GPU refuses the others.
    content = rng.choice(
        [text for name, text in _CONFIGS.items() if rng.random() < 0.3 or "cpu" in name]
    )
    if rng.random() < 0.4:
        lines = content.splitlines(keepends=True)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(lines))
            key, _, _ = lines[at].partition(b":")
            value = _value(rng).encode("utf-8", "surrogateescape")
            lines[at : at + rng.choice((0, 1, 1, 1, 3))] = rng.choice(
                ([key + b": " + value + b"\n"], [value + b"\n"], [], [lines[at]] * 2)
            )
        content = b"".join(lines)
    if rng.random() < 0.1:
        content = content[: rng.randrange(len(content) + 1)]
    if rng.random() < 0.05:
        at = rng.randrange(len(content) + 1)
        content = content[:at] + rng.randbytes(4) + content[at:]
    path.write_bytes(content)
    return str(path)


def _lengths(rng: random.Random, files: _Files) -> str:
    if rng.random() < 0.15:
        return rng.choice(files.readable)
    path = files.folder / rng.choice(("lengths.txt", "lengths.jsonl", "lengths.idx", "lengths"))
    kind = rng.random()
    num_lines = rng.choice((1, 3, 20, 200))
    if kind < 0.45:
        words = (str(rng.randrange(1, 5000)) for _ in range(num_lines))
        lines = [_number(rng) if rng.random() < 0.05 else word for word in words]
        path.write_text(rng.choice(("\n", " ", ", ")).join(lines), "utf-8")
    elif kind < 0.8:
        values = (rng.randrange(5000), "text " * 50, [1, 2, 3], [{"content": "a"}], 1.5, None, {})
        usual = rng.choice(values[:4])
        key = rng.choice(("length", "lengths", "text", "tokens", "a"))
        lines = [
            json.dumps({key: rng.choice(values) if rng.random() < 0.02 else usual})
            for _ in range(num_lines)
        ]
        if rng.random() < 0.2:
            lines.append(
                rng.choice(('{"length": 1e999}', '{"length": %s}' % ("9" * 5000), "[" * 5000))
            )
        path.write_text("\n".join(lines), "utf-8")
    elif kind < 0.9:
        path.write_bytes(b"MMIDIDX\x00\x00" + rng.randbytes(rng.choice((0, 10, 25, 100))))
    else:
        path.write_bytes(rng.randbytes(rng.choice((0, 1, 100, 5000))))
    return str(path)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Return the command in this process; ``train`` ends before its workers start."""
    if importlib.util.find_spec("torch") is not None:
        import torch  # noqa: F401  loaded by the first case that asks for GPUs otherwise
    monkeypatch.setattr(train, "_train", lambda *_: 0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def _run(arguments: list[str]) -> tuple[int, str]:
    """Return exit code and standard error; let exceptions other than SystemExit pass."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
    err.flush()
    assert isinstance(err.buffer, io.BytesIO)
    return code, err.buffer.getvalue().decode()


@pytest.mark.usefixtures("command")
@pytest.mark.timeout(180 * max(1, _NUM_CASES // 500))
def test_no_command_line_ends_in_a_traceback(tmp_path: Path) -> None:
    codes: Counter[str] = Counter()
    slowest = 0.0, ""
    for number in range(_NUM_CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        rng = random.Random(f"{_SEED}/{number}")
        arguments = random_case(rng, folder)
        what = f"seed {_SEED}, case {number}: {' '.join(map(shown, arguments))}"
        started, started_cpu = time.perf_counter(), time.process_time()
        try:
            code, err = _run(arguments)
        except Exception as error:
            raise AssertionError(what) from error
        took, took_cpu = time.perf_counter() - started, time.process_time() - started_cpu
        slowest = max(slowest, (took, what))
        codes[f"{next(a for a in arguments if a in _COMMANDS)} {code}"] += 1
        assert code in (0, 1, 2), what
        assert code != 2 or err.strip(), what
        assert "Traceback" not in err, what
        assert max(map(len, err.splitlines()), default=0) < _LONGEST_LINE, what
        # Processor time: other work on this machine does not count.
        assert took_cpu < _LIMIT_S, f"{took_cpu:.1f} s: {what}"
        shutil.rmtree(folder)
    print(
        f"\nseed {_SEED}: {dict(sorted(codes.items()))}; slowest {slowest[0]:.2f} s: {slowest[1]}"
    )
    assert codes.keys() >= {f"{name} {code}" for name in _COMMANDS for code in (0, 2)}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["plan", "--pp", "100000", "--json", "-"], 2),
        (["plan", "laughs.yaml"], 2),
        (["plan", "fifo"], 2),
        (["train", "config.yaml", "train.seed=" + "9" * 5000], 2),
        (["packing", "--lengths", "fifo"], 2),
    ],
    ids=["ranks", "laughs", "fifo", "digits", "lengths"],
)
def test_a_real_process_ends_soon_too(tmp_path: Path, arguments: list[str], code: int) -> None:
    os.mkfifo(tmp_path / "fifo")
    laughs = [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in ("ab", "bc", "cd", "de", "ef")]
    (tmp_path / "laughs.yaml").write_text("\n".join(["a: &a [x, x, x]", *laughs]))
    (tmp_path / "config.yaml").write_bytes(_CONFIGS["gpt_pp2_vpp2_cpu"])
    done = subprocess.run(
        [sys.executable, "-m", "chunkgraph.cli", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.usefixtures("command")
def test_a_plan_of_a_thousand_ranks_takes_no_time() -> None:
    started = time.process_time()
    assert _run(["plan", "--pp", "1000", "--vpp", "4", "--json", "-"]) == (0, "")
    assert time.process_time() - started < 1.0


@pytest.mark.usefixtures("command")
def test_the_largest_comparison_that_is_simulated_ends_soon() -> None:
    """With costs, the steps of all schedules are simulated."""
    costs = ["--compare", "--costs", "F=1,I=3,W=0.1"]
    started = time.process_time()
    assert _run(["plan", "--pp", "50", "--vpp", "2", "--num-microbatches", "100", *costs])[0] == 0
    assert time.process_time() - started < _LIMIT_S
    code, error = _run(["plan", "--pp", "50", "--vpp", "2", "--num-microbatches", "150", *costs])
    assert code == 2
    assert "at most 24000" in error
