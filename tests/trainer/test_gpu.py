"""`chunkgraph train` on real GPUs: NCCL, Transformer Engine, bfloat16; equal to eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_training import trained_report
from training_needs import NEEDS_ENGINE

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "gpu" / "gpt_pp2_gpu.yaml"
SMALL = ["model.num_layers=8", "model.hidden_size=512", "model.ffn_hidden_size=1024"]
HIDDEN_DROPOUT = "model.transformer_config.hidden_dropout=0.1"
DROPOUT = [HIDDEN_DROPOUT, "model.transformer_config.attention_dropout=0.1"]
FULL_RECOMPUTE = ["model.recompute_granularity=full"]
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
    "model.transformer_config.moe_router_dtype=fp32",
]
OVERLAPPED = [
    "train.overlap_grad_reduce=true",
    "train.use_distributed_optimizer=true",
    "train.overlap_param_gather=true",
]
VPP2 = ["pipeline.virtual_pipeline_model_parallel_size=2"]
DP2 = "pipeline.data_parallel_size=2"
CHUNK, POISON, SHADOW = "capture.scope=chunk", "capture.verify=poison", "capture.verify=shadow"
OVERLAP, FUSED = "train.overlap_grad_reduce=true", "train.gradient_accumulation_fusion=true"


def case(name: str, mark: Any, counts: list[int], *settings: str) -> Any:
    """Return a case with these counts of microbatches and other settings."""
    return pytest.param([*settings], counts, marks=mark, id=name)


@pytest.mark.megatron
@NEEDS_ENGINE
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        case("pp1", ONE, [3, 1, 5], *PP1),
        case("pp2", TWO, [4, 1, 2, 7]),
        case(
            "dp2-parameters-gathered-in-the-forward", TWO, [2, 5, 3], *PP1, DP2, *OVERLAPPED, CHUNK
        ),
        case("pp1-block", ONE, [3, 1, 5], *PP1, "capture.scope=block"),
        case(
            "pp2-vpp2-whole-chunk-tied-overlap-poison",
            TWO,
            [4, 2, 12, 6],
            *VPP2,
            "model.untie_embeddings_and_output_weights=false",
            HIDDEN_DROPOUT,
            OVERLAP,
            CHUNK,
            POISON,
        ),
        case(
            "pp1-block-recompute-whole-chunk-shadow",
            ONE,
            [3, 1, 5],
            *PP1,
            *FULL_RECOMPUTE,
            CHUNK,
            SHADOW,
            "model.transformer_config.recompute_method=block",
            "model.transformer_config.recompute_num_layers=3",
        ),
        case("tp2-sequence-full-recompute", TWO, [2, 5, 3], *PP1, *TP2_SEQUENCE, *FULL_RECOMPUTE),
        case("pp1-fp8-tensorwise", ONE, [3, 1, 5], *PP1, *TENSORWISE),
        case(
            "pp1-fp8-blockwise-whole-chunk",
            ONE,
            [3, 1, 5],
            *PP1,
            "model.fp8=e4m3",
            "model.fp8_recipe=blockwise",
            CHUNK,
        ),
        case(
            "pp1-fp8-delayed-recomputed-core-attention",
            ONE,
            [3, 1, 5],
            *PP1,
            *DELAYED,
            "model.recompute_granularity=selective",
            HIDDEN_DROPOUT,
        ),
        case("pp2-fp8-tensorwise-fused-poison", TWO, [4, 1, 2, 7], *TENSORWISE, FUSED, POISON),
        case(
            "pp2-vpp2-fp8-delayed-whole-chunk-poison",
            TWO,
            [4, 2, 12, 6],
            *DELAYED,
            *VPP2,
            CHUNK,
            POISON,
        ),
        case("pp2-tp2-sequence", FOUR, [2, 5, 3], *TP2_SEQUENCE),
        case("cp2-whole-chunk-overlap", TWO, [2, 5, 3], *PP1, *CP2, CHUNK, OVERLAP),
        case(
            "pp2-zb-fused-overlap-whole-chunk-poison",
            TWO,
            [4, 1, 2, 7],
            *ZB,
            FUSED,
            OVERLAP,
            CHUNK,
            POISON,
        ),
        case("pp2-zb-full-recompute", TWO, [2, 5, 3], *ZB, *FULL_RECOMPUTE),
        case("pp2-zb-fp8-delayed", TWO, [4, 1, 2, 7], *ZB, *DELAYED),
        case("pp2-vpp2-zb-fused-whole-chunk", TWO, [4, 2, 12, 6], *ZB_VPP2, FUSED, CHUNK),
        case("pp2-zb-tied-dropout", TWO, [4, 1, 2, 7], *ZB, *TIED, *DROPOUT),
        case("pp2-zb-packed", TWO, [4, 1, 2, 7], *ZB, *PACKED),
        case(
            "pp2-ep2-zb-dropless-experts",
            FOUR,
            [4, 1, 2, 7],
            *ZB,
            *DROPLESS,
            DP2,
            "pipeline.expert_model_parallel_size=2",
        ),
        case("pp2-tp2-zb-sequence", FOUR, [4, 1, 2, 7], *ZB, *TP2_SEQUENCE),
        case("pp4-zb-overlap-poison", FOUR, [8, 3, 4, 13], *ZB, *PP4, OVERLAP, POISON),
    ],
)
def test_training_on_gpus_equals_eager(
    settings: list[str], counts: list[int], tmp_path: Path
) -> None:
    arguments = [CONFIG, *SMALL, *settings, f"train.num_microbatches={counts}", "--debug"]
    results = trained_report(arguments, tmp_path / "table.json", is_equal=True, timeout_s=380.0)
    assert all(s["different"] == [] for s in results["steps"])
    assert results["different_parameters"] == {}
    assert results["captures_after_first_session"] == 0
    assert [bool(s["replays"]) for s in results["steps"]] == [False] + [True] * (len(counts) - 1)
    assert results["steps"][0]["fallbacks"] == {"capture warmup": 1}


@pytest.mark.megatron
@NEEDS_ENGINE
@FOUR
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "settings", [DROPOUT, DELAYED, TENSORWISE], ids=["", "delayed", "tensorwise"]
)
def test_paged_slots_equal_eager(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two slots or three, of about 31 MiB each, where the first ranks need three or four."""
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")  # slots lie in arenas
    counts = "train.num_microbatches=[8, 3, 4, 13]"
    arguments = [
        CONFIG,
        *SMALL,
        *PP4,
        *settings,
        counts,
        "capture.max_slot_memory=80MiB",
        "--debug",
    ]
    results = trained_report(arguments, tmp_path / "table.json", is_equal=True, timeout_s=380.0)
    assert all(s["different"] == [] for s in results["steps"])
    assert results["different_parameters"] == {}
    assert [bool(s["replays"]) for s in results["steps"]] == [False, True, True, True]
    assert max(n for slots in results["slots_per_chunk"] for n in slots) < 4
