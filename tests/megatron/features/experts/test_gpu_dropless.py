"""Experts that take all tokens on real GPUs equal eager training in every run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_cases import check_random_steps
from gpu_training import check_rounding, trained_report

from chunkgraph.megatron.features.experts.dropless_rows import DeviceSplits
from chunkgraph.megatron.features.experts.grouped_gemm import (
    GroupedGemm,
    NativeGemm,
    add_biases,
    grouped_linear,
    native_need,
)

CONFIG = Path(__file__).resolve().parents[4] / "configs" / "bench" / "moe_ep1_dropless.yaml"
SMALL = [
    *("model.num_layers=4", "model.hidden_size=1024", "model.ffn_hidden_size=2048"),
    *("moe.num_moe_experts=8", "moe.moe_router_topk=2", "moe.moe_ffn_hidden_size=512"),
    *("model.seq_length=512", "train.num_microbatches=[4,1,2,7]", "train.deterministic=true"),
]
BIASED = [
    "model.transformer_config.moe_layer_freq=[0,1,1,1]",
    "model.transformer_config.moe_shared_expert_intermediate_size=512",
]
EP2 = ["pipeline.data_parallel_size=2", "pipeline.expert_model_parallel_size=2"]
EP4 = ["pipeline.data_parallel_size=4", "pipeline.expert_model_parallel_size=4"]
PP2 = ["pipeline.pipeline_model_parallel_size=2"]
VPP2 = [
    "pipeline.virtual_pipeline_model_parallel_size=2",
    "train.num_microbatches=[4,2,6,8]",
]
GATHERED = ["moe.moe_token_dispatcher_type=allgather"]

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]


def _train(settings: list[str], tmp_path: Path) -> dict[str, Any]:
    return trained_report([CONFIG, *SMALL, *settings], tmp_path / "report.json")


def _check(results: dict[str, Any]) -> None:
    """Check replays up to rounding: Megatron's eager experts have other kernels."""
    check_rounding(results)
    assert results["dropped_tokens"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("more", [[], ["train.use_distributed_optimizer=true"]])
def test_replays_have_the_bits_of_eager_passes_with_the_same_products(
    more: list[str], tmp_path: Path
) -> None:
    """`verify` ends the run if a bit differs."""
    _check(_train([*BIASED, *more, "capture.verify=shadow"], tmp_path))


_COUNTS = [2, 1, 3, 1, 2, 2, 4, 1, 3, 2, 1, 2]
_MANY = {"moe_ffn_hidden_size": 256, "moe_grouped_gemm": True}
_SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_SEQ_LOSS = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-3}
_SHARED = {"moe_shared_expert_intermediate_size": 256}
_UNBIASED = {"add_bias_linear": False}
_LATENT = {
    "multi_latent_attention": True,
    # Megatron's fused kernel works in place and does not repeat its bits with 4 heads a block,
    # which it chooses by time: one eager run of nine differed from the next one.
    "apply_rope_fusion": False,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
}
_RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax-8-top2": ({"num_moe_experts": 8, "moe_router_topk": 2}, {}),
    "sigmoid-16-top4": ({"num_moe_experts": 16, "moe_router_topk": 4, **_SIGMOID, **_SHARED}, {}),
    "gathered-32-top8": (
        {"num_moe_experts": 32, "moe_router_topk": 8, "moe_token_dispatcher_type": "allgather"},
        {},
    ),
    "overlapped-8-top2": (
        {"num_moe_experts": 8, "moe_router_topk": 2, **_SHARED},
        {"moe_shared_expert_overlap": True, **_UNBIASED},
    ),
    "latent-32-top8": (
        {"num_moe_experts": 32, "moe_router_topk": 8, **_SIGMOID, **_SEQ_LOSS, **_SHARED},
        _LATENT,
    ),
    "predicting-8-top2": (
        {"num_moe_experts": 8, "moe_router_topk": 2, **_SEQ_LOSS},
        {"mtp_num_layers": 1},
    ),
    "fused-permutation-8-top2": (
        {"num_moe_experts": 8, "moe_router_topk": 2},
        {"moe_permute_fusion": True},
    ),
    "recomputed-8-top2": (
        {"num_moe_experts": 8, "moe_router_topk": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    ),
}
_MODEL = {"num_layers": 4, "normalization": "RMSNorm", "swiglu": True}
_ON_A_GPU = {
    **_MODEL,
    "layer_spec": "transformer_engine",
    "params_dtype": "bfloat16",
    "hidden_size": 1024,
    "ffn_hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 256,
}


