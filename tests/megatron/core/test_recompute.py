"""Activation recomputation inside captured backwards, against eager recomputation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping
from in_process import Trained
from refused import refused as refused_settings
from small_settings import RECOMPUTED
from torch import nn

from chunkgraph.engine import Chunk, ChunkGraphs
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import RecorderBackend
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.core.capturing import recomputing
from chunkgraph.megatron.refusals import MODEL_RULES

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]

_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_FOUR_LAYERS = {"num_layers": 4}
_BLOCK = {**RECOMPUTED, "recompute_method": "block"}


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def _assert_replayed(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        assert all(step["replays"] > 0 for step in result["steps"][1:]), name


@pytest.mark.slow
@pytest.mark.every_release
def test_one_rank(
    run_equal: Callable[..., Any], make_config: Callable[..., Any], once: Callable[..., Any]
) -> None:
    """Every kind of recomputation has the bits of saved activations."""
    ways: dict[str, dict[str, Any]] = {
        "kept": {},
        "uniform": RECOMPUTED,
        **once(
            {
                "pairs": {**RECOMPUTED, "recompute_num_layers": 2},
                "block": {**_BLOCK, "recompute_num_layers": 3},
            }
        ),
        "core_attn": _selective("core_attn"),
    }
    cases = {
        name: {"config": make_config(model={**_FOUR_LAYERS, **way}, capture={"verify": "poison"})}
        for name, way in ways.items()
    }
    model = {**_FOUR_LAYERS, **RECOMPUTED}
    shadow = {"verify": "shadow"}
    cases |= once({"uniform_shadow": {"config": make_config(model=model, capture=shadow)}})
    cases |= once(
        {
            "uniform_no_ddp": {
                "config": make_config(
                    model=model, train={"use_ddp": False}, capture={"scope": "chunk"}
                )
            }
        }
    )
    cases["mlp"] = {
        "config": make_config(
            model={**_selective("core_attn", "mlp"), "swiglu": True, "hidden_dropout": 0.1},
            capture={"scope": "chunk"},
        )
    }
    results = run_equal(cases, 1)
    _assert_replayed(results)
    kept = results.pop("kept")
    del results["mlp"]  # a different model
    for name, result in results.items():
        for step, expected in zip(result["steps"], kept["steps"], strict=True):
            assert step["loss"] == expected["loss"], name
            if name != "uniform_no_ddp":
                assert step["grad_norm"] == expected["grad_norm"], name


@pytest.mark.slow
def test_two_ranks(run_equal: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """PP 2 x VPP 2, TP 2 and DP 2 with overlapped reduction, in both scopes."""
    cases = {
        "pp2_vpp2": {
            "config": make_config(
                model={**RECOMPUTED, "untie_embeddings_and_output_weights": False},
                pipeline={
                    "pipeline_model_parallel_size": 2,
                    "virtual_pipeline_model_parallel_size": 2,
                },
                train={"num_microbatches": [2, 2, 4], "overlap_grad_reduce": True},
                capture={"verify": "poison", "scope": "chunk"},
            )
        },
        "pp2_block": {
            "config": make_config(
                model={**_FOUR_LAYERS, **_BLOCK, "recompute_num_layers": 1},
                pipeline={"pipeline_model_parallel_size": 2},
                train={"num_microbatches": [4, 1, 5]},
                capture={"verify": "shadow"},
            )
        },
        "tp2": {
            "config": make_config(
                model={**_FOUR_LAYERS, **_BLOCK, "recompute_num_layers": 2},
                pipeline={"tensor_model_parallel_size": 2},
            )
        },
        "dp2": {
            "config": make_config(
                model={
                    **_selective("core_attn", "mlp"),
                    "hidden_dropout": 0.1,
                    "num_layers": 2,
                    "swiglu": True,
                },
                pipeline={"data_parallel_size": 2},
                train={
                    "num_microbatches": [2, 1, 3],
                    "overlap_grad_reduce": True,
                    "use_distributed_optimizer": True,
                },
            ),
            "ddp_options": {"bucket_size": 8000, "overlap_param_gather": True},
        },
    }
    _assert_replayed(run_equal(cases, 2))


def test_slots_hold_only_the_inputs_of_layers(
    one_rank: Any, make_config: Callable[..., Any]
) -> None:
    held: list[int] = []
    for way in ({}, RECOMPUTED):
        config = config_from_mapping(make_config(model={**_FOUR_LAYERS, **way, "seq_length": 64}))
        model = Trained(one_rank, config, {"scope": "block"})
        graphs = model.graphs
        for step in range(2):
            model.step(step, 1)
        report = graphs.engine.report
        held.append(report.held_bytes)
        graphs.detach()
    kept, recomputed = held
    # Four inputs of 32 KiB and the output (with its norm) against all activations.
    hidden_bytes = 64 * 2 * 32 * 4
    assert recomputed < 12 * hidden_bytes
    assert kept > 8 * recomputed


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"recompute_granularity": "full"}, True),
        (_selective("core_attn"), True),
        (_selective("mlp"), False),
        ({**_selective("core_attn"), "attention_dropout": 0.0}, False),
        ({"recompute_granularity": "full", "attention_dropout": 0.0}, True),
        ({"recompute_granularity": "full", "attention_dropout": 0.0, "hidden_dropout": 0.0}, False),
        ({}, False),
    ],
)
def test_dropout_in_what_is_recomputed_is_refused(settings: dict[str, Any], refused: bool) -> None:
    for on_gpu in (False, True):
        facts = {"on_gpu": on_gpu, "is_rng_graph_safe": True}
        reasons = refused_settings(MODEL_RULES, {**_DROPOUT, **settings}, **facts)
        assert len(reasons) == refused
        assert all("cannot repeat the dropout masks" in reason for reason in reasons)


@pytest.mark.parametrize("draws", [False, True])
def test_a_layers_own_dropout_in_megatrons_checkpoint_is_refused(
    one_rank: Any, draws: bool
) -> None:
    """It has no setting that a rule could read."""
    module = import_megatron("megatron.core.tensor_parallel")
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5 if draws else 0.0))

    def masked(x: torch.Tensor) -> torch.Tensor:
        return layer(x) * torch.ones(8, device="cuda")  # as attention makes its mask

    def forward(x: torch.Tensor) -> torch.Tensor:
        return module.checkpoint(masked, False, nn.functional.dropout(x, 0.5))

    chunk = Chunk(
        forward=forward, parameters=tuple(layer.parameters()), label="chunk 0", module=layer
    )
    graphs = ChunkGraphs([chunk], [1], backend=RecorderBackend())
    refused = pytest.raises(CaptureError, match="draws random numbers in a recomputation")
    with recomputing(), refused if draws else nullcontext():
        graphs.capture([torch.ones(4, 8, requires_grad=True)])
