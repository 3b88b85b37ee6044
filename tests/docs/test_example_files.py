"""Every file of examples/ does what its text promises."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TORCHRUN, output_of_python

from chunkgraph.schedules import Schedule, validate

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(*command: str | Path) -> str:
    return output_of_python(*command, timeout_s=280, CUDA_VISIBLE_DEVICES="")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_own_loop_is_equal_to_eager(free_port: Callable[[], int]) -> None:
    out = run(*TORCHRUN, str(free_port()), EXAMPLES / "own_1f1b.py")
    assert out.count("losses equal to eager: True") == 2
    assert "captures=2," in out
    assert " replays=16," in out  # 7 + 3 + 6 microbatches after the first step


@pytest.mark.megatron
@pytest.mark.timeout(300)
def test_attach_trains(run_script: Callable[..., tuple[list[int], str]]) -> None:
    pytest.importorskip("megatron")
    codes, out = run_script(EXAMPLES / "megatron_attach.py")
    assert codes == [0, 0], out
    assert out.count("loss ") == 3
    assert out.count(" replays=9,") == 2


def test_schedule_from_csv_is_faster_than_1f1b(tmp_path: Path) -> None:
    path = tmp_path / "zero_bubble.csv"
    lines = run(EXAMPLES / "schedule_from_csv.py", path).splitlines()
    times = {line.partition(":")[0]: float(line.split()[1]) for line in lines}
    assert times["mine"] < times["1f1b"]
    validate(Schedule.from_csv(path.read_text()))


@pytest.mark.slow
def test_the_example_of_a_page_has_the_counts_that_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "slots.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = [block for block in blocks if "no fallbacks" in block]
    (tmp_path / "example.py").write_text(code)
    captures, replays = re.findall(r"(\d+) captures, (\d+) replays, no fallbacks", code)[0]
    out = run(tmp_path / "example.py")
    assert f"captures={captures}," in out
    assert f" replays={replays}," in out
    assert "fallbacks" not in out  # counts of nothing are left out


def test_the_notebook_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures: list[str] = []
    display = types.ModuleType("IPython.display")
    display.SVG = pictures.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    cells = json.loads((EXAMPLES / "schedules.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for cell in cells:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    assert [picture.startswith("<svg") for picture in pictures] == [True] * 3
    assert "dualpipe-v" in out.getvalue()


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text() + (ROOT / "tests/pipelining/test_example.py").read_text()
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".ipynb"):
            assert path.name in tested
