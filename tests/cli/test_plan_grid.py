"""The picture of a step on a terminal."""

from __future__ import annotations

import io

import pytest
from drawn_schedules import CASES
from rich.console import Console

from chunkgraph.cli import plan_export
from chunkgraph.cli.plan_export import Grid
from chunkgraph.schedules import CostModel, build_schedule


@pytest.fixture(params=CASES, ids=lambda built: built.name)
def built(request):
    return request.param


def printed(grid, width=80):
    """Return the printed lines."""
    stream = io.StringIO()
    grid.print(Console(file=stream, width=width, highlight=False))
    return stream.getvalue().splitlines()


def words_of_ranks(lines, num_ranks, width=0):
    """Return the words of each rank's rows, one row after the other."""
    joined = dict.fromkeys(range(num_ranks), "")
    for line in lines:
        label, is_row, body = line.partition(" |")
        if is_row:
            joined[int(label.split()[1])] += body + " " * (width - len(line))
    return [body.replace("-", " ").split() for body in joined.values()]


def test_a_small_schedule():
    built = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    assert printed(Grid.of(built)) == [
        "time 0 to 9",
        "rank 0 |F0/0 F1/1           B0/0-----      B1/1-----",
        "rank 1 |     F0/0 B0/0----- F1/0 B1/0-----",
        "",
        "F3/0: microbatch 3, slot 0. F: forward, B: backward",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_the_width_and_keeps_every_action(built, width, monkeypatch):
    monkeypatch.setattr(plan_export, "_MAX_PANELS", 100)
    text = printed(Grid.of(built), width)
    assert max(map(len, text)) <= width
    words = words_of_ranks(text, built.num_ranks, width)
    for of_rank, actions in zip(words, built.actions, strict=True):
        shown = [word for word in of_rank if word[0] in "FBIW"]
        assert len(shown) == len(actions)


def test_measured_costs_keep_every_label(built):
    """The lengths of these actions are no multiples of each other."""
    costs = CostModel(forward_ms=1.61, backward_ms=4.59, input_grad_ms=2.37, weight_grad_ms=1.43)
    text = printed(Grid.of(built, costs), width=100_000)
    for words, actions in zip(words_of_ranks(text, built.num_ranks), built.actions, strict=True):
        labels = [f"{a.op.value}{a.microbatch}" for a in actions]
        assert [word.partition("/")[0].partition(".")[0] for word in words] == labels


def test_a_long_step_ends_with_a_hint():
    built = build_schedule("1f1b", num_ranks=2, num_microbatches=200)
    assert "more panels: --svg FILE draws them" in printed(Grid.of(built))[-2]
