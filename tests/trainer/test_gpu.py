"""`chunkgraph train` on real GPUs: NCCL, Transformer Engine, bfloat16; equal to eager."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "gpu" / "gpt_pp2_gpu.yaml"
SMALL = ["model.num_layers=8", "model.hidden_size=512", "model.ffn_hidden_size=1024"]
DROPOUT = ["model.hidden_dropout=0.1"]
FULL_RECOMPUTE = [
    "model.recompute_granularity=full",
]
ONE = pytest.mark.gpu
TWO = pytest.mark.multigpu
FOUR = pytest.mark.multigpu(4)


PP1 = ["pipeline.pipeline_model_parallel_size=1"]
PP4 = ["pipeline.pipeline_model_parallel_size=4"]
TENSORWISE = ["model.fp8=hybrid", "model.fp8_recipe=tensorwise"]
DELAYED = ["model.fp8=hybrid", "model.fp8_recipe=delayed"]
TP2_SEQUENCE = [
    "pipeline.tensor_model_parallel_size=2",
    "pipeline.sequence_parallel=true",
]
CP2 = ["pipeline.context_parallel_size=2"]
ZB = ["pipeline.schedule=zb-h1"]
ZB_VPP2 = [
    "pipeline.virtual_pipeline_model_parallel_size=2",
    "pipeline.schedule=interleaved-zb",
]
TIED = ["model.untie_embeddings_and_output_weights=false"]
PACKED = [
    *("packing.max_packed_seqs=8", "packing.max_packed_tokens=1024"),
    *("packing.buckets=[0.5]", "packing.seq_buckets=[4]"),
]
DROPLESS = [
    *("moe.num_moe_experts=8", "moe.moe_router_topk=2", "moe.moe_ffn_hidden_size=256"),
    "moe.moe_token_dispatcher_type=alltoall",
]
OVERLAPPED = [
    "train.overlap_grad_reduce=true",
    "train.use_distributed_optimizer=true",
]


@pytest.mark.megatron
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        pytest.param(["pipeline.pipeline_model_parallel_size=1"], [3, 1, 5], marks=ONE, id="pp1"),
        pytest.param([], [4, 1, 2, 7], marks=TWO, id="pp2"),
        pytest.param(
            [
                "pipeline.pipeline_model_parallel_size=1",
                "pipeline.data_parallel_size=2",
                *OVERLAPPED,
                "capture.scope=chunk",
            ],
            [2, 5, 3],
            marks=TWO,
            id="dp2-parameters-gathered-in-the-forward",
        ),
        pytest.param(
            ["pipeline.pipeline_model_parallel_size=1", "capture.scope=block"],
            [3, 1, 5],
            marks=ONE,
            id="pp1-block",
        ),
        pytest.param(
            [
                "pipeline.virtual_pipeline_model_parallel_size=2",
                "model.untie_embeddings_and_output_weights=false",
                "model.hidden_dropout=0.1",
                "train.overlap_grad_reduce=true",
                "capture.scope=chunk",
                "capture.verify=poison",
            ],
            [4, 2, 12, 6],
            marks=TWO,
            id="pp2-vpp2-whole-chunk-tied-overlap-poison",
        ),
        pytest.param(
            [*PP1, *FULL_RECOMPUTE, "capture.scope=chunk", "capture.verify=shadow"],
            [3, 1, 5],
            marks=ONE,
            id="pp1-recompute-whole-chunk-shadow",
        ),
        pytest.param(
            [*PP1, *TP2_SEQUENCE, *FULL_RECOMPUTE],
            [2, 5, 3],
            marks=TWO,
            id="tp2-sequence-full-recompute",
        ),
        pytest.param(
            [
                *FULL_RECOMPUTE,
                "capture.scope=chunk",
                "train.overlap_grad_reduce=true",
                "train.gradient_accumulation_fusion=true",
                "capture.verify=poison",
            ],
            [2, 5, 3],
            marks=TWO,
            id="pp2-full-recompute-overlap-fused-poison",
        ),
        pytest.param(
            [
                "model.recompute_granularity=selective",
                "model.recompute_modules=[core_attn,mlp]",
                "model.swiglu=true",
                "model.hidden_dropout=0.1",
            ],
            [2, 5, 3],
            marks=TWO,
            id="pp2-selective-recompute-dropout",
        ),
        pytest.param([*PP1, *TENSORWISE], [3, 1, 5], marks=ONE, id="pp1-fp8-tensorwise"),
        pytest.param(
            [*PP1, "model.fp8=e4m3", "model.fp8_recipe=blockwise", "capture.scope=chunk"],
            [3, 1, 5],
            marks=ONE,
            id="pp1-fp8-blockwise-whole-chunk",
        ),
        pytest.param(
            [*PP1, *DELAYED, "capture.verify=shadow", "capture.scope=chunk"],
            [3, 1, 5],
            marks=ONE,
            id="pp1-fp8-delayed-whole-chunk-shadow",
        ),
        pytest.param(
            [*PP1, *DELAYED, "model.recompute_granularity=selective", "model.hidden_dropout=0.1"],
            [3, 1, 5],
            marks=ONE,
            id="pp1-fp8-delayed-recomputed-core-attention",
        ),
        pytest.param(
            [*TENSORWISE, "train.gradient_accumulation_fusion=true", "capture.verify=poison"],
            [4, 1, 2, 7],
            marks=TWO,
            id="pp2-fp8-tensorwise-fused-poison",
        ),
        pytest.param(
            [
                *DELAYED,
                "pipeline.virtual_pipeline_model_parallel_size=2",
                "capture.scope=chunk",
                "capture.verify=poison",
            ],
            [4, 2, 12, 6],
            marks=TWO,
            id="pp2-vpp2-fp8-delayed-whole-chunk-poison",
        ),
        pytest.param(
            [*PP1, *TP2_SEQUENCE, *TENSORWISE], [2, 5, 3], marks=TWO, id="tp2-sequence-fp8"
        ),
        pytest.param(
            [*PP1, *TP2_SEQUENCE, "capture.scope=chunk", "model.hidden_dropout=0.1"],
            [2, 5, 3],
            marks=TWO,
            id="tp2-sequence-whole-chunk-dropout",
        ),
        pytest.param([*TP2_SEQUENCE], [2, 5, 3], marks=FOUR, id="pp2-tp2-sequence"),
        pytest.param(
            [*PP1, *CP2, "capture.scope=chunk", "train.overlap_grad_reduce=true"],
            [2, 5, 3],
            marks=TWO,
            id="cp2-whole-chunk-overlap",
        ),
        pytest.param([*CP2], [4, 1, 2, 7], marks=FOUR, id="pp2-cp2"),
        pytest.param(
            [
                *PP4,
                "pipeline.virtual_pipeline_model_parallel_size=2",
                "train.overlap_grad_reduce=true",
                "capture.verify=poison",
            ],
            [4, 12, 8],
            marks=FOUR,
            id="pp4-vpp2-overlap-poison",
        ),
        pytest.param(
            [
                "pipeline.data_parallel_size=2",
                *OVERLAPPED,
                "capture.scope=chunk",
            ],
            [4, 1, 2, 7],
            marks=FOUR,
            id="pp2-dp2-distributed-optimizer-overlap",
        ),
        pytest.param(
            [
                *ZB,
                "train.gradient_accumulation_fusion=true",
                "train.overlap_grad_reduce=true",
                "capture.scope=chunk",
                "capture.verify=poison",
            ],
            [4, 1, 2, 7],
            marks=TWO,
            id="pp2-zb-fused-overlap-whole-chunk-poison",
        ),
        pytest.param(
            [*ZB, *FULL_RECOMPUTE],
            [2, 5, 3],
            marks=TWO,
            id="pp2-zb-full-recompute",
        ),
        pytest.param([*ZB, *TENSORWISE], [4, 1, 2, 7], marks=TWO, id="pp2-zb-fp8-tensorwise"),
        pytest.param([*ZB, *DELAYED], [4, 1, 2, 7], marks=TWO, id="pp2-zb-fp8-delayed"),
        pytest.param(
            [*ZB_VPP2, "train.gradient_accumulation_fusion=true", "capture.scope=chunk"],
            [4, 2, 12, 6],
            marks=TWO,
            id="pp2-vpp2-zb-fused-whole-chunk",
        ),
        pytest.param([*ZB, *TIED, *DROPOUT], [4, 1, 2, 7], marks=TWO, id="pp2-zb-tied-dropout"),
        pytest.param([*ZB, *PACKED], [4, 1, 2, 7], marks=TWO, id="pp2-zb-packed"),
        pytest.param([*ZB, *DROPLESS], [4, 1, 2, 7], marks=TWO, id="pp2-zb-dropless-experts"),
        pytest.param(
            [
                *ZB,
                *DROPLESS,
                "pipeline.data_parallel_size=2",
                "pipeline.expert_model_parallel_size=2",
            ],
            [4, 1, 2, 7],
            marks=FOUR,
            id="pp2-ep2-zb-dropless-experts",
        ),
        pytest.param([*ZB, *TP2_SEQUENCE], [4, 1, 2, 7], marks=FOUR, id="pp2-tp2-zb-sequence"),
        pytest.param(
            [*ZB, *PP4, "train.overlap_grad_reduce=true", "capture.verify=poison"],
            [8, 3, 4, 13],
            marks=FOUR,
            id="pp4-zb-overlap-poison",
        ),
        pytest.param([*ZB_VPP2, *PP4], [4, 12, 8], marks=FOUR, id="pp4-vpp2-zb"),
    ],
)
def test_training_on_gpus_equals_eager(
    settings: list[str], counts: list[int], tmp_path: Path
) -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed")
    table = tmp_path / "table.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "chunkgraph.cli", "train", CONFIG, *SMALL, *settings),
            *(f"train.num_microbatches={counts}", "--json", table, "--debug"),
        ],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads(table.read_text())
    assert all(s["loss_equal"] and s["grad_norm_equal"] for s in results["steps"])
    assert results["parameters_equal"]
    assert results["captures_after_first_session"] == 0
    assert [bool(s["replays"]) for s in results["steps"]] == [False] + [True] * (len(counts) - 1)
    assert results["steps"][0]["fallbacks"] == {"capture warmup": 1}
