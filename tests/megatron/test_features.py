"""Model features: chunk graphs equal eager training to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_process import Trained
from megatron_jobs import in_scope
from packed_cases import HAS_LATENT, SMALL_LATENT, all_but_the_first_replay

from chunkgraph.engine import CaptureOptions

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(200)]

_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_FOUR_LAYERS = {**_DROPOUT, "num_layers": 4}


def _check(results: dict[str, dict[str, Any]]) -> None:
    all_but_the_first_replay(results)
    for name, result in results.items():
        assert result["num_parameters_compared"] > 5_000, name


def _alternately(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return every case in one of the scopes, in turn: cases differ inside the blocks."""
    return {
        name: in_scope(("chunk", "block")[index % 2], case)
        for index, (name, case) in enumerate(cases.items())
    }


@pytest.mark.every_release
def test_one_rank(
    run_equal: Callable[..., Any],
    make_config: Callable[..., Any],
    in_both_scopes: Callable[..., Any],
) -> None:
    """Parameters that do not train, under DDP and without it."""
    cases = {
        "token_prediction": {
            "config": make_config(
                model={**_DROPOUT, "num_layers": 2},
                train={"num_microbatches": [2, 3, 1]},
                capture={"verify": "poison"},
            ),
            "transformer_options": {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3},
        },
        "frozen_parts": {
            "config": make_config(model=_FOUR_LAYERS),
            "frozen": [r"embedding", r"layers\.1\.", r"layers\.2\..*bias", r"final_layernorm"],
        },
        "frozen_no_ddp": {
            "config": make_config(model=_FOUR_LAYERS, train={"use_ddp": False}),
            "frozen": [r"layers\.3\.", r"output_layer"],
        },
    }
    _check(run_equal(in_both_scopes(cases), 1))


@pytest.mark.skipif(
    not HAS_LATENT,
    reason="0.16's multi-latent attention cannot be built without Transformer Engine",
)
def test_latent_attention(run_equal: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """Multi-latent attention with RoPE and with YARN."""
    cases = {
        "latent_rope": {
            "config": make_config(
                model={**_DROPOUT, "layer_spec": "user_specs:latent"}, capture={"verify": "poison"}
            ),
            "transformer_options": {**SMALL_LATENT, "rope_type": "rope"},
        },
        "latent_yarn": {
            "config": make_config(model={**_DROPOUT, "layer_spec": "user_specs:latent"}),
            "transformer_options": SMALL_LATENT,
        },
    }
    _check(run_equal(_alternately(cases), 1))


@pytest.mark.slow
@pytest.mark.every_release
def test_two_ranks(
    run_equal: Callable[..., Any],
    make_config: Callable[..., Any],
    in_both_scopes: Callable[..., Any],
) -> None:
    """Sequence parallelism, and a pipeline with a frozen embedding or a frozen stage."""
    cases = {
        "sequence_parallel": {
            "config": make_config(
                model={
                    **_DROPOUT,
                    "num_layers": 2,
                    "layer_spec": "user_specs:split_sequences_2",
                },
                pipeline={"tensor_model_parallel_size": 2},
                capture={"verify": "poison"},
            ),
            "transformer_options": {"sequence_parallel": True},
        },
        "token_prediction": {
            "config": make_config(
                model={
                    **_DROPOUT,
                    "num_layers": 2,
                    "untie_embeddings_and_output_weights": False,
                },
                pipeline={"pipeline_model_parallel_size": 2},
                train={"num_microbatches": [3, 1, 4]},
            ),
            "transformer_options": {"mtp_num_layers": 1},
        },
        "frozen_embedding": {
            "config": make_config(
                model=_FOUR_LAYERS,
                pipeline={"pipeline_model_parallel_size": 2},
                train={"num_microbatches": [4, 1, 3], "overlap_grad_reduce": True},
            ),
            "frozen": [r"embedding", r"decoder\.layers\.0\."],
        },
    }
    _check(run_equal(in_both_scopes(cases), 2))


@pytest.mark.parametrize("where", ["first", "last"])
def test_frozen_stages(
    run_equal: Callable[..., Any], make_config: Callable[..., Any], where: str
) -> None:
    """A first stage without trainable parameters has no backward; one slot serves it."""
    counts = {"interleaved": [2, 4, 6], "1f1b": [3, 2, 5, 9]}
    _check(run_equal(_pipelines(make_config, counts, frozen=[where]), 2))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["all", "last"])
