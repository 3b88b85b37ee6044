"""Experts without a capacity: chunk graphs equal Megatron's eager training to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_cases import BIASED, EXPERTS, GROUPED, OVERLAP, case, check_random_steps
from extended_config import config_from_mapping
from packed_cases import all_but_the_first_replay
from small_settings import RECOMPUTED

from chunkgraph.trainer.trained_model import TrainedModel

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(200)]

# Megatron's own experts with biases fail on one rank.
_PLAIN = {"swiglu": False, "add_bias_linear": False}
_GATHERED = {"moe_token_dispatcher_type": "allgather"}
_RANDOM_LOADS = {"moe_router_force_load_balancing": True}
_SHARDED = {"use_distributed_optimizer": True}


def _split(
    make_config: Callable[..., dict[str, Any]],
    experts: dict[str, Any],
    train: dict[str, Any] | None = None,
    **pipeline: int,
) -> dict[str, Any]:
    """Make a case with each expert split over two ranks, with sequence parallelism."""
    whole = case(
        make_config,
        experts,
        model={"num_layers": 1, "layer_spec": "user_specs:experts_split"},
        train=train,
        pipeline={"tensor_model_parallel_size": 2, "sequence_parallel": True, **pipeline},
    )
    return {**whole, "expert_tensor_parallel_size": 2}


def _check(results: dict[str, dict[str, Any]]) -> None:
    all_but_the_first_replay(results)
    assert not any(result["dropped_tokens"] for result in results.values())


@pytest.mark.every_release
def test_one_rank(
    run_equal: Callable[..., Any], make_config: Callable[..., Any], once: Callable[..., Any]
) -> None:
    """Activations, biases, scores, losses, dispatchers, recomputation, scopes."""
    make = make_config
    whole = {"scope": "chunk"}
    cases = {
        "softmax": case(make, EXPERTS, capture={"verify": "poison"}),
        "biased": case(make, BIASED, capture={**whole, "verify": "shadow"}),
        "grouped": case(make, {**GROUPED, "moe_layer_freq": [0, 1]}, train={"use_ddp": False}),
        "gathered": case(make, {**BIASED, **_GATHERED}),
        # Whose weights lie in reverse order, and so do rows.
        "sharded": case(make, BIASED, train=_SHARDED, capture={**whole, "verify": "shadow"}),
        "sharded_gathered": case(make, {**BIASED, **_GATHERED}, train=_SHARDED),
        "recomputed": case(
            make,
            BIASED,
            model={"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        ),
        "sinkhorn": case(
            make,
            {**EXPERTS, "moe_aux_loss_coeff": 0.0},
            options={"moe_router_load_balancing_type": "sinkhorn"},
        ),
        **once(
            {
                "recomputed_shared_experts": case(
                    make,
                    BIASED,
                    model={
                        "recompute_granularity": "selective",
                        "recompute_modules": ["shared_experts"],
                    },
                ),
                "random_loads": case(make, EXPERTS, options=_RANDOM_LOADS),
                "plain": case(make, EXPERTS, model=_PLAIN),
                "overlapped": case(make, BIASED, options=OVERLAP, capture={"verify": "poison"}),
                "half_precision": case(make, BIASED, model={"params_dtype": "bfloat16"}),
                "predicting": case(make, EXPERTS, options={"mtp_num_layers": 1}, capture=whole),
                "one_expert": case(
                    make,
                    {**EXPERTS, "moe_router_topk": 1, "moe_router_pre_softmax": True},
                    options={"moe_apply_probs_on_input": True},
                ),
                "recomputed_layers": case(
                    make,
                    EXPERTS,
                    model={**RECOMPUTED, "hidden_dropout": 0.0},
                    capture=whole,
                ),
            }
        ),
    }
    _check(run_equal(cases, 1, timeout_s=180.0))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Megatron's shards
@pytest.mark.parametrize("train", [{}, _SHARDED])
def test_weights_that_others_write_between_steps_count_in_the_next_one(
    one_rank: Any, make_config: Callable[..., Any], train: dict[str, Any]
) -> None:
    """As after a loaded checkpoint, and where weights are copied into a model in place."""
    mapping = case(make_config, EXPERTS, counts=(2, 1), model={"hidden_dropout": 0.0}, train=train)
    results = []
    for has_graphs in (False, True):
        model = TrainedModel(config_from_mapping(mapping["config"]), one_rank)
        if has_graphs:
            model.attach_graphs()
        losses = []
        for step in range(6):
            data = [model.batches.step(step, model.count(step))]
            losses.append(model.run_step(step, data, announces_next=False).loss)
            if step % 2:
                with torch.no_grad():
                    for name, p in model.chunks[0].named_parameters():
                        p.mul_(1.25 if "experts" in name else 0.75)
                model.optimizer.reload_model_params()
        results.append([*losses, *(p.detach().clone() for p in model.chunks[0].parameters())])
        assert model.counters.replays == (7 if has_graphs else 0)
        model.close()
    assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(*results, strict=True))


@pytest.mark.slow
def test_experts_that_are_multiplied_at_once(
    run_equal: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    """Megatron's experts of Transformer Engine, with a stand-in for its layer: see `user_specs`."""
    grouped = {"layer_spec": "user_specs:grouped_experts"}
    many = {**BIASED, "moe_grouped_gemm": True}
    cases = {
        "gated": case(make_config, many, model=grouped),
        "plain": case(
            make_config,
            {**many, **_GATHERED, "moe_shared_expert_intermediate_size": None},
            model={**grouped, "swiglu": False},
            capture={"verify": "poison"},
        ),
        "fused": case(make_config, many, model={"layer_spec": "user_specs:fused_experts"}),
    }
    _check(run_equal(cases, 1))


