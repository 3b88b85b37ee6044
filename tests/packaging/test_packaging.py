from __future__ import annotations

import itertools
import re
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import finished, python

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed() -> None:
    packages = {"chunkgraph"}
    for init in sorted((ROOT / "chunkgraph").rglob("__init__.py")):
        packages.add(".".join(init.parent.relative_to(ROOT).parts))
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == packages


def test_version_is_stated_once() -> None:
    import chunkgraph

    assert chunkgraph.__version__ == PYPROJECT["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == chunkgraph.__version__
    heading = f"## [{chunkgraph.__version__}] - {citation['date-released']}"
    assert heading in (ROOT / "CHANGELOG.md").read_text().splitlines()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the sources, because building creates build/ and *.egg-info."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("chunkgraph", "pyproject.toml", "LICENSE"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "README.md").write_text("chunkgraph")
    return folder


def build(source: Path, folder: Path, hook: str) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.{hook}({str(folder)!r}))"
    result = finished([sys.executable, "-c", code], timeout_s=120, cwd=source)
    assert result.returncode == 0, result.stderr
    return folder / result.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("wheel"), "build_wheel")


def test_type_checkers_find_an_editable_install(source: Path, tmp_path: Path) -> None:
    """They read paths in site-packages, but run no import hooks."""
    with zipfile.ZipFile(build(source, tmp_path, "build_editable")) as editable:
        names = [name for name in editable.namelist() if ".dist-info/" not in name]
        assert [Path(name).suffix for name in names] == [".pth"]
        assert editable.read(names[0]).decode().strip() == str(source)


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names} == {
        "chunkgraph",
        f"chunkgraph-{PYPROJECT['project']['version']}.dist-info",
    }
    assert wheel.name.endswith("-py3-none-any.whl")
    for needed in (
        "chunkgraph/py.typed",
        "chunkgraph/schedules/__init__.py",
        "chunkgraph/schedules/one_chunk.py",
        "chunkgraph/data/persuasion.txt",
        "chunkgraph/data/SOURCES.md",
        "chunkgraph/cli/__main__.py",
        "chunkgraph/cli/plan_page.html",
    ):
        assert needed in names
    modules = {
        path.relative_to(ROOT).as_posix()
        for room in (ROOT / "chunkgraph").iterdir()
        for path in room.glob("*.py")
    }
    assert modules <= names


def test_the_wheel_works_next_to_a_users_own_schedules(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(installed)
    (tmp_path / "schedules.py").write_text("mine = True\n")
    code = (
        "import chunkgraph.schedules as s, chunkgraph, schedules; "
        "from chunkgraph.data import PackedText, read_documents; "
        "PackedText(read_documents(None), seq_length=8, seed=0); "
        "assert schedules.mine; print(chunkgraph.__file__); s.build_schedule"
    )
    result = python("-c", code, cwd=tmp_path, PYTHONPATH=str(installed))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(installed))


LIGHT = (
    "chunkgraph",
    "chunkgraph.errors",
    "chunkgraph._text",
    "chunkgraph.schedules",
    "chunkgraph.slots",
    "chunkgraph.settings",
    "chunkgraph.data",
    "chunkgraph.packing",
    "chunkgraph.cli.packing",
    "chunkgraph.cli.plan",
    "chunkgraph.cli.train",
    "chunkgraph.jobs.launcher",
    "chunkgraph.cli.__main__",
)


def test_light_modules_import_no_torch(tmp_path: Path) -> None:
    code = f"import sys, {', '.join(LIGHT)}; "
    code += "sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    result = python("-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_workflow_runs_targets_that_exist() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    steps = workflow["jobs"]["test"]["steps"]
    targets = [step["run"].split()[1:] for step in steps if "run" in step]
    assert ["test"] in targets
    makefile = (ROOT / "Makefile").read_text()
    for (target,) in targets:
        assert f"\n{target}: " in makefile


def test_the_image_copies_what_a_wheel_needs() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied = {
        word for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for word in line.split()
    }
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "chunkgraph"}
    assert all((ROOT / name).exists() for name in copied)
    extras = set(re.findall(r"/opt/chunkgraph\[(\w+)\]", text))
    assert extras <= set(PYPROJECT["project"]["optional-dependencies"])


# `make test` and `make test-slow` run every test, in one environment or in both.


def test_the_runs_leave_out_what_the_fixtures_take_for_left_out(
    pytestconfig: pytest.Config,
) -> None:
    """The suite's conftest recognises the run with the oldest release by its expression."""
    runs = re.findall(r"\$\(PYTEST\) -m \"(.+)\"", (ROOT / "Makefile").read_text(encoding="utf-8"))
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    newest = [run for run in runs if run != conftest._OLDEST]
    assert len(runs) == len(newest) + 1
    assert conftest._SHORT in newest
    for megatron, every_release, slow in itertools.product((False, True), repeat=3):
        marks = {"megatron": megatron or every_release, "every_release": every_release}
        marks["slow"] = slow
        is_twice = every_release and not slow  # then with all cases
        assert sum(eval(run, {}, marks) for run in newest) == 1 + is_twice
        is_repeated = every_release or not (megatron or slow)
        assert eval(conftest._OLDEST, {}, marks) == is_repeated
