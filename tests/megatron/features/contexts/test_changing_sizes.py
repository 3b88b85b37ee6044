"""Models whose context-parallel size changes: groups, announcements and refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from refused import refused
from torch import nn

from chunkgraph.engine import StepMode
from chunkgraph.megatron.feature import Step, StepPlan
from chunkgraph.megatron.features.contexts.feature import Contexts


def test_a_replayed_step_walks_over_no_modules() -> None:
    """It calls none of them, except in the eager passes of `verify`; eager steps call all."""
    outer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    outer[0].cp_group = outer[0].tp_cp_group = "before"
    site: Any = SimpleNamespace(parts=[SimpleNamespace(module=outer)])
    contexts = Contexts(site, groups=None)  # type: ignore[arg-type]
    for around in (
        lambda: contexts.step(Step(StepMode.EAGER, True, StepPlan())),
        lambda: contexts.around("capture"),
        lambda: contexts.around("verify"),
    ):
        with around():
            outer[0].cp_group = outer[0].tp_cp_group = outer[1].cp_group = "of its first call"
            outer[1].cp_stream = "of its first call"
        assert outer[0].cp_group == outer[0].tp_cp_group == "before"
        assert not {"cp_group", "cp_stream"} & vars(outer[1]).keys()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "named_modules", None)  # the iterator of modules()
        with contexts.step(Step(StepMode.REPLAY, True, StepPlan())):
            pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp8": "hybrid"}, "fp8='hybrid': scales of ranks"),
        ({"context_parallel_size": 2}, "context_parallel_size=2: the groups are formed"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1: multi-token prediction"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
            "recompute_modules=['mla_up_proj']: moe and mla_up_proj would be recomputed",
        ),
    ],
)
def test_what_sizes_that_change_cannot_go_with(settings: dict[str, Any], message: str) -> None:
    (refusal,) = refused(Contexts.rules, settings, context_parallel_sizes=(1, 2))
    assert refusal.startswith(f"packing=PackedBanks.of_limits(...) with {message}")
    assert refused(Contexts.rules, settings) == []
