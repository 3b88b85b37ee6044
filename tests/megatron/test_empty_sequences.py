"""The measurement of empty sequences runs; on a CPU without graphs, so that times mean nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# Once, not for each Megatron: it measures with one release.
@pytest.mark.timeout(100)
def test_the_same_documents_among_more_sequences(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = {
        "--device": "cpu",
        "--layer-spec": "user_specs:packed",
        "--json": str(path),
        "--tokens": "64",
        "--hidden-size": "32",
        "--heads": "2",
        "--rounds": "2",
    }
    result = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "empty_sequences.py"),
            *(part for item in arguments.items() for part in item),
        ],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text())
    assert sum(found["lengths"]) == 64
    assert len(found["lengths"]) == 8
    assert [one["num_seqs"] for one in found["measured"]] == [8, 64, 512]
    assert found["measured"][0]["ratio"] == 1
    assert all(one["ms"] > 0 and len(one["ms_all"]) == 2 for one in found["measured"])
    assert result.stdout.count(" ms, ") == 3
    assert all(one["error"] is None for one in found["measured"])


def test_documents_are_cut_to_their_limit() -> None:
    path = ROOT / "benchmarks" / "empty_sequences.py"
    spec = importlib.util.spec_from_file_location("empty_sequences", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module._lengths(128, None) == [2, 4, 6, 10, 14, 20, 32, 40]
    assert module._lengths(128, 16) == [2, 4, 6, 10, 14, 16, 4, 16, 16, 16, 16, 8]
