"""Pictures and figures of README and docs are those of the code and of the measurements."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from chunkgraph.slots import plan_slots

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def pictures() -> Any:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_are_those_of_the_documents(pictures: Any, tmp_path: Path) -> None:
    """`make pictures` changes nothing; a table of older figures is replaced as a whole."""
    page = (ROOT / "README.md").read_text()
    table = pictures.figures()
    assert f"\n\n{table}\n\n" in page
    copy = tmp_path / "README.md"
    _, *rows = table.splitlines()
    copy.write_text(page.replace("\n".join(rows), "---|---\nolder | row"))
    pictures.write_figures(copy)
    assert copy.read_text() == page


def test_figures_are_of_one_campaign_with_its_commands(pictures: Any) -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line) for line in page.splitlines() if line.startswith("    ")]
    compared = [f"launch_compare_{name}" for name in ("s1024", "dropless_s1024")]
    names = [*pictures.FIGURES, "h200_dropless_even_s1024", *compared]
    documents = [json.loads((ROOT / f"benchmarks/{name}.json").read_text()) for name in names]
    assert len({(one["device"], one["commit"]) for one in documents}) == 1
    for document in documents:
        assert shlex.split(document["command"]) in commands


def test_the_picture_of_slots_is_that_of_a_schedule(pictures: Any) -> None:
    text = (ROOT / "docs" / "slot.svg").read_text()
    assert text == pictures.slot_picture()
    bars: dict[float, list[tuple[float, float, str]]] = {}
    for rect in ET.fromstring(text).iter(f"{SVG}rect"):
        if rect.get("class") == "slot":
            x, y, width = (float(rect.get(key, "")) for key in ("x", "y", "width"))
            bars.setdefault(y, []).append((x, x + width, rect.get("fill", "")))
    # Rank r of 3 has 3 - r slots, each with one microbatch at a time.
    planned = [plan_slots(3, rank=rank).slots_per_chunk[0] for rank in range(3)]
    assert len(bars) == sum(planned)
    assert sum(map(len, bars.values())) == 3 * 6
    for lane in bars.values():
        assert len({fill for _, _, fill in lane}) == 1
        for (_, end, _), (start, _, _) in itertools.pairwise(sorted(lane)):
            assert start >= end


def test_readme_begins_with_the_picture_and_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
    assert any("docs/slot.svg" in line for line in lines[:8])


def test_the_picture_of_a_schedule_is_that_of_the_code(pictures: Any, tmp_path: Path) -> None:
    pictures.draw_schedule(tmp_path / "schedule.svg")
    assert (tmp_path / "schedule.svg").read_text() == (ROOT / "docs" / "schedule.svg").read_text()
