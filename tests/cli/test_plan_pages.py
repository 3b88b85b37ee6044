"""``chunkgraph plan`` with fewer slots than microbatches in flight."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chunkgraph.cli.__main__ import main

CONFIG = str(Path(__file__).parents[2] / "configs" / "cpu" / "gpt_pp2_vpp2_cpu.yaml")
BASE = ["plan", "--pp", "8", "--num-microbatches", "16"]


def ratio_of(printed: str) -> float:
    found = re.search(r"Simulated step: (\d\.\d+) of that with all slots", printed)
    assert found is not None, printed
    return float(found[1])


def test_fewer_slots_take_longer_and_move_more(capsys: pytest.CaptureFixture[str]) -> None:
    ratios, pages = [], []
    for count in ("8", "6", "4", "2"):
        assert main([*BASE, "--slots", count]) == 0
        printed = capsys.readouterr().out
        ratios.append(ratio_of(printed))
        rows = re.findall(r"^ +0 +(\d) +(\d+) *$", printed, re.MULTILINE)
        assert [row[0] for row in rows] == [count]
        pages.append(int(rows[0][1]))
    assert ratios[0] == 1.0
    assert pages[0] == 0
    assert ratios == sorted(ratios)
    assert pages == sorted(pages)
    assert ratios[1] < 1.2 < ratios[3]


def test_a_fast_link_costs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--slots", "3", "--page-time", "0", "0"]) == 0
    assert ratio_of(capsys.readouterr().out) == 1.0


def test_a_limit_of_memory_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", CONFIG, "--max-slot-memory", "7MiB"]) == 0
    printed = capsys.readouterr().out
    assert ratio_of(printed) > 1.0
    assert main(["plan", CONFIG, "--slots", "2"]) == 0
    printed = capsys.readouterr().out
    columns = re.findall(r"^ +\d +\d \d +\d+ .* ([\d.]+) MiB *$", printed, re.MULTILINE)
    total = re.search(r"Pinned memory of all ranks: ([\d.]+) MiB", printed)
    assert len(columns) == 2
    assert total is not None
    assert sum(map(float, columns)) == pytest.approx(float(total[1]), abs=0.11)
    for arguments, part in (
        ([*BASE, "--max-slot-memory", "1GiB"], "needs a CONFIG"),
        (["plan", CONFIG, "--max-slot-memory", "1MiB"], "not one slot of each chunk"),
        ([*BASE, "--slots", "1"], "need at least [2]"),
        ([*BASE, "--slots", "0"], "not one slot of each chunk; raise --slots"),
        ([*BASE, "--slots", "3", "--json"], "--slots has no effect with --json"),
        ([*BASE, "--page-time", "1", "1"], "--page-time has no effect without --slots"),
        ([*BASE, "--slots", "3", "--page-time", "-1", "1"], "page_out_ms is -1.0, but"),
        ([*BASE, "--slots", "3", "--page-time", "1", "inf"], "page_in_ms is inf, but"),
        ([*BASE, "--slots", "3", "--compare"], "--slots has no effect"),
    ):
        assert main(arguments) == 2
        assert part in capsys.readouterr().err


def test_a_comparison_says_how_few_slots_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    def recommended(*arguments: str) -> tuple[int, float] | None:
        assert main([*BASE, "--compare", *arguments]) == 0
        out = capsys.readouterr().out
        found = re.search(r"(\d+) slots of a chunk take (\d\.\d+) of its step", out)
        return found and (int(found[1]), float(found[2]))

    slow, fast = recommended("--page-time", "6", "6"), recommended("--page-time", "0", "0")
    assert slow is not None
    assert fast is not None
    assert fast[0] < slow[0] < 16
    assert 1.0 == fast[1] <= slow[1] <= 1.05
    assert recommended("--page-time", "999", "999") is None
    # The recommended schedule is simulated as it is with that number of slots.
    slots = ["--vpp", "2", "--schedule", "zb-v", "--slots", str(slow[0]), "--page-time", "6", "6"]
    assert main([*BASE, *slots]) == 0
    assert ratio_of(capsys.readouterr().out) == slow[1]
