"""Invalid options are refused with a suggestion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import Banks, CaptureOptions, ChunkGraphs
from chunkgraph.errors import ConfigError
from chunkgraph.graphs import RecorderBackend


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"verify": "Shadow"}, r"verify is 'Shadow'.*Did you mean 'shadow'\?"),
        ({"verify": True}, "verify is True; it must be 'none' or 'poison' or 'shadow'"),
        ({"verify": None}, "verify is None"),
        ({"verify": "x" * 10_000}, "^.{0,300}$"),
        ({"on_failure": "warn"}, "on_failure is 'warn'; it must be 'raise' or 'eager'"),
        ({"memory_plan": "pool-per-slot"}, "Did you mean 'pool_per_slot'"),
        ({"num_warmup_steps": -3}, "num_warmup_steps is -3; it must be a whole number, 0 or"),
        ({"num_warmup_steps": 1.5}, "num_warmup_steps is 1.5"),
        ({"num_warmup_steps": True}, "num_warmup_steps is True"),
        ({"num_warmup_steps": None}, "num_warmup_steps is None"),
        ({"num_warmup_passes": -1}, "num_warmup_passes is -1.*or None"),
        ({"num_verify_steps": -1}, "num_verify_steps is -1.*or None for all steps"),
        ({"verify_every": 0}, "verify_every is 0; it must be a whole number, 1 or greater"),
        ({"shared_slots": "no"}, "shared_slots is 'no'; it must be True or False"),
        ({"memset_kernels": 1}, "memset_kernels is 1"),
    ],
)
def test_options_that_cannot_be_are_refused(option: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CaptureOptions(**option)


def test_the_defaults_and_every_choice_are_accepted() -> None:
    for plan in ("shared_temporaries", "shared_backward", "pool_per_slot", "one_pool"):
        for verify in ("none", "poison", "shadow"):
            CaptureOptions(memory_plan=plan, verify=verify, num_warmup_steps=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [float("nan"), (128, float("nan")), [128], torch.tensor(1.0)])
def test_a_shape_key_that_is_never_equal_is_refused(key: Any) -> None:
    graphs = ChunkGraphs(nn.Linear(4, 4), 1, backend=RecorderBackend())
    if isinstance(key, torch.Tensor):
        key = (key, [key])
    with pytest.raises(ConfigError, match="shape_key is"), graphs.step(1, shape_key=key):
        pass


@pytest.mark.parametrize("keys", [(), (2, 1, 2)])
def test_banks_have_different_keys(keys: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="at least one key, and each once"):
        Banks(keys)
