"""How experts in graphs differ from Megatron's eager experts: kernels, last bits, and training.

    python benchmarks/expert_rounding.py --json expert_rounding.json

Graphs compute experts with one grouped GEMM (`grouped_gemm`), eager Megatron with one GEMM for each
expert. The first table compares the three products of a layer: kernels, time, and share of values
that differ. The second one trains recipes for 12 steps. It compares losses and gradient
norms of graphs with those of the unmodified recipe, both with deterministic kernels, and those of
two runs of the unmodified recipe without them: the noise between runs.
Needs one GPU and the extras `megatron` and `te`; takes about four minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformer_engine.pytorch import GroupedLinear

from chunkgraph.megatron.core.access import versions
from chunkgraph.megatron.features.experts.dropless_rows import DeviceSplits
from chunkgraph.megatron.features.experts.grouped_gemm import (
    GroupedGemm,
    NativeGemm,
    lay_together,
    native_need,
)

_CONFIG = Path(__file__).parents[1] / "configs" / "bench" / "moe_ep1_dropless.yaml"
_SMALL = [
    *("model.num_layers=4", "model.hidden_size=1024", "model.ffn_hidden_size=2048"),
    *("model.seq_length=256", "moe.moe_ffn_hidden_size=256", "train.lr=2.0e-05"),
    "train.num_microbatches=[2,1,3,1,2,2,4,1,3,2,1,2]",
]
_SHARED = ["model.transformer_config.moe_shared_expert_intermediate_size=256"]
_RECIPES = {
    "softmax-8-top2": ["moe.num_moe_experts=8", "moe.moe_router_topk=2"],
    "shared-16-top4": ["moe.num_moe_experts=16", "moe.moe_router_topk=4", *_SHARED],
    "32-top8": ["moe.num_moe_experts=32", "moe.moe_router_topk=8"],
}
_SHAPES = (
    (32, 4096, 2048, 1536),
    (32, 16384, 2048, 1536),
    (32, 16384, 768, 2048),
    (8, 8192, 4096, 14336),
    (64, 4000, 2048, 2816),
)
"""Experts, rows, hidden size and width."""


def main() -> int:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    parser.add_argument(
        "--recipes", nargs="+", choices=_RECIPES, default=list(_RECIPES), help="(default: all)"
    )
    args = parser.parse_args()
    products = _products()
    for name, product in products.items():
        sys.stdout.write(f"{name}\n" + "".join(f"  {k}: {v}\n" for k, v in product.items()))
    recipes = {name: _recipe(_RECIPES[name]) for name in args.recipes}
    sys.stdout.write(f"{'largest relative difference':28}{'loss':>12}{'gradient norm':>16}\n")
    for name, differences in recipes.items():
        for what, (loss, grad_norm) in differences.items():
            sys.stdout.write(f"{name}\n  {what:26}{loss:12.2e}{grad_norm:16.2e}\n")
    document = {
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "command": " ".join(sys.argv),
        "products": products,
        "recipes": recipes,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _products() -> dict[str, dict[str, Any]]:
    """Compare the products of layers of experts."""
    gemms: dict[str, GroupedGemm] = {"torch._grouped_mm": GroupedGemm()}
    if native_need(torch.bfloat16) is None:
        gemms["Transformer Engine's grouped GEMM"] = NativeGemm()
    return {
        f"{num_experts} experts, {num_rows:,} rows, {hidden} x {width}": _compare(
            gemms, num_experts, num_rows, hidden, width
        )
        for num_experts, num_rows, hidden, width in _SHAPES
    }


def _compare(
    gemms: Mapping[str, GroupedGemm], num_experts: int, num_rows: int, hidden: int, width: int
) -> dict[str, Any]:
    """Compare eager products with grouped ones; loads differ, one expert has no rows."""
    torch.manual_seed(1)
    numbers = (torch.rand(num_experts).softmax(0) * num_rows).int()
    numbers[3] = 0
    numbers[-1] += num_rows - numbers.sum()
    ends = numbers.cumsum(0).int().cuda()
    rows = torch.randn(num_rows, hidden, device="cuda", dtype=torch.bfloat16)
    grads = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
    layer = GroupedLinear(num_experts, hidden, width, bias=False, params_dtype=torch.bfloat16)
    weights = [getattr(layer, f"weight{i}") for i in range(num_experts)]
    lay_together(weights)
    inputs, m_splits = rows.clone().requires_grad_(), numbers.tolist()

    def eager() -> list[torch.Tensor]:
        out = layer(inputs, m_splits)
        return [out, *torch.autograd.grad(out, [inputs, *weights], grads)]

    def grouped(gemm: GroupedGemm) -> list[torch.Tensor]:
        splits = DeviceSplits(ends)
        with torch.no_grad():
            return [
                gemm.rows(rows, weights, splits),
                gemm.row_grads(grads, weights, splits),
                *gemm.outer(grads, rows, splits),
            ]

    results = {"eager (one GEMM for each expert)": {"ms": _ms(eager), "kernels": _kernels(eager)}}
    expected = eager()
    for name, gemm in gemms.items():
        work = partial(grouped, gemm)
        results[name] = {
            "ms": _ms(work),
            "kernels": _kernels(work),
            "share of values that differ from eager": _shares(expected, work()),
        }
    return results


def _shares(expected: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return the share of different values among outputs, input and weight gradients."""
    parts = {
        "outputs": slice(0, 1),
        "input gradients": slice(1, 2),
        "weight gradients": slice(2, None),
    }
    return {
        name: (torch.stack(expected[part]) != torch.stack(values[part])).float().mean().item()
        for name, part in parts.items()
    }


def _ms(work: Callable[[], object]) -> float:
    """Return the device time of ``work`` in a graph's replay if it can be captured, else eager."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        run: Callable[[], object] = graph.replay
    except (RuntimeError, ValueError):
        run = work
    for _ in range(3):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        run()
    end.record()
    end.synchronize()
    return round(begin.elapsed_time(end) / 20, 4)


def _kernels(work: Callable[[], object]) -> list[str]:
    """Return names and numbers of the matrix kernels that ``work`` launches."""
    with torch.profiler.profile() as profile:
        work()
        torch.cuda.synchronize()
    return [
        f"{event.count} x {event.key[:100]}"
        for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and any(word in event.key.lower() for word in ("gemm", "nvjet", "cutlass", "xmma"))
    ]


def _recipe(settings: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the largest relative differences of losses and gradient norms of 12 steps."""
    same = _train([*settings, "train.deterministic=true"])
    runs = [_train([*settings, "train.deterministic=false"]) for _ in range(2)]
    return {
        "graphs, deterministic": _difference(same, "chunk", same, "eager"),
        "unmodified, two runs": _difference(runs[0], "eager", runs[1], "eager"),
        "graphs, other run": _difference(runs[0], "chunk", runs[1], "eager"),
    }


def _train(settings: Sequence[str]) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "chunkgraph.cli", "train", str(_CONFIG), *_SMALL),
                *(*settings, "--json", str(report)),
            ],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        if not report.exists():
            raise SystemExit(f"{settings}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        steps: list[dict[str, float]] = json.loads(report.read_text(encoding="utf-8"))["steps"]
        return steps


def _difference(
    ones: list[dict[str, float]], one: str, others: list[dict[str, float]], other: str
) -> tuple[float, float]:
    loss, grad_norm = (
        max(
            abs(a[f"{key}_{one}"] / b[f"{key}_{other}"] - 1)
            for a, b in zip(ones, others, strict=True)
        )
        for key in ("loss", "grad_norm")
    )
    return loss, grad_norm


if __name__ == "__main__":
    sys.exit(main())