_SHARED = {"data_parallel_size": 2, "expert_model_parallel_size": 2}


@pytest.mark.slow
def test_two_ranks(run_equal: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """Experts on two ranks by both dispatchers, with biases; PP 2 x VPP 2."""
    make, shared = make_config, _SHARED
    interleaved = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    }
    overlap = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
    cases = {
        "ep2": case(make, BIASED, pipeline=shared, train=overlap),
        "ep2_gathered": case(make, {**BIASED, **_GATHERED}, pipeline=shared),
        "ep2_stash": case(make, BIASED, pipeline=shared, stash={"enabled": True}),
        "ep2_overlapped": case(make, BIASED, options=OVERLAP, pipeline=shared),
        "pp2_dense_stage": case(
            make,
            {**EXPERTS, "moe_layer_freq": [0, 1]},
            counts=(3, 1, 5),
            pipeline={"pipeline_model_parallel_size": 2},
            capture={"scope": "chunk"},
        ),
        "tp2": _split(make, BIASED),
        "tp2_sharded": _split(make, BIASED, train=_SHARDED),
        "pp2_vpp2": case(
            make,
            BIASED,
            counts=(2, 2, 4),
            model={"num_layers": 4},
            pipeline=interleaved,
            train={"overlap_grad_reduce": True},
        ),
    }
    results = run_equal(cases, 2, timeout_s=180.0)
    _check(results)
    assert results["ep2_stash"]["stash_bytes"][0] > 0


@pytest.mark.slow
def test_four_ranks(run_equal: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """PP 2 x EP 2; TP 2 x EP 2, with whole experts and with experts split over two ranks."""
    shared = {"data_parallel_size": 2, "expert_model_parallel_size": 2}
    pipeline = {**shared, "pipeline_model_parallel_size": 2}
    cases = {
        "pp2_ep2": case(make_config, BIASED, pipeline=pipeline, capture={"scope": "chunk"}),
        "tp2_ep2_split": _split(make_config, BIASED, **shared),
        "tp2_ep2_split_gathered": _split(make_config, {**EXPERTS, **_GATHERED}, **shared),
        "tp2_ep2": case(
            make_config,
            BIASED,
            model={"num_layers": 1, "layer_spec": "user_specs:experts_split"},
            pipeline={**shared, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        ),
    }
    _check(run_equal(cases, 4, timeout_s=180.0))


_SPREAD = {"data_parallel_size": 2, "expert_model_parallel_size": 2}
_SPREAD_4 = {"data_parallel_size": 4, "expert_model_parallel_size": 4}
_PIPELINE = {**_SPREAD, "pipeline_model_parallel_size": 2}
_INTERLEAVED = {**_PIPELINE, "virtual_pipeline_model_parallel_size": 2}
_DISPATCHERS = {
    **{name: {"moe_token_dispatcher_type": name} for name in ("alltoall", "allgather")},
    "flex": {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "hybridep",
        "moe_router_dtype": "fp32",
    },
}
# Dispatcher, sizes, layers, steps. The first step is eager; the kinds of loads repeat every four.
_RANDOM = {
    "ep2": ("alltoall", _SPREAD, 1, 12),
    "ep2-gathered": ("allgather", _SPREAD, 1, 12),
    "ep2-hybridep": ("flex", _SPREAD, 1, 12),
    "ep2-hybridep-budget": ("flex", _SPREAD, 1, 12),
    "ep4": ("alltoall", _SPREAD_4, 1, 9),
    "ep4-gathered": ("allgather", _SPREAD_4, 1, 6),
    "ep4-hybridep": ("flex", _SPREAD_4, 1, 6),
    "pp2-vpp2-ep2": ("alltoall", _INTERLEAVED, 4, 5),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, ("ep2", "ep2-gathered", "ep2-hybridep", "ep2-hybridep-budget")),
        (4, ("ep4", "ep4-gathered", "ep4-hybridep", "pp2-vpp2-ep2")),
    ],
)
def test_random_steps_with_too_little_room_are_equal_to_eager_training(
    run_cases: Callable[..., Any],
    make_config: Callable[..., Any],
    num_ranks: int,
    names: tuple[str, ...],
) -> None:
    """Loads go to all, some, one or one rank's experts: steps run again, no token is lost."""
    cases: dict[str, Any] = {}
    for name in names:
        dispatcher, pipeline, num_layers, num_steps = _RANDOM[name]
        num_experts = 2 * pipeline["expert_model_parallel_size"]
        experts = {**BIASED, "num_moe_experts": num_experts, "moe_router_topk": 2}
        of_name = case(
            make_config,
            {**experts, **_DISPATCHERS[dispatcher]},
            model={
                "num_layers": num_layers,
                "hidden_dropout": 0.0,  # both models draw from one generator
                "params_dtype": "bfloat16" if dispatcher == "flex" else "float32",
            },
            counts=(2,),
            pipeline=pipeline,
        )
        cases[name] = {**of_name, "probe": "dropless", "num_steps": num_steps}
        if name.endswith("budget"):
            cases[name]["budget"] = 0.8
    results = run_cases(cases, num_ranks, timeout_s=250.0)
    for name in names:
        check_random_steps(results[name], _RANDOM[name][-1])