def test_adapters(
    run_equal: Callable[..., Any], make_config: Callable[..., Any], where: str
) -> None:
    """Stages are frozen but for adapters of peft, all of them or the last one."""
    pytest.importorskip("peft")
    counts = {"interleaved": [4, 2, 8, 6], "1f1b": [3, 2, 9, 8, 7, 6, 5, 4]}
    _check(run_equal(_pipelines(make_config, counts, lora=where), 2))


def test_evaluations_of_merged_adapters_between_steps(one_rank: Any, config: Any) -> None:
    pytest.importorskip("peft")
    import megatron_lora

    runs = []
    for graphs in (None, {"scope": "chunk"}):
        model = Trained(one_rank, config, graphs, prepare=megatron_lora.add_adapters)
        trained = [p for c in model.chunks for p in c.parameters() if p.requires_grad]
        results: list[Any] = []
        for step, count in enumerate((2, 3, 1, 4)):
            results.append(model.step(step, count))
            results += [p.main_grad.clone() for p in trained]
            megatron_lora.merge(model.chunks)
            results.append(model.step(9, 2, forward_only=True, clears=False))
            megatron_lora.merge(model.chunks, is_undone=True)
        runs.append(list(map(torch.as_tensor, results)))
    assert all(map(torch.equal, *runs))
    assert len(set(runs[0][0].tolist())) > 1
    assert (model.graphs.counters.replays, model.graphs.counters.capture_sessions) == (8, 1)


def _pipelines(
    make_config: Callable[..., Any], counts: dict[str, list[int]], **case: Any
) -> dict[str, dict[str, Any]]:
    """Return cases of three schedules on two ranks."""
    model = {**_FOUR_LAYERS, "hidden_dropout": 0.1, "untie_embeddings_and_output_weights": True}
    schedules = {"1f1b": ("auto", None), "interleaved": ("auto", 2), "zb": ("zb-h1", None)}
    return {
        name: {
            "config": make_config(
                model=model,
                pipeline={
                    "pipeline_model_parallel_size": 2,
                    "virtual_pipeline_model_parallel_size": num_chunks,
                    "schedule": schedule,
                },
                train={"num_microbatches": counts["interleaved" if num_chunks else "1f1b"]},
                capture={"scope": "chunk"},
            ),
            **case,
        }
        for name, (schedule, num_chunks) in schedules.items()
    }


def _metrics(
    device: Any, config: Any, options: dict[str, Any], log: Any, **graph_options: Any
) -> list[dict[str, Any]]:
    """Return the metrics in Megatron's ``log`` after each of three steps."""
    graphs = None
    if graph_options:
        verify = CaptureOptions(verify=graph_options.pop("verify", "none"))
        graphs = {"options": verify, **graph_options}
    model = Trained(device, config, graphs, transformer_options=options)
    tracker, seen = log.tracker, []
    tracker.clear()
    for step, count in enumerate((2, 3, 1)):
        model.step(step, count)
        seen.append(
            {n: v.tolist() if hasattr(v, "tolist") else v is None for n, v in tracker.items()}
        )
        clean = getattr(log, "clean_metrics_in_tracker", None)
        (clean or log.clean_loss_in_tracker)()
    if graphs is not None:
        assert model.graphs.counters.replays == 4
        model.graphs.detach()
    return seen


def _check_metrics(device: Any, config: Any, options: dict[str, Any], log: Any) -> None:
    eager = _metrics(device, config, options, log)
    assert all(any(isinstance(v, list) and v[0] > 0 for v in step.values()) for step in eager)
    for graph_options in ({"scope": "chunk"}, {"scope": "block"}):
        assert _metrics(device, config, options, log, **graph_options) == eager
    # Eager passes next to replays do not count.
    assert _metrics(device, config, options, log, scope="chunk", verify="shadow") == eager


def test_metrics_of_token_prediction_go_on(one_rank: Any, config: Any) -> None:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    _check_metrics(one_rank, config, {"mtp_num_layers": 1}, MTPLossLoggingHelper)
