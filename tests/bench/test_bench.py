from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chunkgraph.bench.host_times import HostTimes
from chunkgraph.bench.trace import PREFIX, kernel_times

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "cpu" / "gpt_pp2_cpu.yaml")
TINY = (
    *("model.num_layers=2", "model.hidden_size=16", "model.ffn_hidden_size=32"),
    *("model.num_attention_heads=2", "model.seq_length=16", "bench.num_steps=2"),
)
ONE_RANK = ("pipeline.pipeline_model_parallel_size=1", "train.num_microbatches=[3]")

VARIANT_KEYS = {
    *("name", "error", "step_ms", "step_ms_all", "reserved_bytes", "allocated_bytes", "capture_s"),
    *("host_us_forward", "host_us_backward", "kernel_share", "ideal_ms"),
    *("num_captures_after_first", "equal_to_eager"),
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chunkgraph.cli", "bench", CONFIG, *TINY, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


# Not for each release of Megatron: `test_bench_packed` measures with all of them.
def test_eager_and_chunk_are_measured_and_equal(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    # `test_bench_packed` tests what is gathered from several ranks.
    result = bench(*ONE_RANK, "--variants", "eager,chunk", "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    document = json.loads(path.read_text())
    assert {"config", "device", "num_gpus", "versions", "command", "commit"} <= document.keys()
    assert document["config"] == "gpt_pp2_cpu"
    assert document["device"] == "cpu"
    eager, chunk = document["variants"]
    for variant in (eager, chunk):
        assert variant.keys() >= VARIANT_KEYS
    assert (eager["name"], eager["error"], eager["equal_to_eager"]) == ("eager", None, True)
    assert (chunk["name"], chunk["error"], chunk["equal_to_eager"]) == ("chunk", None, True)
    assert len(chunk["step_ms_all"]) == 2
    assert len(chunk["losses_hex"]) == 5  # warmup is compared too
    assert len(chunk["parameters_sha256"]) == 1
    assert chunk["capture_s"] > 0
    assert eager["capture_s"] is None
    assert chunk["num_captures_after_first"] == 0
    for variant in (eager, chunk):
        assert variant["host_us_forward"] > 0
        assert variant["host_us_backward"] > 0
    assert 0 < chunk["host_us_forward_without_launch"] < chunk["host_us_forward"]
    assert chunk["matmul_tflops_by_rank"] == [None] * len(chunk["reserved_bytes_by_rank"])


def test_a_crash_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = bench(*ONE_RANK, "--variants", "transformer_engine", "--json", str(path))
    assert result.returncode == 0, result.stderr
    (crashed,) = json.loads(path.read_text())["variants"]
    assert crashed.keys() >= VARIANT_KEYS
    assert crashed["name"] == "transformer_engine"
    assert "needs a GPU" in crashed["error"]
    assert crashed["step_ms"] is None
    assert crashed["equal_to_eager"] is None


def test_a_variant_over_its_time_is_ended_and_fails_the_command(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = bench("--variants", "chunk", "--timeout", "0.2", "--json", str(path))
    assert result.returncode == 1
    (chunk,) = json.loads(path.read_text())["variants"]
    assert "limit of 0.2 s" in chunk["error"]
    assert "the variant chunk did not run" in result.stdout


# -- times from a trace --------------------------------------------------------------------------


def host(name: str, ts: float, correlation: int, tid: int = 1) -> dict[str, Any]:
    arguments = {"correlation": correlation}
    return {"cat": "cuda_runtime", "name": name, "ts": ts, "dur": 1, "tid": tid, "args": arguments}


def kernel(
    name: str, ts: float, dur: float, correlation: int, cat: str = "kernel"
) -> dict[str, Any]:
    return {
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "args": {"correlation": correlation},
    }


def mark(name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": PREFIX + name, "ts": ts, "dur": dur, "tid": tid}


def test_kernels_belong_to_what_launched_them() -> None:
    times = kernel_times(
        [
            mark("step", 0, 1000),
            mark("forward 0", 10, 20),
            host("cudaLaunchKernel", 15, 1),
            kernel("gemm", 500, 100, 1),
            mark("forward 1", 40, 20),
            host("cudaGraphLaunch", 45, 2),
            kernel("gemm", 600, 30, 2),
            kernel("norm", 650, 50, 2),
            host("cudaLaunchKernel", 80, 3),  # between the forwards
            kernel("adam", 800, 7, 3),
            host("cudaLaunchKernel", 81, 4),
            kernel("ncclDevKernel_SendRecv", 810, 5000, 4),
            host("cudaLaunchKernel", 82, 5),
            kernel("ncclDevKernel_AllReduce_Sum", 820, 11, 5),
            mark("backward 1", 100, 0, tid=2),
            host("cudaLaunchKernel", 90, 6, tid=2),  # of the loss, before the mark
            kernel("loss", 900, 1, 6),
            host("cudaLaunchKernel", 110, 7, tid=2),
            kernel("dgrad", 910, 2, 7),
            mark("backward 0", 120, 0, tid=2),
            host("cudaLaunchKernel", 130, 8, tid=2),
            kernel("dgrad", 920, 4, 8),
            host("cudaLaunchKernel", 2000, 9),  # after the step
            kernel("gemm", 2100, 1000, 9),
        ]
    )
    assert times.forward == pytest.approx({0: 0.100, 1: 0.080})
    assert times.backward == pytest.approx({1: 0.003, 0: 0.004})
    assert times.other == pytest.approx(0.007)
    assert times.total == pytest.approx(0.100 + 0.080 + 0.007 + 0.007 + 0.011)
    assert times.num_graph_launches == 1
    assert times.num_kernel_launches == 7
    assert times.kernel_share == pytest.approx(80 / 100)


def test_what_a_graph_waits_for_at_its_copies() -> None:
    times = kernel_times(
        [
            mark("step", 0, 1000),
            host("cudaGraphLaunch", 10, 1),
            host("cudaMemcpyAsync", 11, 2),
            kernel("gemm", 100, 10, 1),
            kernel("Memset", 112, 1, 1, "gpu_memset"),  # 2 before, 4 after
            kernel("gemm", 117, 10, 1),
            kernel("norm", 130, 10, 1),  # 3 between kernels
            kernel("Memcpy", 135, 10, 1, "gpu_memcpy"),  # begins next to a kernel; 5 after
            kernel("Memset", 136, 1, 1, "gpu_memset"),  # within another
            kernel("add", 150, 1, 1),
            kernel("Memcpy", 300, 10, 2, "gpu_memcpy"),  # of no graph
        ]
    )
    assert times.num_graph_copies == 3
    assert times.idle_at_copies == pytest.approx(0.011)
    assert times.kernel_share == pytest.approx((51 - 14) / 51)


def test_where_a_step_is_idle() -> None:
    def step(at: float, first: int) -> list[dict[str, Any]]:
        return [
            mark("step", at, 1000),
            host("cudaLaunchKernel", at + 1, first),
            host("cudaGraphLaunch", at + 2, first + 1),
            host("cudaGraphLaunch", at + 3, first + 2),
            host("cudaLaunchKernel", at + 4, first + 3),
            host("cudaLaunchKernel", at + 5, first + 4),
            kernel("zero", at + 10, 20, first),  # 80 of 100 before the first graph
            kernel("gemm", at + 100, 50, first + 1),
            kernel("norm", at + 160, 40, first + 1),  # 10 inside
            kernel("ncclDevKernel_SendRecv", at + 150, 100, first + 3),
            kernel("copy", at + 195, 15, first + 4),  # 5 next to the graph, then 10
            kernel("gemm", at + 300, 100, first + 2),  # 90 of 100 between
            kernel("adam", at + 450, 50, first + 4),  # 550 of 600 after
        ]

    # The time between two steps does not count.
    times = kernel_times([*step(0, 0), *step(5000, 10)])
    assert times.idle == pytest.approx(
        {
            "before_graphs": 2 * 0.080,
            "in_graphs": 2 * 0.010,
            "between_graphs": 2 * 0.090,
            "after_graphs": 2 * 0.550,
        }
    )
    assert sum(times.idle.values()) == pytest.approx(2 * (1.0 - 0.27))
    assert kernel_times([mark("step", 0, 10)]).idle == {}


def test_kernels_of_dispatch_and_stash_are_distinguished() -> None:
    names = {
        "void hybrid_ep::dispatch_kernel<(int)1>(param)": 100,
        "void permute_kernel<short>(args)": 20,
        "ncclDevKernel_SendRecv(args)": 7,
        "_copy_row": 3,
        "_take": 1,
        "nvjet_copy_row_gemm": 50,
    }
    events = [mark("step", 0, 1000)]
    for number, (name, microseconds) in enumerate(names.items()):
        events += [
            host("cudaLaunchKernel", 10 + number, number),
            kernel(name, 500 + number, microseconds, number),
        ]
    times = kernel_times(events)
    assert times.dispatch == pytest.approx(0.120)
    assert times.stash == pytest.approx(0.004)
    assert times.send_receive == pytest.approx(0.007)
    assert times.total == pytest.approx(0.174)


def test_without_graphs_there_is_no_share() -> None:
    assert kernel_times([mark("step", 0, 10)]).kernel_share is None


def test_host_times_without_launch_are_taken_call_by_call() -> None:
    times = HostTimes(forward=[10.0, 30.0, 20.0], forward_launch=[4.0, 25.0, 6.0])
    assert times.medians() == {
        "host_us_forward": 20.0,
        "host_us_backward": None,
        "host_us_forward_without_launch": 6.0,
        "host_us_backward_without_launch": None,
    }


@pytest.mark.megatron
def test_pages_of_megatrons_stash_that_ran_out_are_an_error(
    one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chunkgraph.bench.variants import EagerStashVariant, make_variant
    from chunkgraph.errors import StashError
    from chunkgraph.megatron.core.access import versions
    from chunkgraph.settings import load_config

    if versions()["megatron_core"].startswith("0.16"):
        pytest.skip("this release has no stash")
    path = Path(__file__).resolve().parents[2] / "configs" / "gpu" / "moe_ep2_hybridep.yaml"
    variant = make_variant("eager_stash", load_config(path, ["stash.headroom=1.5"]))
    assert variant.transformer_options() == {
        "moe_paged_stash": True,
        "moe_paged_stash_buffer_size_factor_cuda": -1.5,
    }
    flag = torch.zeros(1, dtype=torch.bool)
    calls: list[dict[str, Any]] = []
    stash = SimpleNamespace(
        check_paged_stash_overflow=lambda: flag,
        paged_stash_reset=lambda **options: calls.append(options),
    )
    monkeypatch.setattr(EagerStashVariant, "_stash", staticmethod(lambda: stash))
    variant.after_step()
    flag.fill_(True)
    with pytest.raises(StashError, match=r"ran out .* stash\.headroom, which is 1\.5"):
        variant.after_step()
    variant.close()
    assert calls == [{"enabled": False}]
