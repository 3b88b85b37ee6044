"""README and docs: links lead somewhere, commands parse, files and flags exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from chunkgraph.cli.__main__ import _parse
from chunkgraph.launch.flags import FLAGS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "schedules/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
_MEGATRONS_FLAGS = {"--cuda-graph-impl", "--cuda-graph-warmup-steps", "--cuda-graph-modules"}
_MAX_WORDS = 13_500


def _ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def _links(page: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", text)


def _commands(page: Path) -> Iterator[list[str]]:
    """Yield the `chunkgraph` commands of a page's code blocks, by words."""
    for block in re.findall(r"```(?:bash|text)\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                del words[0]
            if words[:1] == ["chunkgraph"]:
                yield [word for word in words[1:] if word != "..."]


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_commands_parse(page: Path) -> None:
    flags = {item.flag for item in FLAGS} | _MEGATRONS_FLAGS
    for words in _commands(page):
        if words[0] == "launch":
            unknown = {w for w in words if w.startswith("--cuda-graph")} - flags
            assert not unknown, words
            if any(word.endswith(".py") for word in words):
                _parse(words)
        elif not any(re.search(r"<|CONFIG|FILE", word) for word in words):
            _parse(words)
        for word in words:
            if word.startswith(("configs/", "scripts/", "benchmarks/")):
                assert (ROOT / word).exists(), word


def test_pages_are_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f" {page.name}\n" in nav, page.name


def test_pages_stay_short() -> None:
    words = sum(len(page.read_text().split()) for page in PAGES if page.name != "CONTRIBUTING.md")
    assert words <= _MAX_WORDS


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "settings.md"], ids=_ids)
def test_pages_serve_the_reader(page: Path) -> None:
    """Pages name no commits or hosts and use none of the words that a reader stumbles over."""
    text = page.read_text()
    assert not re.search(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b", text)
    assert not re.search(r"\b(anew|besides?|whatever is|in the place of|by hand)\b", text)
