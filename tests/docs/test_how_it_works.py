"""docs/how_it_works.md names the files of the core as they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how_it_works.md").read_text()
ROWS = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", PAGE, re.MULTILINE)


def num_lines(name: str) -> int:
    return len((ROOT / "chunkgraph" / name).read_text().splitlines())


def test_the_path_has_the_stated_files_and_lines() -> None:
    assert 10 <= len(ROWS) <= 14
    counts = {name: num_lines(name) for name, _ in ROWS}
    wrong = {name: counts[name] for name, stated in ROWS if abs(counts[name] - int(stated)) > 10}
    assert not wrong
    assert sum(counts.values()) <= 4525


def test_the_picture_shows_these_files() -> None:
    picture = (ROOT / "docs" / "how_it_works.svg").read_text()
    shown = set(re.findall(r">([\w]+\.py)<", picture))
    assert shown == {Path(name).name for name, _ in ROWS}


def test_every_other_file_that_the_page_names_exists() -> None:
    for name in re.findall(r"`((?:engine|memory|slots|graphs)/[\w/.]+)`", PAGE):
        assert (ROOT / "chunkgraph" / name).exists(), name


def test_the_top_of_the_engine_imports_nothing_optional() -> None:
    for path in sorted((ROOT / "chunkgraph" / "engine").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported = node.module or ""
                assert not re.match(
                    r"chunkgraph\.(engine\.(split|verify)|megatron|pipelining|packing)", imported
                ), f"{path.name} imports {imported}"
