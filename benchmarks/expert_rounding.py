"""How experts in graphs differ from Megatron's eager experts: kernels, last bits, and training.

    python benchmarks/expert_rounding.py --json expert_rounding.json

Graphs compute experts with `torch._grouped_mm`, eager Megatron with Transformer Engine's
`GroupedLinear`. The first table compares the three products of a layer: kernels, time, and share of
values that differ. The second one trains recipes for 12 steps. It compares losses and gradient
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformer_engine.pytorch import GroupedLinear

from chunkgraph.megatron.core.access import versions
from chunkgraph.megatron.features.experts.grouped_gemm import TorchGemm

_CONFIG = Path(__file__).parents[1] / "configs" / "bench" / "moe_ep1_dropless.yaml"
_SMALL = [
    *("model.num_layers=4", "model.hidden_size=1024", "model.ffn_hidden_size=2048"),
    *("model.seq_length=256", "moe.moe_ffn_hidden_size=256", "train.lr=2.0e-05"),
    "train.num_microbatches=[2,1,3,1,2,2,4,1,3,2,1,2]",
]
_SIGMOID = ["moe.moe_router_score_function=sigmoid", "moe.moe_router_enable_expert_bias=true"]
_SHARED = ["moe.moe_shared_expert_intermediate_size=256"]
_RECIPES = {
    "softmax-8-top2": ["moe.num_moe_experts=8", "moe.moe_router_topk=2"],
    "sigmoid-shared-16-top4": [
        *("moe.num_moe_experts=16", "moe.moe_router_topk=4", *_SIGMOID, *_SHARED),
    ],
    "seq-loss-32-top8": [
        *("moe.num_moe_experts=32", "moe.moe_router_topk=8"),
        "moe.moe_router_load_balancing_type=seq_aux_loss",
    ],
}
_NUM_EXPERTS, _NUM_ROWS, _HIDDEN, _WIDTH = 32, 4096, 2048, 1536


def main() -> int:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    parser.add_argument(
        "--recipes", nargs="*", choices=_RECIPES, default=list(_RECIPES), help="(default: all)"
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
    """Compare the products of a layer of experts; loads differ, one expert has no rows."""
    torch.manual_seed(1)
    loads = torch.rand(_NUM_EXPERTS).softmax(0)
    splits = (loads * _NUM_ROWS).int()
    splits[3] = 0
    splits[-1] += _NUM_ROWS - splits.sum()
    ends = splits.cumsum(0).int().cuda()
    rows = torch.randn(_NUM_ROWS, _HIDDEN, device="cuda", dtype=torch.bfloat16)
    grads = torch.randn(_NUM_ROWS, _WIDTH, device="cuda", dtype=torch.bfloat16)
    products = {}
    for name, more in {"eager": {}, "device splits": {"use_grouped_tensor": True}}.items():
        layer = GroupedLinear(
            *(_NUM_EXPERTS, _HIDDEN, _WIDTH),
            bias=False,
            params_dtype=torch.bfloat16,
            **more,
        )
        m_splits = splits.long().cuda() if more else splits.tolist()
        try:
            products.update(_compare(name, layer, m_splits, rows, grads, ends))
        except (RuntimeError, ValueError, TypeError) as error:
            products[f"Transformer Engine, {name}"] = {"refused": str(error).splitlines()[0]}
    return products


def _compare(
    name: str,
    layer: torch.nn.Module,
    m_splits: Any,
    rows: torch.Tensor,
    grads: torch.Tensor,
    ends: torch.Tensor,
) -> dict[str, dict[str, Any]]:
    weights = [getattr(layer, f"weight{i}") for i in range(_NUM_EXPERTS)]
    gemm = TorchGemm()
    inputs = rows.clone().requires_grad_()

    def forward_and_backward() -> list[torch.Tensor]:
        out = layer(inputs, m_splits)
        return [out, *torch.autograd.grad(out, [inputs, *weights], grads)]

    def grouped() -> list[torch.Tensor]:
        with torch.no_grad():
            return [
                gemm.rows(rows, weights, ends),
                gemm.row_grads(grads, weights, ends),
                *gemm.weight_grads(grads, rows, ends),
            ]

    expected, values = forward_and_backward(), grouped()
    differing = [
        (a != b).float().mean().item() for a, b in zip(expected[:2], values[:2], strict=True)
    ]
    weight_grads = torch.stack(expected[2:]) != torch.stack(values[2:])
    shares = [*differing, weight_grads.float().mean().item()]
    named = dict(zip(("outputs", "input gradients", "weight gradients"), shares, strict=True))
    return {
        f"Transformer Engine, {name}": {
            "ms": _ms(forward_and_backward),
            "kernels": _kernels(forward_and_backward),
        },
        f"torch._grouped_mm, against {name}": {
            "ms": _ms(grouped),
            "kernels": _kernels(grouped),
            "share of values that differ": named,
        },
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
