"""Megatron's ``pretrain()`` on packed ``--sft`` data over two ranks, on GPUs.

With and without graphs, on the same offsets: kernels may depend on the longest document.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
from pathlib import Path

import pytest
from gpu_training import check_replays, train_on_gpus
from mamba_needs import missing_kernels

SUPPORT = Path(__file__).parents[1] / "support"
ROOT = SUPPORT.parents[1]
ROWS = 512  # cuDNN up to 9.15 captures attention over multiples of 128 tokens only

MODEL = [
    *("--num-layers", "2", "--hidden-size", "256", "--num-attention-heads", "4", "--bf16"),
    *("--seq-length", str(ROWS), "--max-position-embeddings", str(ROWS), "--micro-batch-size", "1"),
    *("--position-embedding-type", "rope", "--swiglu", "--normalization", "RMSNorm"),
    *("--disable-bias-linear", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--transformer-impl", "transformer_engine"),
    *("--sft", "--tokenizer-type", "NullTokenizer", "--vocab-size", "64", "--split", "100,0,0"),
    *("--num-workers", "0", "--lr", "1e-3", "--lr-decay-style", "constant", "--train-iters", "8"),
    *("--log-interval", "1", "--eval-iters", "0", "--eval-interval", "99"),
    *("--no-create-attention-mask-in-dataloader", "--global-batch-size", "8"),
    *("--calculate-per-token-loss", "--no-gradient-accumulation-fusion"),
]
CHUNK = ["--cuda-graph-granularity", "chunk", "--cuda-graph-max-packed-seqs", "8"]
LATENT = [
    *("--multi-latent-attention", "--q-lora-rank", "64", "--kv-lora-rank", "64"),
    *("--qk-head-dim", "32", "--qk-pos-emb-head-dim", "32", "--v-head-dim", "64"),
]
EXPERTS = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-expert-capacity-factor", "2.0", "--moe-pad-expert-input-to-capacity"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01"),
    *("--expert-model-parallel-size", "2"),
]
CASES = {
    "experts": EXPERTS,
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "cp2": ["--context-parallel-size", "2"],
    "cp-sizes": [
        *("--cuda-graph-cp-sizes", "1", "2"),
        *("--cuda-graph-max-packed-tokens", str(ROWS // 2)),
    ],
}
CASES["cp-sizes-mla"] = [*CASES["cp-sizes"], *LATENT]
CASES["cp-sizes-experts"] = [*CASES["cp-sizes"], *EXPERTS]
CASES["hybrid"] = [
    *("--hybrid-layer-pattern", "M-|*M", "--pipeline-model-parallel-size", "2"),
    *("--mamba-state-dim", "64", "--mamba-head-dim", "64", "--mamba-num-groups", "4"),
]


def _conversations(path: Path) -> None:
    """Draw conversations of two to five documents of up to half a sample."""
    generator = random.Random(5)
    lines = []
    for _ in range(80):
        messages = []
        for _ in range(generator.randint(2, 5)):
            numbers = [str(generator.randrange(62)) for _ in range(generator.randint(8, ROWS // 2))]
            messages.append({"role": "system", "content": " ".join(numbers[:4])})
            messages.append({"role": "assistant", "content": " ".join(numbers[4:])})
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines), encoding="utf-8")


def _train(
    folder: Path, name: str, flags: list[str], script: Path = ROOT / "scripts" / "pretrain_gpt.py"
) -> tuple[list[str], str]:
    data = ["--data-path", str(folder / "conversations.jsonl")]
    return train_on_gpus(
        folder, name, [SUPPORT / "sft_stand_ins.py", script, *MODEL, *data, *flags]
    )


@pytest.mark.megatron
@pytest.mark.multigpu
@pytest.mark.timeout(360)
@pytest.mark.parametrize("case", CASES)
def test_graphs_equal_eager_steps(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = {}
    if case == "hybrid":
        if missing := missing_kernels():
            pytest.skip(missing)
        monkeypatch.setenv("MAMBA_DETERMINISTIC", "1")
        script["script"] = SUPPORT / "pretrain_hybrid.py"
    for needed in ("transformer_engine", "megatron.training"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    _conversations(tmp_path / "conversations.jsonl")
    flags = [*CASES[case], *CHUNK, "--cuda-graph-warmup-steps"]
    eager, _ = _train(tmp_path, "eager", [*flags, "99"], **script)
    graphs, output = _train(tmp_path, "graphs", [*flags, "1"], **script)
    assert len(eager) == 8
    assert graphs == eager
    numbers = [float.fromhex(n) for line in graphs for n in re.findall(r"0x\S+p[+-]\d+", line)]
    assert len(numbers) == 3 * 8
    assert all(math.isfinite(n) for n in numbers)
    assert "nan" not in "".join(graphs)
    check_replays(output)
