"""FP8 with stand-ins for Transformer Engine's layers and state equals eager to the last bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping
from in_process import Trained

from chunkgraph.errors import CaptureError
from chunkgraph.trainer.model import build_optimizer, zero_gradients

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(120)]

_MODEL = {"layer_spec": "fp8_stand_in:quantized", "hidden_dropout": 0.1}


def _check(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        assert all(step["replays"] > 0 for step in result["steps"][1:]), name


def _cases(make_config: Callable[..., Any], counts: list[int], **pipeline: int | str) -> Any:
    return {
        f"{recipe}_{scope}": {
            "config": make_config(
                model=_MODEL,
                pipeline=pipeline,
                train={"num_microbatches": counts},
                capture={"scope": scope, "verify": verify},
            ),
            "transformer_options": {"fp8": "hybrid", "fp8_recipe": recipe},
        }
        for recipe, scope, verify in (
            ("delayed", "block", "none"),
            ("delayed", "chunk", "shadow"),
            ("tensorwise", "block", "poison"),
        )
    }


@pytest.mark.every_release
def test_two_ranks(
    run_equal: Callable[..., Any], make_config: Callable[..., Any], once: Callable[..., Any]
) -> None:
    """The first microbatch of every chunk quantizes the weights; numbers of microbatches change."""
    pp2 = {"pipeline_model_parallel_size": 2}
    cases = _cases(make_config, [2, 2, 4], **pp2, virtual_pipeline_model_parallel_size=2)
    # The older release only marks a chunk's first microbatch in another way.
    delayed = {"delayed_block": cases.pop("delayed_block")}
    # A stage of one chunk is simpler.
    mixed = _cases(make_config, [4, 1, 5, 2], **pp2)
    others = once({**cases, **{f"{name}_mixed": case for name, case in mixed.items()}})
    _check(run_equal({**delayed, **others}, 2))


@pytest.mark.slow
def test_split_backwards(run_equal: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """Zero-bubble schedules on graphs equal Megatron's own; `verify` shadow is refused there."""
    pp2 = {"pipeline_model_parallel_size": 2}
    vpp2 = {**pp2, "virtual_pipeline_model_parallel_size": 2, "schedule": "interleaved-zb"}
    interleaved = _cases(make_config, [2, 4, 2], **vpp2)
    cases = _cases(make_config, [2, 1, 4, 3], **pp2, schedule="zb-h1")
    cases.update({f"{name}_interleaved": case for name, case in interleaved.items()})
    for case in cases.values():
        if case["config"]["capture"]["verify"] == "shadow":
            case["config"]["capture"]["verify"] = "poison"
    _check(run_equal(cases, 2))


@pytest.mark.slow
def test_several_graphs_of_a_slot(
    run_equal: Callable[..., Any],
    make_config: Callable[..., Any],
    write_documents: Callable[..., Path],
) -> None:
    """Graphs for lengths and numbers of sequences continue from each other's scales."""
    path = write_documents(range(2, 23))
    packing = {
        "max_packed_seqs": 16,
        "max_packed_tokens": 64,
        "buckets": [0.55],  # 36 rows, rounded up to multiples of 16
        "seq_buckets": [4, 5],
    }
    cases = {
        name: {
            "config": make_config(
                model={"layer_spec": "fp8_stand_in:quantized_packed", "hidden_dropout": 0.1},
                pipeline={"pipeline_model_parallel_size": 2},
                train={"num_microbatches": [3, 1, 5, 2], "micro_batch_size": 1},
                data={"path": str(path)},
                packing=packing,
                capture={"scope": scope, "verify": verify},
            ),
            "transformer_options": {"fp8": "hybrid", "fp8_recipe": recipe},
        }
        for name, recipe, scope, verify in (
            ("delayed", "delayed", "chunk", "poison"),
            ("delayed_shadow", "delayed", "block", "shadow"),
            ("tensorwise", "tensorwise", "chunk", "none"),
        )
    }
    results = run_equal(cases, 2)
    _check(results)
    for name, result in results.items():
        for replays in result["replays_of_bank"]:
            lengths, counts = ({bank.split(", ")[part] for bank in replays} for part in (0, 1))
            assert lengths == {"64 tokens", "48 tokens"}, name
            assert len(counts) > 1, name


@pytest.fixture
def stand_in(one_rank: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install the stand-in where chunkgraph expects Transformer Engine's FP8."""
    import fp8_stand_in

    monkeypatch.setitem(sys.modules, fp8_stand_in.MODULE, fp8_stand_in)
    return fp8_stand_in


def _losses(
    device: Any, config: Any, recipe: str, *, graphs: bool, kinds: str, scope: Any = "block"
) -> tuple[list[float], list[torch.Tensor], Any]:
    """Run training (``t``) and evaluation (``e``) steps; return losses, parameters and counters."""
    options = {"fp8": "hybrid", "fp8_recipe": recipe}
    model = Trained(
        device, config, {"scope": scope} if graphs else None, transformer_options=options
    )
    optimizer = build_optimizer(config, model.chunks)
    losses: list[float] = []
    for step, kind in enumerate(kinds):
        for chunk in model.chunks:
            chunk.train(kind == "t")
        zero_gradients(model.chunks, optimizer)
        with torch.set_grad_enabled(kind == "t"):
            count = (3, 1, 4, 2)[step % 4]
            losses += model.step(step, count, clears=False, forward_only=kind == "e")
        if kind == "t":
            optimizer.step()
    parameters = [p.detach().clone() for p in model.chunks[0].parameters()]
    if graphs:
        model.graphs.detach()
    return losses, parameters, model.graphs.counters if graphs else None


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_evaluation_between_steps(
    one_rank: Any, make_config: Callable[..., Any], stand_in: Any, recipe: str
) -> None:
    config = config_from_mapping(make_config(model=_MODEL))
    kinds = "ttetteet"
    eager, parameters, _ = _losses(one_rank, config, recipe, graphs=False, kinds=kinds)
    graphs, others, counters = _losses(one_rank, config, recipe, graphs=True, kinds=kinds)
    assert graphs == eager
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    assert counters.replays == 1 + 2 + 3 + 2


def test_a_cache_made_in_a_capture_is_refused(
    one_rank: Any,
    make_config: Callable[..., Any],
    stand_in: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_from_mapping(make_config(model=_MODEL))
    forward = stand_in.QuantizedColumn.forward

    def forgetful(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not layer.is_first_microbatch:
            layer._fp8_workspaces.clear()
        return forward(layer, *args, **kwargs)

    monkeypatch.setattr(stand_in.QuantizedColumn, "forward", forgetful)
    with pytest.raises(CaptureError, match=r"QuantizedColumn.*, weight allocated its cached FP8"):
        _losses(one_rank, config, "tensorwise", graphs=True, kinds="tt")
