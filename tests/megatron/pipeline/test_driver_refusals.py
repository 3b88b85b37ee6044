"""Steps that a schedule of chunkgraph cannot drive are refused, with what to do instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.pipeline import ScheduleDriver
from chunkgraph.schedules import build_schedule

pytestmark = [pytest.mark.megatron]


class Communicator:
    """A pipeline communicator of somebody's own."""


@pytest.mark.every_release
@pytest.mark.parametrize(
    ("keywords", "num_chunks", "match"),
    [
        ({"adjust_tensor_shapes_fn": max}, 1, "with adjust_tensor_shapes_fn"),
        ({"p2p_communicator": Communicator()}, 1, "p2p_communicator of this step is a Communic"),
        ({}, 2, r"has 2 model chunk\(s\) a rank, and the model has 1"),
    ],
)
def test_a_step_of_another_kind_is_refused(
    keywords: dict[str, Any], num_chunks: int, match: str
) -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace()  # type: ignore[assignment]

    def build(count: int) -> Any:
        name = "1f1b" if num_chunks == 1 else "interleaved"
        return build_schedule(name, num_ranks=2, num_chunks=num_chunks, num_microbatches=count)

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
