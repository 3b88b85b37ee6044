"""What banks of context-parallel sizes cost in memory and capture time, against one static size.

    python benchmarks/bank_memory.py --ranks 2 --json bank_memory.json

Two runs of ``chunkgraph train`` on the same GPUs: microbatches of 1, 2, ... up to all ranks, each
size captured, and all microbatches shared by all ranks. A rank has the same rows in both. Needs as
many GPUs as ranks and the extras `megatron` and `te`; takes a minute. ``--device cpu`` tries the
script: a CPU reserves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> int:
    """Run both, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="a power of two")
    parser.add_argument("--rows", type=int, default=1024, help="of a rank (default: 1024)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--banks-spec", default="transformer_engine", help="layer spec of banks")
    parser.add_argument("--static-spec", default="transformer_engine")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    args = parser.parse_args()
    if args.ranks < 2 or args.ranks.bit_count() > 1:
        parser.error("--ranks is a power of two above 1")
    sizes = [1 << k for k in range(args.ranks.bit_length())]
    results: dict[str, Any] = {
        "sizes": sizes,
        "banks": _run(args, args.banks_spec, sizes),
        "static": _run(args, args.static_spec, []),
    }
    of_banks, of_static = (max(results[name]["reserved_bytes"]) for name in ("banks", "static"))
    results["ratio"] = of_banks / of_static if of_static else None
    used = [max(results[name]["gpu_used_bytes"]) for name in ("banks", "static")]
    results["ratio_of_gpu_used"] = used[0] / used[1] if used[1] else None
    for name, one in (("banks", results["banks"]), ("static", results["static"])):
        sys.stdout.write(
            f"{name}: {max(one['reserved_bytes']) / 2**20:.0f} MiB reserved, "
            f"{max(one['gpu_used_bytes']) / 2**20:.0f} MiB used on a GPU by all its processes, "
            f"{one['num_graphs']} graphs, step with the capture {one['capture_step_ms']:.0f} ms\n"
        )
    ratios = "unknown on a CPU"
    if (ratio := results["ratio"]) is not None:
        ratios = f"{ratio:.3f} reserved, {results['ratio_of_gpu_used']:.3f} used on a GPU"
    sys.stdout.write(f"banks of {sizes} over static CP {args.ranks}: {ratios}\n")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def _run(args: argparse.Namespace, spec: str, sizes: list[int]) -> dict[str, Any]:
    """One run: banks of these sizes, or, without any, one static size of all ranks."""
    on_gpu = args.device == "cuda"
    ranks = "data_parallel_size" if sizes else "context_parallel_size"
    packing: dict[str, Any] = {"max_packed_seqs": 32, "max_packed_tokens": args.rows * args.ranks}
    if sizes:
        packing["max_packed_tokens"] = args.rows
        packing["context_parallel_sizes"] = sizes
        packing["context_parallel_schedule"] = "random"
    config = {
        "device": args.device,
        "model": {
            "num_layers": args.layers,
            "hidden_size": args.hidden_size,
            "ffn_hidden_size": args.hidden_size * 11 // 4,
            "num_attention_heads": args.heads,
            "seq_length": args.rows,
            "normalization": "RMSNorm" if on_gpu else "LayerNorm",
            "swiglu": True,
            "params_dtype": "bfloat16" if on_gpu else "float32",
            "layer_spec": spec,
        },
        "pipeline": {ranks: args.ranks},
        "train": {
            "num_microbatches": [4] * args.steps,
            "micro_batch_size": 1,
            "compare": "none",
            # There is no deterministic kernel for many sequences of such lengths.
            "deterministic": False,
        },
        "packing": packing,
    }
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "config.yaml", Path(folder) / "out.json"
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        command = [sys.executable, "-m", "chunkgraph.cli", "train", str(path)]
        subprocess.run(
            [*command, "--json", str(out), "--run-dir", f"{folder}/run"],
            check=True,
            env={**os.environ, "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"},  # whatever is set here
        )
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    captured = [step for step in result["steps"] if step["captures"]]
    return {
        "reserved_bytes": result["reserved_bytes"],
        "gpu_used_bytes": result["gpu_used_bytes"],
        "num_graphs": result["num_graphs"],
        "capture_step_ms": captured[0]["step_ms_chunk"],
        "replays_of_bank": result["replays_of_bank"],
        "versions": result["versions"],
    }


if __name__ == "__main__":
    sys.exit(main())
