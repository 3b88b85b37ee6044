"""Megatron's own ``pretrain()`` on two GPUs, with and without the flag, to the last bit.

Further topologies, FP8 recipes and recomputation are those of ``chunkgraph train``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from commands import finished
from gpu_training import check_replays, train_on_gpus

from chunkgraph.megatron.features.experts.grouped_gemm import native_need

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"

MODEL = shlex.split(
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 "
    "--seq-length 128 --max-position-embeddings 128 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --micro-batch-size 2 "
    "--tokenizer-type NullTokenizer --vocab-size 511 --mock-data --num-workers 0 --lr 1e-3 "
    "--log-interval 1 --eval-iters 1 --eval-interval 2 --train-iters 5 --bf16 "
    "--transformer-impl transformer_engine --no-gradient-accumulation-fusion"
)
COUNTS = ["--step-batch-size-schedule", "0:8 2048:12 5120:16"]
EIGHT = ["--global-batch-size", "16"]
NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]
CHUNK = shlex.split(
    "--cuda-graph-impl local --cuda-graph-granularity chunk --cuda-graph-warmup-steps 1"
)

FP8_WEIGHTS = [
    *("--fp8-format", "hybrid", "--fp8-param-gather", "--use-distributed-optimizer", *NO_DROPOUT)
]

CASES = {
    "pp2-dropout-counts": ["--pipeline-model-parallel-size", "2", *COUNTS],
    "pp2-vpp2-whole-chunk": [
        *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
        *(*NO_DROPOUT, *EIGHT, "--cuda-graph-chunk-scope", "chunk"),
    ],
    "pp2-mla": [
        *("--pipeline-model-parallel-size", "2", "--multi-latent-attention", *NO_DROPOUT, *EIGHT),
        *("--kv-lora-rank", "32", "--qk-head-dim", "32", "--qk-pos-emb-head-dim", "16"),
        *("--v-head-dim", "32", "--rope-type", "rope", "--no-rope-fusion"),
    ],
    # The optimizer writes the FP8 weights, and gathers them with and without overlap.
    "dp2-fp8-weights-delayed": [
        *(*FP8_WEIGHTS, *COUNTS, "--fp8-recipe", "delayed"),
        *("--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max"),
        *("--overlap-grad-reduce", "--overlap-param-gather"),
    ],
    "dp2-fp8-weights-tensorwise": [*FP8_WEIGHTS, *COUNTS, "--fp8-recipe", "tensorwise"],
    "dp2-fp8-weights-blockwise": [
        *("--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--fp8-param-gather"),
        *(*NO_DROPOUT, "--use-distributed-optimizer", *COUNTS, "--cuda-graph-chunk-scope", "chunk"),
    ],
    # Room for all tokens from the start, so that Megatron's loop runs no step again.
    "ep2-hybridep": [
        *("--expert-model-parallel-size", "2", "--num-experts", "8", "--moe-router-topk", "2"),
        *("--moe-ffn-hidden-size", "384", "--moe-grouped-gemm", "--moe-router-dtype", "fp32"),
        *("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"),
        *("--moe-expert-rank-capacity-factor", "2", "--use-transformer-engine-op-fuser"),
        *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"),
        *(*NO_DROPOUT, *COUNTS, "--cuda-graph-chunk-scope", "chunk"),
        *("--cuda-graph-token-drops", "rerun"),
    ],
}
EXPERTS = [
    *("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "384"),
    *("--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"),
    *("--expert-model-parallel-size", "2", *NO_DROPOUT, *COUNTS),
]
TRANSFERS = [*EXPERTS, "--overlap-moe-expert-parallel-comm"]
FSDP = [
    *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
    *("--use-distributed-optimizer", "--ckpt-format", "fsdp_dtensor"),
    "--calculate-per-token-loss",
]
UNTIED = ["--untie-embeddings-and-output-weights"]
# Flags that training with graphs runs without, or that shard parameters.
RECIPES = {
    "ep2-overlapped-transfers-tied": TRANSFERS,
    "ep2-overlapped-transfers-delayed": [*TRANSFERS, *UNTIED, "--delay-wgrad-compute"],
    "ep2-offloading": [
        *(*EXPERTS, *UNTIED, "--fine-grained-activation-offloading", "--offload-modules"),
        *("expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear", "core_attn", "attn_proj"),
        *("--min-offloaded-tensor-size", "1"),
    ],
    "dp2-megatron-fsdp": [*FSDP, *NO_DROPOUT, *COUNTS],
    "dp2-megatron-fsdp-whole-chunk": [
        *(*FSDP, *NO_DROPOUT, *EIGHT, "--cuda-graph-chunk-scope", "chunk"),
    ],
    "ep2-megatron-fsdp": [*FSDP, *EXPERTS],
    "ep2-megatron-fsdp-overlapped-transfers": [
        *(*FSDP, *TRANSFERS, *UNTIED, "--delay-wgrad-compute"),
    ],
}
CASES |= RECIPES
CASES["ep2-hybridep-stash"] = [*CASES["ep2-hybridep"], "--cuda-graph-stash", "true"]
HYBRIDEP = ("ep2-hybridep", "ep2-hybridep-stash")


def _needs_connections(flags: list[str]) -> bool:
    return any("fsdp" in flag or "overlap-moe" in flag for flag in flags)


def _train(
    folder: Path, name: str, flags: list[str], num_processes: int = 2
) -> tuple[list[str], str]:
    return train_on_gpus(
        folder,
        name,
        [SCRIPT, *MODEL, *flags],
        num_processes,
        CUDA_DEVICE_MAX_CONNECTIONS="8" if _needs_connections(flags) else "1",
        # Megatron requires it next to offloading, so that weights stay on the GPU.
        NVTE_CPU_OFFLOAD_V1=str(int("--fine-grained-activation-offloading" in flags)),
        # Without it Megatron uses no fused grouped MLP.
        NVTE_CUTEDSL_FUSED_GROUPED_MLP="1",
    )


@pytest.mark.megatron
@pytest.mark.multigpu
@pytest.mark.timeout(360)
@pytest.mark.parametrize("case", CASES)
def test_pretrain_equals_the_run_without_the_flag(case: str, tmp_path: Path) -> None:
    _skip_without_packages(case)
    _compare(tmp_path, CASES[case], num_processes=2)


@pytest.mark.megatron
@pytest.mark.gpu
@pytest.mark.timeout(360)
@pytest.mark.parametrize("case", [*(n for n in CASES if n.startswith("dp2-fp8")), *HYBRIDEP])
def test_one_rank(case: str, tmp_path: Path) -> None:
    """FP8 weights, and HybridEP."""
    _skip_without_packages(case)
    alone = ["--expert-model-parallel-size", "1"] if case in HYBRIDEP else []
    _compare(tmp_path, [*CASES[case], *alone], num_processes=1)


def _skip_without_packages(case: str) -> None:
    for needed in ("transformer_engine", "megatron.training"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    if "megatron-fsdp" in case and importlib.util.find_spec("einops") is None:
        pytest.skip("Megatron-FSDP needs einops")
    if case in HYBRIDEP and importlib.util.find_spec("deep_ep") is None:
        pytest.skip("DeepEP is not installed")
    if case in HYBRIDEP and (need := native_need(torch.bfloat16)) is not None:
        pytest.skip(f"Megatron's fused experts: {need}")


def _compare(folder: Path, flags: list[str], num_processes: int) -> None:
    ours = ("--cuda-graph-chunk-scope", "chunk", "--cuda-graph-token-drops", "rerun")
    ours += ("--cuda-graph-stash", "true")
    plain = [f for f in flags if f not in ours]
    eager, _ = _train(folder, "eager", plain, num_processes)
    chunk, output = _train(folder, "chunk", [*flags, *CHUNK], num_processes)
    assert len(eager) == 5
    assert chunk == eager
    check_replays(output)


@pytest.mark.megatron
@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_the_host_waits_at_most_once_a_step(tmp_path: Path) -> None:
    """Megatron checks losses and gradients for NaN in these steps, and writes their numbers."""
    _skip_without_packages("")
    script = tmp_path / "waiting.py"
    script.write_text(_WAITING.format(script=str(SCRIPT)), encoding="utf-8")
    flags = [*MODEL, *EIGHT, "--train-iters", "9", "--log-interval", "100", *CHUNK]
    flags += ["--eval-iters", "0"]  # Megatron waits for the checks of each evaluated microbatch
    if importlib.util.find_spec("tensorboard") is not None:
        flags += ["--tensorboard-dir", str(tmp_path / "numbers")]
    done = finished(
        [sys.executable, "-m", "chunkgraph.launch", script, *flags],
        {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        },
        timeout_s=150.0,
        cwd=tmp_path,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-12000:]
    (num_waits,) = re.findall(r"waits in 3 steps: (\d+)", output)
    assert int(num_waits) <= 3, re.findall(r"waits? .*", output)


_WAITING = """
import runpy, traceback, warnings

import torch
from megatron.training import training

step, number, num_waits = training.train_step, 0, 0
synchronize = torch.cuda.Event.synchronize

def wait(event):
    global num_waits
    num_waits += not event.query()
    synchronize(event)

def count(message, *args, **kwargs):
    global num_waits
    if "called a synchronizing" in str(message):
        num_waits += 1
        print("wait at", traceback.format_stack(limit=8))

def train_step(*args, **kwargs):
    global number
    number += 1
    if number == 5:  # all graphs are captured
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
    if number == 8:
        torch.cuda.set_sync_debug_mode("default")
        print("waits in 3 steps:", num_waits)
    return step(*args, **kwargs)

torch.cuda.Event.synchronize, training.train_step = wait, train_step
runpy.run_path({script!r}, run_name="__main__")
"""
