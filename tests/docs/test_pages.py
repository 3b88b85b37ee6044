"""README and docs: links lead somewhere, commands parse, files and flags exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chunkgraph.cli.__main__ import _parse, main
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


def _lines(page: Path) -> Iterator[list[str]]:
    """Yield the commands of a page's code blocks, by words; of output, the lines after `$`."""
    text = page.read_text()
    text = re.sub(r"^\w+=\(.*?\)", "", text, flags=re.DOTALL | re.MULTILINE)  # arrays
    for kind, block in re.findall(r"```(bash|text)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if kind == "text" and not line.startswith("$ "):
                continue
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                del words[0]
            if words:
                yield [word for word in words if word != "..."]


def _commands(page: Path) -> Iterator[list[str]]:
    yield from (words[1:] for words in _lines(page) if words[0] == "chunkgraph")


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


def _check_pip(words: list[str]) -> None:
    assert words[0] in ("install", "wheel"), words
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    used = {
        name for names in re.findall(r"\[(.*?)\]", " ".join(words)) for name in names.split(",")
    }
    assert used <= set(extras), words
    assert any(word == "." or word.startswith(".[") for word in words), words


def _check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{word}: " in makefile for word in words if "=" not in word), words


def _check_files(words: list[str]) -> None:
    """Check what the repository has of a command line; a user's script and modules are others."""
    for word in words:
        if word.startswith(("configs/", "scripts/", "benchmarks/", "examples/", "schedules/")):
            assert (ROOT / word).exists(), word
    if "-m" in words:
        assert importlib.util.find_spec(words[words.index("-m") + 1]) is not None, words
    for word in words:
        if word.startswith("benchmarks/"):
            flags = {word for word in words if word.startswith("--") and "nproc" not in word}
            assert all(f'"{flag}"' in (ROOT / word).read_text() for flag in flags), words


_PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "pip": _check_pip,
    "make": _check_make,
    **dict.fromkeys(("python", "torchrun", "sbatch", "scripts/launch_local.sh"), _check_files),
    "nsys": _check_files,
    "docker": lambda words: _check_files(["Dockerfile", *words]),
    "export": lambda _: None,
}


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_commands_of_other_programs_name_what_exists(page: Path) -> None:
    for words in _lines(page):
        if words[0] != "chunkgraph":
            assert words[0] in _PROGRAMS, words
            _check_files(words[:1])
            _PROGRAMS[words[0]](words[1:])


def test_a_printed_comparison_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "zero_bubble.md").read_text()
    command, shown = re.findall(r"```text\n\$ chunkgraph (plan .*)\n\n((?:.*\n)*?)```", page)[0]
    assert main(command.split()) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    lines = [line.rstrip() for line in shown.splitlines()]
    assert len(lines) == 9
    assert [line for line in printed if line in lines] == lines


def _texts_of_the_package() -> Iterator[str]:
    """Yield all strings of the sources; what an f-string computes is a zero byte."""
    for path in (ROOT / "chunkgraph").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                yield "".join(str(part) for part in parts)


def test_messages_to_search_for_are_those_of_the_package() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    texts = " ".join("\n".join(_texts_of_the_package()).split())
    others = {"Couldn't swap", ".grad", "destroy_process_group()"}  # torch's
    headings = re.findall(r"^\*\*(.+?)\*\*", page, re.MULTILINE | re.DOTALL)
    messages = [message for heading in headings for message in re.findall(r"`([^`]+)`", heading)]
    parts = {
        part.strip() for message in messages for part in " ".join(message.split()).split("...")
    }
    assert len(messages) > 15
    assert {part for part in parts - others if part not in texts} == set()


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