def _check_against_both(result: dict[str, Any]) -> None:
    """Check bits against eager training with the same products, and rounding against Megatron's."""
    assert result["different_parameters"] == {}
    assert result["dropped_tokens"] == 0
    for step, (loss, grad_norm) in zip(result["steps"], result["unmodified"], strict=True):
        assert step["different"] == [], step
        assert step["loss"] == pytest.approx(loss, rel=1e-3)
        assert step["grad_norm"] == pytest.approx(grad_norm, rel=2e-2)
    assert all(step["replays"] for step in result["steps"][1:])


@pytest.mark.gpu
@pytest.mark.parametrize("name", _RECIPES)
def test_recipes_equal_eager_training_with_the_same_products(
    run_cases: Callable[..., Any], make_config: Callable[..., Any], name: str
) -> None:
    """Twelve steps of each recipe, also within rounding of unmodified eager training."""
    experts, options = _RECIPES[name]
    config = make_config(
        model=_ON_A_GPU,
        moe={**_MANY, **experts},
        train={"num_microbatches": _COUNTS, "deterministic": True, "lr": 2e-5},
        capture={"scope": "chunk"},
    )
    case = {"config": {**config, "device": "cuda"}, "transformer_options": options}
    results = run_cases({name: {**case, "probe": "kernels"}}, 1, timeout_s=250.0)
    _check_against_both(results[name])


@pytest.mark.multigpu(4)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([*EP4, *BIASED], id="ep4-alltoall"),
        pytest.param([*EP4, *BIASED, *GATHERED], id="ep4-allgather"),
        pytest.param([*PP2, *EP2, *BIASED], id="pp2-ep2"),
        pytest.param([*PP2, *VPP2, *EP2, *BIASED], id="pp2-vpp2-ep2"),
    ],
)
def test_four_gpus(settings: list[str], tmp_path: Path) -> None:
    """`verify` ends the run if a bit differs."""
    _check(_train([*settings, "capture.verify=shadow"], tmp_path))


_SPREAD = {"data_parallel_size": 2, "expert_model_parallel_size": 2}
# Sizes of the pipeline, steps. The kinds of loads repeat every four steps.
_RANDOM: dict[str, tuple[dict[str, int], int]] = {
    "ep2": (_SPREAD, 24),
    "ep4": ({"data_parallel_size": 4, "expert_model_parallel_size": 4}, 16),
    "pp2-vpp2-ep2": (
        {
            **_SPREAD,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
        },
        12,
    ),
}


def _random_steps(
    run_cases: Callable[..., Any],
    make_config: Callable[..., Any],
    dispatcher: str,
    pipeline: dict[str, int],
    num_steps: int,
    moe: dict[str, Any],
    budget: float | None = None,
    **sections: Any,
) -> None:
    config = make_config(
        model={**_ON_A_GPU, "hidden_dropout": 0.0},  # both models draw from one generator
        moe={
            **_MANY,
            **_SIGMOID,
            **moe,
            "num_moe_experts": 8,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": dispatcher,
        },
        train={"num_microbatches": [2], "deterministic": True},
        pipeline=pipeline,
        **sections,
    )
    case = {"config": {**config, "device": "cuda"}, "probe": "dropless", "num_steps": num_steps}
    if budget is not None:
        case["budget"] = budget
    num_ranks = pipeline["data_parallel_size"] * pipeline.get("pipeline_model_parallel_size", 1)
    ranks = run_cases({"random": case}, num_ranks, timeout_s=280.0)["random"]
    check_random_steps(ranks, num_steps)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ep2", marks=pytest.mark.multigpu),
        pytest.param("ep4", marks=pytest.mark.multigpu(4)),
        pytest.param("pp2-vpp2-ep2", marks=pytest.mark.multigpu(4)),
    ],
)
def test_random_steps_with_too_little_room_equal_eager_training(
    run_cases: Callable[..., Any], make_config: Callable[..., Any], name: str, dispatcher: str
) -> None:
    """Loads go to all, some, one or one rank's experts: steps run again, no token is lost."""
    _random_steps(run_cases, make_config, dispatcher, *_RANDOM[name], moe=_SEQ_LOSS)


