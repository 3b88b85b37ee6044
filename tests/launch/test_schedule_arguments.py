"""``--pipeline-schedule`` among Megatron's arguments, without its training program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from launch_arguments import arguments

from chunkgraph.errors import ConfigError
from chunkgraph.launch import hooks
from chunkgraph.launch.arguments import settle_arguments
from chunkgraph.schedules import build_schedule


class _AttachedError(Exception):
    """Ends a test at the point where graphs would be attached."""


@pytest.fixture
def in_folder_of_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write ``mine.csv``, a schedule with split backwards, to the current folder."""
    monkeypatch.chdir(tmp_path)
    schedule = build_schedule("zb-h1", num_ranks=2, num_microbatches=4)
    Path("mine.csv").write_text(schedule.to_csv())


@pytest.mark.usefixtures("in_folder_of_schedule")
@pytest.mark.parametrize("name", ["auto", "zb-h1", "mine.csv"])
def test_the_schedule_reaches_attach(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = None if name == "auto" else name
    args = arguments(pipeline_schedule=schedule, pipeline_model_parallel_size=2)
    attached: dict[str, Any] = {}

    def attach(model: Any, **options: Any) -> None:
        attached.update(options)
        raise _AttachedError

    monkeypatch.setattr(hooks, "pretrain_arguments", lambda: args)
    monkeypatch.setattr(hooks, "attach", attach)
    graphs = hooks.ChunkGraphsInPretrain(on_cpu=True)
    graphs.parsed(args)
    assert graphs.flags is not None
    assert graphs.flags.schedule == name
    with pytest.raises(_AttachedError), graphs.training([]):
        pass
    assert attached["schedule"] == name


@pytest.mark.usefixtures("in_folder_of_schedule")
@pytest.mark.parametrize("name", ["zb-h1", "mine.csv"])
def test_weight_gradients_are_delayed_by_schedules_that_split_backwards(name: str) -> None:
    args = arguments(
        pipeline_schedule=name, delay_wgrad_compute=True, pipeline_model_parallel_size=2
    )
    flags = settle_arguments(args, on_cpu=True)
    assert flags is not None
    with pytest.raises(ConfigError, match="--delay-wgrad-compute: weight gradients would"):
        settle_arguments(arguments(pipeline_schedule="1f1b", delay_wgrad_compute=True), on_cpu=True)


def test_delayed_weight_gradients_without_graphs_and_schedule_are_left_to_megatron() -> None:
    args = arguments(
        cuda_graph_granularity="layer", cuda_graph_impl="none", delay_wgrad_compute=True
    )
    assert settle_arguments(args, on_cpu=True) is None
    assert args.delay_wgrad_compute


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_schedule": "none.csv"}, "none.csv: cannot read the schedule"),
        ({"pipeline_schedule": "zb-h2"}, "--pipeline-schedule zb-h2: there is no such schedule"),
        ({"pipeline_schedule": "zb-v"}, "--pipeline-schedule zb-v: it places stages in a V"),
        (
            {"pipeline_schedule": "zb-h1", "use_ring_exchange_p2p": True},
            "--use-ring-exchange-p2p with --pipeline-schedule zb-h1: only Megatron's own",
        ),
    ],
)
def test_schedules_that_cannot_run_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        settle_arguments(arguments(**changes), on_cpu=True)
