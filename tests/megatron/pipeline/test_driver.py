"""Megatron's training by the actions of a schedule equals Megatron's schedule functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.pipeline.driver import ScheduleDriver
from chunkgraph.schedules import build_schedule

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}


def _case(
    make_config: Callable[..., Any],
    schedule: str,
    pipeline: dict[str, Any],
    counts: list[int],
    train: dict[str, Any] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    config = make_config(
        pipeline={**pipeline, "schedule": schedule},
        train={"num_microbatches": counts, "micro_batch_size": 2, **(train or {})},
        **sections,
    )
    return {"config": config}


@pytest.mark.slow
@pytest.mark.every_release
def test_eager_steps_equal_megatrons_functions(
    run_cases: Callable[..., Any], make_config: Callable[..., Any], once: Callable[..., Any]
) -> None:
    """Also layers that delay their weight gradients."""
    overlap = {"overlap_grad_reduce": True}
    tied = {"untie_embeddings_and_output_weights": False}

    def case(*args: Any, **sections: Any) -> dict[str, Any]:
        return _case(make_config, *args, **sections, capture={"enabled": False})

    def delayed(kind: str) -> dict[str, Any]:
        model = {**DROPOUT, "layer_spec": f"delayed_layers:{kind}"}
        return case("zb-h1", PP2, [2, 3, 1, 4], overlap, model=model)

    cases = {
        "1f1b": case("1f1b", PP2, [1, 2, 5, 3], model=DROPOUT),
        "tied": case("1f1b", PP2, [2, 3], model=tied),
        "interleaved": case("interleaved", VPP2, [2, 4, 6], model=DROPOUT),
        "overlap": case("1f1b", PP2, [3, 4], overlap),
        "interleaved_overlap": case("interleaved", VPP2, [4, 2], overlap),
        **once({kind: delayed(kind) for kind in ("delaying", "fusing")}),
    }
    for name, result in run_cases(cases, 2).items():
        assert all(step["different"] == [] for step in result["steps"]), name
        assert result["different_parameters"] == {}, name
        assert len({step["loss"] for step in result["steps"]}) == len(result["steps"]), name


def test_zero_bubble_on_graphs_equals_megatrons_1f1b(
    run_equal: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    case = functools.partial(_case, make_config)
    results = run_equal(
        {
            "1f1b": case("1f1b", PP2, [2, 5, 1, 3]),
            "zb-h1": case("zb-h1", PP2, [1, 2, 5, 1, 3], model=DROPOUT),
            "tied": case(
                "zb-h1", PP2, [2, 3, 4], model={"untie_embeddings_and_output_weights": False}
            ),
            "overlap": case("zb-h1", PP2, [3, 4, 2], train={"overlap_grad_reduce": True}),
            "interleaved": case("interleaved", VPP2, [2, 4, 2]),
            "interleaved-zb": case("interleaved-zb", VPP2, [2, 4, 6, 2], model=DROPOUT),
        },
        2,
    )
    # Both ranks have two slots, and the first stage has no input gradient to compute.
    assert results["1f1b"]["num_graphs"] == 2 * (2 + 1)
    assert results["zb-h1"]["num_graphs"] == 2 * 2 + 3 * 2


# Steps that a schedule of chunkgraph cannot run, and the state after a failed step.


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

    driver = ScheduleDriver(build, 0, max)
    with pytest.raises(ConfigError, match=match):
        driver(
            model=model,
            data_iterator=iter(()),
            forward_step_func=max,
            num_microbatches=2,
            pg_collection=SimpleNamespace(),
            **keywords,
        )


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_groups_with_transfers_that_may_be_pending_are_not_destroyed(
    error: type[Exception] | None,
) -> None:
    step = mock.Mock(message_bytes=4)
    step.run.side_effect = error
    driver = ScheduleDriver(
        lambda count: build_schedule("1f1b", num_ranks=2, num_microbatches=count), 0, max
    )
    with mock.patch.multiple(
        "chunkgraph.megatron.pipeline.driver",
        TransferGroups=mock.DEFAULT,
        _Step=mock.Mock(return_value=step, message_bytes=4),
    ) as patched:
        with pytest.raises(error) if error else nullcontext():
            driver(
                model=nn.Linear(2, 2),
                data_iterator=iter(()),
                forward_step_func=max,
                num_microbatches=2,
                pg_collection=SimpleNamespace(pp=None),
            )
        driver.close()
    assert patched["TransferGroups"].return_value.close.called is (error is None)
