"""Layers that delay their weight gradients: computed in W, with the bits of Megatron's 1F1B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(240)]


def test_weight_gradients_in_w_equal_those_of_whole_backwards(
    run_equal: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    def case(schedule: str = "zb-h1", **sections: Any) -> dict[str, Any]:
        model = {"layer_spec": "delayed_layers:delaying"}
        pipeline = {"pipeline_model_parallel_size": 2, "schedule": schedule}
        train = {"num_microbatches": [2, 3, 1, 4], "micro_batch_size": 2}
        for name, values in {"model": model, "pipeline": pipeline, "train": train}.items():
            sections[name] = {**values, **sections.get(name, {})}
        return {"config": make_config(**sections)}

    overlap = {"overlap_grad_reduce": True}
    run_equal(
        {
            "graphs": case(),
            "overlap": case(train=overlap, capture={"scope": "chunk", "verify": "shadow"}),
            "interleaved": case(
                "interleaved-zb",
                pipeline={"virtual_pipeline_model_parallel_size": 2},
                train={**overlap, "num_microbatches": [2, 4, 2]},
            ),
        },
        2,
    )
