"""The findings of ``chunkgraph doctor`` on this machine, and its advice on missing parts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkgraph.cli import doctor
from chunkgraph.cli.__main__ import main
from chunkgraph.engine.bits import Digests
from chunkgraph.megatron.features.experts import hybrid_ep


def findings_of(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, dict[str, Any]]:
    assert main(["doctor", "--json", "-"]) == code
    return {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_this_machine_can_capture(capsys: pytest.CaptureFixture[str]) -> None:
    findings = findings_of(capsys, 0)
    assert findings["capture"]["state"] == "ok"
    assert findings["torch"]["found"].startswith(str(torch.__version__))
    assert findings["GPUs"]["state"] == ("ok" if torch.cuda.is_available() else "absent")


@pytest.mark.parametrize(("version", "state"), [("0.15.3", "wrong"), ("0.19.2", "ok")])
def test_a_megatron_out_of_range_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, version: str, state: str
) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda d: version if d == "megatron-core" else real(d))
    findings = findings_of(capsys, int(state == "wrong"))
    assert (findings["megatron-core"]["state"], findings["megatron-core"]["found"]) == (
        state,
        version,
    )


def test_a_checkout_of_megatron_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A checkout is on the path without being an installed distribution."""
    info = tmp_path / "core" / "package_info.py"
    info.parent.mkdir()
    info.write_text('VERSION = (0, 14, 3)\n__shortversion__ = ".".join(map(str, VERSION))\n')
    real, find = doctor._version, importlib.util.find_spec
    monkeypatch.setattr(doctor, "_version", lambda d: None if d == "megatron-core" else real(d))
    spec = ModuleSpec("megatron", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == "megatron" else find(name)
    )
    finding = findings_of(capsys, 1)["megatron-core"]
    assert (finding["state"], finding["found"]) == ("wrong", "0.14.3")
    info.write_text("")
    assert findings_of(capsys, 0)["megatron-core"]["found"] == "not installed"


def test_a_replay_that_differs_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    equal = Digests.equal
    monkeypatch.setattr(Digests, "equal", lambda *digests: ~equal(*digests))
    found = findings_of(capsys, 1)["capture"]["found"]
    assert "differs from an eager pass" in found


def test_what_is_not_installed_is_absent_with_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda n: real(n) if n == "torch" else missing(n)
    )
    monkeypatch.setattr(doctor, "_checkout_version", lambda: None)  # nor is there a checkout
    findings = findings_of(capsys, 0)
    for name in ("megatron-core", "Transformer Engine"):
        assert findings[name]["state"] == "absent"
        assert findings[name]["advice"]


def test_what_hybrid_ep_needs_has_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid_ep, "deep_ep_version", lambda: "1.1.0")
    finding = findings_of(capsys, 0)["HybridEP"]
    assert finding["state"] == "absent"
    assert "branch hybrid-ep" in finding["advice"]


def test_the_verdict_goes_by_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = findings_of(capsys, 0)
    assert uses["plan"]["is_ready"]
    assert uses["train on a CPU"]["is_ready"]
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    monkeypatch.setattr(doctor, "_checkout_version", lambda: None)
    uses = findings_of(capsys, 1)
    assert uses["plan"]["is_ready"]
    assert not uses["train on a CPU"]["is_ready"]
    assert uses["train on a CPU"]["reason"].startswith("needs torch, capture, megatron-core")
