"""Which rooms reach into Megatron and Transformer Engine, statically or by name.

All access is by name, so that import-linter sees none of it. `pytest -s -k table` prints every
private name and every patch with its file, which is what to read when Megatron is upgraded.
"""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from chunkgraph.megatron.core.access import import_megatron, versions

PACKAGE = Path(__file__).parents[1] / "chunkgraph"
OUTSIDE = {"megatron", "transformer_engine"}
_DISTRIBUTIONS = {"megatron": "megatron_core", "transformer_engine": "transformer_engine"}
PUBLIC_ROOMS = {"launch", "megatron", "trainer"}
"""Rooms that import modules of Megatron or Transformer Engine."""
PRIVATE_ROOMS = {
    "launch/patches.py",
    "megatron/core",
    "megatron/cpu",
    "megatron/features",
    "trainer/batches.py",
}
"""Rooms and files that use private names or replace attributes."""


@dataclass(frozen=True, order=True)
class Access:
    """One place that reaches into another package.

    Attributes:
        kind: "import" (a statement), "module" (by name), "private" or "patch".
        name: of the module, the private name, or the attribute that is replaced.
        file: below `chunkgraph/`.
        module: of a private name.
    """

    kind: str
    name: str
    file: str
    module: str = ""


def accesses(source: str, file: str) -> Iterator[Access]:
    """Find what one file reaches."""
    tree = ast.parse(source)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        else:
            modules = []
        yield from (Access("import", name, file) for name in modules if _is_outside(name))
        if isinstance(node, ast.Call):
            yield from _of_call(node, constants, file)


def _of_call(call: ast.Call, constants: dict[str, object], file: str) -> Iterator[Access]:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    arguments = [_text(argument, constants) for argument in _spread(call.args)]
    if function in ("import_module", "__import__"):
        if arguments and _is_outside(arguments[0]):
            yield Access("module", arguments[0], file)
    elif function == "import_megatron":
        yield Access("module", arguments[0] if arguments else "megatron.core", file)
    elif function == "private_names":
        module = arguments[0]
        yield from (Access("private", n, file, module) for n in arguments[1:] or arguments)
    elif function == "patch_attributes":
        replaced = call.args[1]
        keys = replaced.keys if isinstance(replaced, ast.Dict) else [replaced]
        for key in keys:
            name = "**" if key is None else _text(key, constants)
            yield Access("patch", f"{ast.unparse(call.args[0])}.{name}", file)


def _spread(arguments: list[ast.expr]) -> Iterator[ast.expr]:
    """Yield the arguments; those of a starred literal one by one."""
    for argument in arguments:
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple):
            yield from argument.value.elts
        else:
            yield argument


def _text(node: ast.expr, constants: dict[str, object]) -> str:
    """Return a string argument's value, or an argument's source."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        return str(constants.get(node.id, node.id))
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants)
    return ast.unparse(node)


def _is_outside(module: str) -> bool:
    return module.partition(".")[0] in OUTSIDE


@pytest.fixture(scope="module")
def package_accesses() -> list[Access]:
    """All accesses of the package."""
    return sorted(
        access
        for path in PACKAGE.rglob("*.py")
        for access in accesses(
            path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()
        )
    )


def _rooms(package: list[Access], kinds: set[str], rooms: set[str]) -> set[str]:
    """Return the rooms of these accesses; a file outside of ``rooms`` stands for itself."""
    return {
        next((r for r in rooms if a.file == r or a.file.startswith(f"{r}/")), a.file)
        for a in package
        if a.kind in kinds
    }


def test_nothing_imports_megatron_by_a_statement(package_accesses: list[Access]) -> None:
    """Imports by name come after the preparation that a machine without a GPU needs."""
    assert [access for access in package_accesses if access.kind == "import"] == []


def test_modules_of_megatron_are_imported_in_listed_rooms(package_accesses: list[Access]) -> None:
    assert _rooms(package_accesses, {"module"}, PUBLIC_ROOMS) == PUBLIC_ROOMS


def test_private_names_and_patches_are_in_listed_rooms(package_accesses: list[Access]) -> None:
    assert _rooms(package_accesses, {"private", "patch"}, PRIVATE_ROOMS) == PRIVATE_ROOMS


def test_private_names_are_in_the_table_with_the_releases_that_have_them(
    package_accesses: list[Access],
) -> None:
    """The table, `private_names.csv`, has a release only where the name was seen."""
    with (Path(__file__).parent / "private_names.csv").open(encoding="utf-8") as file:
        table = {(r["module"], r["name"]): r["releases"].split() for r in csv.DictReader(file)}
    # The others have no constant name.
    used = {(a.module, a.name) for a in package_accesses if a.kind == "private"}
    assert {(m, n) for m, n in used if m.partition(".")[0] in OUTSIDE} == set(table)
    for package in OUTSIDE:
        version = versions().get(_DISTRIBUTIONS[package])
        if version is None:
            continue
        release = ".".join(version.split(".")[:2])
        for (module, name), releases in table.items():
            if module.startswith(package):
                assert (release in releases) == _has(module, name), (module, name, release)


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(import_megatron(module), name)
    except ImportError:
        return False


def test_the_table_of_accesses(package_accesses: list[Access]) -> None:
    table = [access for access in package_accesses if access.kind in ("private", "patch")]
    for access in table:
        print(f"{access.kind:8} {access.name:60} {access.file}")
    assert {
        Access("private", "CheckpointFunction", "megatron/core/recompute.py"),
        Access("private", "P2PCommunicator", "megatron/core/p2p.py"),
        Access("private", "TopKRouter", "megatron/features/experts/padding.py"),
        Access("patch", "datasets.compile_helpers", "launch/patches.py"),
        Access("patch", "module.roll_tensor", "megatron/features/prediction/feature.py"),
    } <= {replace(access, module="") for access in table}


@pytest.mark.parametrize(
    ("line", "kind", "name"),
    [
        ("import megatron.core as core", "import", "megatron.core"),
        ("from transformer_engine.pytorch import Linear", "import", "transformer_engine.pytorch"),
        ("import_module('megatron.core')", "module", "megatron.core"),
        ("importlib.import_module(_MODULE)", "module", "megatron.training"),
        ("access.import_megatron()", "module", "megatron.core"),
        ("x, y = private_names(_MODULE, 'y')", "private", "y"),
        ("private_names(*names)", "private", "*names"),
        ("private_names(*(_MODULE, 'y'))", "private", "y"),
        ("undo = patch_attributes(module, {'x': 1})", "patch", "module.x"),
        ("patch_attributes(module, replacements)", "patch", "module.replacements"),
    ],
)
def test_every_way_in_is_seen(line: str, kind: str, name: str) -> None:
    source = f"_MODULE = 'megatron.training'\n\n\ndef f():\n    {line}\n"
    found = [replace(a, module="") for a in accesses(source, "engine/slot.py")]
    assert found == [Access(kind, name, "engine/slot.py")]
    others = "import chunkgraph.megatron\nimportlib.import_module('torch')\n"
    assert list(accesses(others, "engine/slot.py")) == []


def test_an_access_elsewhere_is_refused(package_accesses: list[Access]) -> None:
    stray = Access("private", "TopKRouter", "engine/slot.py")
    assert _rooms([*package_accesses, stray], {"private"}, PRIVATE_ROOMS) - PRIVATE_ROOMS == {
        stray.file
    }
