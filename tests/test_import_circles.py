"""No module of the package imports itself through others, inside functions included.

An import that only type checkers see (``if TYPE_CHECKING``) makes no circle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def modules() -> dict[str, Path]:
    """Map the name of each module of the package to its file."""
    folder = ROOT / "chunkgraph"
    return {
        ".".join([folder.name, *path.relative_to(folder).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): path
        for path in folder.rglob("*.py")
    }


def imported_names(source: str, package: str) -> Iterator[str]:
    """Yield the absolute name of everything that a module of ``package`` imports."""
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level]
            parts = [*(parents if node.level else []), *([node.module] if node.module else [])]
            yield from (".".join([*parts, alias.name]) for alias in node.names)
        else:
            nodes += ast.iter_child_nodes(node)


def import_graph(sources: Mapping[str, str], packages: set[str]) -> dict[str, set[str]]:
    """Map each module to the modules that it imports."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        package = module if module in packages else module.rpartition(".")[0]
        graph[module] = set()
        for name in imported_names(source, package):
            # `from module import name`: the name is a module, or one of its attributes.
            target = name if name in sources else name.rpartition(".")[0]
            if target in sources and target != module:
                graph[module].add(target)
    return graph


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of a circle, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_through_others() -> None:
    paths = modules()
    sources = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    packages = {name for name, path in paths.items() if path.name == "__init__.py"}
    graph = import_graph(sources, packages)
    assert "chunkgraph.errors" in graph["chunkgraph.jobs.processes"]
    assert "chunkgraph.schedules.schedule" in graph["chunkgraph.schedules"]
    assert circle(graph) == []


@pytest.mark.parametrize(
    ("back", "length"),
    [
        ("import p.a", 3),
        ("def f():\n    from p import a", 3),
        ("from .a import name", 3),
        ("from __future__ import annotations", 0),
        ("if TYPE_CHECKING:\n    from p.a import name", 0),
    ],
)
def test_a_circle_is_found(back: str, length: int) -> None:
    sources = {"p": "", "p.a": "from p.b import name", "p.b": back}
    assert len(circle(import_graph(sources, {"p"}))) == length