@pytest.mark.multigpu
@pytest.mark.skipif(
    importlib.util.find_spec("deep_ep") is None, reason="DeepEP's hybrid-ep is not installed"
)
@pytest.mark.parametrize("stash", [False, True], ids=["no-stash", "stash"])
@pytest.mark.parametrize("budget", [None, 0.8], ids=["measured", "budget"])
def test_random_steps_through_hybrid_ep_equal_eager_training(
    run_cases: Callable[..., Any], make_config: Callable[..., Any], budget: float, stash: bool
) -> None:
    """``shadow`` compares the bits of every replay with an eager pass of the same products."""
    _random_steps(
        run_cases,
        make_config,
        "flex",
        _SPREAD,
        12,
        moe={},
        budget=budget,
        capture={"verify": "shadow"},
        stash={"enabled": stash},
        run={"timeout_s": 200.0},
    )


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        pytest.param("tensorwise", [], marks=pytest.mark.gpu, id="tensorwise"),
        pytest.param("blockwise", [], marks=pytest.mark.gpu, id="blockwise"),
        pytest.param("tensorwise", EP2, marks=pytest.mark.multigpu, id="ep2"),
    ],
)
def test_quantized_experts_equal_eager(recipe: str, settings: list[str], tmp_path: Path) -> None:
    """Needs Transformer Engine's grouped GEMM; eager passes pad rows on the host."""
    if (need := native_need(torch.bfloat16, recipe)) is not None:
        pytest.skip(need)
    quantized = ["model.fp8=hybrid", f"model.fp8_recipe={recipe}"]
    _check(_train([*BIASED, *quantized, *settings], tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_products_equal_a_loop_whatever_the_ends(is_native: bool, dtype: torch.dtype) -> None:
    """One capture; experts without rows get zero gradients instead of old memory."""
    if is_native and (need := native_need(dtype)) is not None:
        pytest.skip(need)
    if not is_native and dtype is torch.float16:
        pytest.skip("torch._grouped_mm multiplies bfloat16")
    gemm: GroupedGemm = NativeGemm() if is_native else GroupedGemm()
    torch.manual_seed(1)
    device = torch.device("cuda")
    rows = torch.randn(512, 128, device=device, dtype=dtype, requires_grad=True)
    grads = torch.randn(512, 64, device=device, dtype=dtype)
    weights = [
        torch.randn(64, 128, device=device, dtype=dtype, requires_grad=True) for _ in range(4)
    ]
    biases = [torch.randn(64, device=device, dtype=dtype, requires_grad=True) for _ in range(4)]
    ends = torch.tensor([100, 200, 300, 512], device=device, dtype=torch.int32)

    def run() -> tuple[torch.Tensor, ...]:
        splits = DeviceSplits(ends)
        out = grouped_linear(gemm, rows, splits, weights)
        out = out + add_biases(gemm, rows.shape[0], splits, biases)
        return out.detach(), *torch.autograd.grad(out, [rows, *weights, *biases], grads)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensors = run()
    for numbers in ([0, 0, 512, 512], [17, 17, 300, 411], [0, 0, 0, 0]):
        ends.copy_(torch.tensor(numbers))
        for tensor in tensors:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        begin = 0
        for index, end in enumerate(numbers):
            of_expert, of_rows = grads[begin:end], rows[begin:end].detach()
            weight, bias = weights[index].detach(), biases[index].detach()
            pairs = [
                (tensors[0][begin:end], of_rows @ weight.t() + bias),
                (tensors[1][begin:end], of_expert @ weight),
                (tensors[2 + index], of_expert.t() @ of_rows),
                (tensors[6 + index], of_expert.sum(0)),
            ]
            for result, expected in pairs:
                assert torch.allclose(result, expected, rtol=2e-2, atol=0.25)
            begin = end
