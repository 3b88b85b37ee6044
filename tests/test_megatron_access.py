"""Where the package reaches into Megatron and Transformer Engine, and every private name it uses.

`private_names.csv` lists the private names of Megatron, Transformer Engine and torch, with the
releases in which they were seen; read it when one of them is upgraded. A name is private if it
begins with an underscore or lies in a module that does. Names without one that Megatron's modules
define count as public. Attributes without an underscore of objects that were reached through a
private name, such as the parameters of an FSDP state, have no row of their own.
"""

from __future__ import annotations

import ast
import csv
import importlib.util
import inspect
import itertools
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chunkgraph.megatron.core.access import versions

PACKAGE = Path(__file__).parents[1] / "chunkgraph"
OUTSIDE = {"megatron", "transformer_engine"}
MODULE_ROOMS = {"integrations", "launch", "megatron", "trainer"}
"""Rooms that import modules of Megatron or Transformer Engine."""
_MODULES_OF_TORCH = {"_C", "_autograd", "_dynamo", "guards", "_ops"}
# Of the standard library, of peft and Megatron-Bridge (whose effect tests show), parts of texts.
_OTHERS = {
    *("_SubParsersAction", "_option_string_actions", "_exit", "_getframe", "_replace", "_fields"),
    *("_", "_ARGCOMPLETE", "_Value", "_hash", "_padded", "_v2", "_generator", "_global"),
    *("_raw", "_saved_", "_saved_tensors", "_disable_adapters", "_active_adapter"),
    *("_adapter_enabled", "_merged", "_hooks", "_memory", "_attention"),
}
_BY_PREFIX = {"_raw_saved_": "_raw_saved_tensors"}
"""Private names that differ between classes, and the one of them in the table."""


def _trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }


def _modules(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield the outside modules that a file imports, and whether a statement does."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "import_megatron")
        ):
            argument = node.args[0] if node.args else ast.Constant("megatron.core")
            names = [str(argument.value)] if isinstance(argument, ast.Constant) else []
        is_statement = isinstance(node, ast.Import | ast.ImportFrom)
        yield from ((name, is_statement) for name in names if name.partition(".")[0] in OUTSIDE)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_names(trees: dict[str, ast.Module]) -> set[str]:
    """Return the names that the package defines."""
    names = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return names


def _private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield the private names that a file imports, reads as attributes, or has as texts."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = (node.module or "").split(".")
            if module[0] not in ("chunkgraph", "__future__"):
                names = [alias.name for alias in node.names]
                yield from (n for n in names if any(map(_is_private, [*module, n])))
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            first, path = node, [node.attr]
            while isinstance(first.value, ast.Attribute):
                first = first.value
                inner.add(id(first))
                path.insert(0, first.attr)
            if isinstance(first.value, ast.Name) and first.value.id == "torch":
                modules = list(itertools.takewhile(_MODULES_OF_TORCH.__contains__, path[:-1]))
                path = path[len(modules) :]
                if any(map(_is_private, modules)):
                    yield path[0]
            yield from (name for name in path if _is_private(name) and name not in own)
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            yield from filter(_is_private, [str(node.value)])


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Return the parsed files of the package."""
    return _trees()


def test_modules_of_megatron_are_imported_by_name_in_listed_rooms(
    trees: dict[str, ast.Module],
) -> None:
    """Imports by name come after the preparation that a machine without a GPU needs."""
    found = [(file, *module) for file, tree in trees.items() for module in _modules(tree)]
    assert [file for file, _, is_statement in found if is_statement] == []
    assert {file.partition("/")[0] for file, _, _ in found} == MODULE_ROOMS


def _table() -> list[dict[str, str]]:
    with (Path(__file__).parent / "private_names.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_private_name_is_in_the_table(trees: dict[str, ast.Module]) -> None:
    own = _own_names(trees)
    found = {name for tree in trees.values() for name in _private_names(tree, own)}
    names = [row["name"] for row in _table()]
    found = {_BY_PREFIX.get(n, n) for n in found if not n.startswith("_chunkgraph")} - _OTHERS
    assert found == set(names)
    assert len(names) == len(found) <= 110


@pytest.mark.megatron
@pytest.mark.every_release
@pytest.mark.parametrize("package", ["megatron-core", "transformer-engine", "torch"])
def test_private_names_are_in_the_releases_of_the_table(package: str) -> None:
    version = versions().get(package.replace("-", "_"))
    if version is None:
        pytest.skip(f"{package} is not installed")
    release = ".".join(version.split(".")[:2])
    rows = [row for row in _table() if row["package"] == package]
    if not torch.backends.cuda.is_built():
        rows = [row for row in rows if not row["name"].startswith("_cuda_")]
    assert {(r["owner"], r["name"]) for r in rows if release in r["releases"].split()} == {
        (r["owner"], r["name"]) for r in rows if _has(r["owner"], r["name"])
    }


def _has(owner: str, name: str) -> bool:
    """Return whether a module or class has a name, or its source does, for instances."""
    try:
        if owner.partition(".")[0] in OUTSIDE:  # some modules of Megatron import only with kernels
            spec = importlib.util.find_spec(owner)
            source = "" if spec is None else Path(str(spec.origin)).read_text(encoding="utf-8")
        else:
            found = pkgutil.resolve_name(owner)
            if hasattr(found, name):
                return True
            source = inspect.getsource(found)
    except (ImportError, AttributeError, OSError, TypeError):
        return False
    return re.search(rf"\b{name}\b", source) is not None
