"""Steps that a schedule of chunkgraph cannot run, and the state after a failed step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.pipeline.driver import ScheduleDriver
from chunkgraph.schedules import build_schedule

pytestmark = [pytest.mark.megatron]


class Communicator:
    """A user's pipeline communicator."""


@pytest.mark.every_release
@pytest.mark.parametrize(
    ("keywords", "match"),
    [
        ({"adjust_tensor_shapes_fn": max}, "this step has adjust_tensor_shapes_fn="),
        ({"p2p_communicator": Communicator()}, "p2p_communicator=.*Communicator"),
    ],
)
def test_a_step_of_another_kind_is_refused(keywords: dict[str, Any], match: str) -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace()  # type: ignore[assignment]

    def build(count: int) -> Any:
        return build_schedule("1f1b", num_ranks=2, num_microbatches=count)

    driver = ScheduleDriver(build, rank=0)
    with pytest.raises(ConfigError, match=match):
        driver(
            model=model,
            data_iterator=iter(()),
            forward_step_func=max,
            num_microbatches=2,
            pg_collection=SimpleNamespace(),
            **keywords,
        )


class Groups:
    """Stands for the transfer groups; counts the calls of `close`."""

    num_closed = 0

    def __init__(self, _pipeline: Any, _message_bytes: int) -> None:
        pass

    def close(self) -> None:
        Groups.num_closed += 1


@pytest.mark.parametrize("fails", [False, True])
def test_groups_with_transfers_that_may_be_pending_are_not_destroyed(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr("chunkgraph.megatron.pipeline.driver.TransferGroups", Groups)
    monkeypatch.setattr(Groups, "num_closed", 0)
    monkeypatch.setattr("chunkgraph.megatron.pipeline.driver._Step.__init__", lambda *_: None)
    monkeypatch.setattr(
        "chunkgraph.megatron.pipeline.driver._Step.run", lambda *_, **__: 1 / 0 if fails else []
    )
    monkeypatch.setattr("chunkgraph.megatron.pipeline.driver._Step.message_bytes", 4)
    model = nn.Linear(2, 2)
    driver = ScheduleDriver(
        lambda count: build_schedule("1f1b", num_ranks=2, num_chunks=1, num_microbatches=count), 0
    )

    def run() -> None:
        driver(
            model=model,
            data_iterator=iter(()),
            forward_step_func=max,
            num_microbatches=2,
            pg_collection=SimpleNamespace(pp=None),
        )

    if fails:
        with pytest.raises(ZeroDivisionError):
            run()
    else:
        run()
    driver.close()
    assert Groups.num_closed == int(not fails)
