"""Schedules in a bench: one variant each, times of graphs, simulated steps."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from chunkgraph.bench.choice import chosen_variants, config_of, run_as
from chunkgraph.bench.chunk_costs import chunk_costs
from chunkgraph.bench.document import BenchDocument, VariantResult
from chunkgraph.bench.report import print_bench_report
from chunkgraph.bench.simulated import merged_costs, simulated_steps
from chunkgraph.engine import Chunk, ChunkGraphs
from chunkgraph.errors import ConfigError
from chunkgraph.settings import Config, load_config

CONFIGS = Path(__file__).parents[2] / "configs" / "bench"
MEASURED = {"F": 1.61, "B": 4.59, "I": 2.37, "W": 2.40}
CPU = torch.device("cpu")


def _config(*overrides: str, name: str = "zero_bubble_pp4") -> Config:
    return load_config(CONFIGS / f"{name}.yaml", list(overrides))


# -- which variants there are ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [("zero_bubble_pp2", 2), ("zero_bubble_pp4", 4)])
def test_schedules_of_a_configuration_are_variants(name: str, size: int) -> None:
    config = _config("device=cpu", name=name)
    model = config.model
    assert config.pipeline.pipeline_model_parallel_size == size
    assert (model.num_layers, model.hidden_size, model.seq_length) == (16, 2048, 1024)
    assert set(config.train.num_microbatches) == {8}
    names = chosen_variants(None, config)
    assert names == ("eager", "chunk", "chunk_zb-h1")
    assert [run_as(name) for name in names] == ["eager", "chunk", "chunk"]
    schedules = [config_of(name, config).pipeline.schedule for name in names]
    assert schedules == ["auto", "auto", "zb-h1"]
    with_file = _config("pipeline.schedule=zb-h1")
    assert config_of("chunk", with_file).pipeline.schedule == "zb-h1"
    assert config_of("eager", with_file).pipeline.schedule == "auto"


@pytest.mark.parametrize(
    ("variants", "overrides", "message"),
    [
        (
            "chunk_zb-v",
            (),
            "--variants: unknown variant 'chunk_zb-v'; choose from eager, .*chunk_zb-h1",
        ),
        ("chunk_interleaved-zb", (), "--variants: .*interleaved-zb"),
        (None, ("bench.schedules=[zb]",), "bench.schedules: unknown variant 'chunk_zb'"),
        (
            None,
            ("pipeline.virtual_pipeline_model_parallel_size=2",),
            "bench.schedules: .*zb-h1",
        ),
    ],
)
def test_schedules_that_cannot_run_are_refused(
    variants: str | None, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_variants(variants, _config("device=cpu", *overrides))


# -- times of graphs -------------------------------------------------------------------------------


@pytest.mark.parametrize(("backward", "names"), [("whole", ["F", "B"]), ("split", ["F", "I", "W"])])
def test_each_graph_of_a_chunk_is_timed(backward: Any, names: list[str]) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    graphs = ChunkGraphs(Chunk.from_module(module, "chunk 0", backward=backward), 2)
    assert chunk_costs(graphs, CPU) == []

    def step() -> torch.Tensor:
        module.zero_grad()
        x = torch.ones(4, 8, requires_grad=True)
        with graphs.step(1):
            graphs.callables[0](x).sum().backward()
            if backward == "split":
                graphs.weights.runner(0)()
        gradients = [parameter.grad for parameter in module.parameters()]
        return torch.cat([grad.flatten() for grad in gradients if grad is not None])

    for _ in range(2):
        expected = step()
    (costs,) = chunk_costs(graphs, CPU, num_repeats=3)
    assert list(costs) == names
    assert all(ms > 0 for ms in costs.values())
    assert torch.equal(step(), expected)  # the timing does not reach later steps


@pytest.mark.timeout(100)
def test_a_split_schedule_is_measured_and_equal(
    run_cases: Callable[..., Any], make_config: Callable[..., Any]
) -> None:
    case = {
        "probe": "bench",
        "variants": ["eager", "chunk"],
        "config": make_config(
            pipeline={"pipeline_model_parallel_size": 2, "schedule": "zb-h1"},
            train={"num_microbatches": [3, 2]},
            bench={"num_warmup_steps": 2, "num_steps": 2},
        ),
    }
    result = run_cases({"zb-h1": case}, 2)["zb-h1"]
    eager, chunk = result["eager"], result["chunk"]
    zero_bubble = VariantResult("chunk_zb-h1", None, chunk)
    assert zero_bubble.first_difference(VariantResult("eager", None, eager)) is None
    assert eager["costs_ms"] is None
    assert chunk["costs_ms"].keys() == {"F", "I", "W"}
    assert chunk["host_us_backward"] > 0
    assert chunk["optimizer_ms"] > 0


# -- simulated steps -------------------------------------------------------------------------------


def test_steps_of_several_sizes_are_simulated() -> None:
    steps = simulated_steps(MEASURED, _config())
    whole, ms = 1.61 + 4.59, pytest.approx
    assert list(steps) == ["1f1b", "interleaved", "zb-h1", "interleaved-zb"]
    assert steps["1f1b"] == {str(p): ms((8 + p - 1) * whole) for p in (2, 4, 8)}
    # The rank's layers form two chunks: half of the bubble.
    assert steps["interleaved"] == {str(p): ms((8 + (p - 1) / 2) * whole) for p in (2, 4, 8)}
    assert steps["zb-h1"]["4"] / steps["1f1b"]["4"] == ms(0.853, abs=5e-4)
    assert steps["interleaved-zb"]["4"] / steps["1f1b"]["4"] == ms(0.801, abs=5e-4)
    # A run whose ranks have two chunks measures half as much.
    halves = {name: value / 2 for name, value in MEASURED.items()}
    vpp = _config("pipeline.virtual_pipeline_model_parallel_size=2")
    assert simulated_steps(halves, vpp) == {
        name: {size: ms(value) for size, value in of_size.items()}
        for name, of_size in steps.items()
    }


def test_what_is_not_measured_is_not_simulated() -> None:
    assert list(simulated_steps({"F": 1, "B": 2}, _config())) == ["1f1b", "interleaved"]
    assert simulated_steps({"F": 1}, _config()) == simulated_steps({}, _config()) == {}
    split = simulated_steps({"F": 1, "I": 1, "W": 1.5}, _config())
    assert split["1f1b"]["2"] == pytest.approx(9 * 3.5)
    six = simulated_steps(MEASURED, _config("train.num_microbatches=[6]"))
    assert [list(of_size) for of_size in six.values()][:2] == [["2", "4", "8"], ["2"]]


def test_costs_of_variants_are_merged() -> None:
    variants = [None, {"F": 1.0, "B": 3.0}, {"F": 9.0, "I": 1.0, "W": 2.0}]
    assert merged_costs(variants) == {"F": 1.0, "B": 3.0, "I": 1.0, "W": 2.0}


def test_the_report_has_simulated_and_measured_steps() -> None:
    document = BenchDocument.start(_config(), command="", commit="c")
    equal = {"losses_hex": ["0x1p+1"], "grad_norms_hex": [], "parameters_sha256": []}
    for name, step_ms, costs in (
        ("eager", 90.0, None),
        ("chunk", 70.0, {"F": 1.61, "B": 4.59}),
        ("chunk_zb-h1", 61.0, {"F": 1.7, "I": 2.37, "W": 2.40}),
    ):
        values = {
            "step_ms": step_ms,
            "costs_ms": costs,
            "optimizer_ms": 2.0,
            "num_gpus": 4,
            "device": "a GPU",
        }
        document.add(VariantResult(name, None, {**values, **equal}))
    assert document.to_mapping()["costs_ms"] == MEASURED
    assert document.to_mapping()["simulated_step_ms"]["1f1b"]["4"] == pytest.approx(70.2)
    console = Console(width=80, file=io.StringIO(), highlight=False)
    names = ["eager", "chunk", "chunk_zb-h1"]
    assert print_bench_report(document, names, console) == []
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.split()}
    assert rows["1f1b"][2:4] == ["70.2", "1.000"]
    assert rows["1f1b"][-1] == "70.0"
    assert rows["interleaved"][-1] == "-"
    assert "simulated with F 1.61, B 4.59, I 2.37, W 2.40, optimizer 2.00 ms" in lines
    simulated = [line.split() for line in lines if line.split()[:1] == ["zb-h1"]]
    assert simulated[-1][3:5] == ["60.1", "0.857"]
    assert simulated[-1][-1] == "61.0"
    assert not any(line.startswith("Zero bubble is not simulated") for line in lines)
    assert not any("…" in line for line in lines)
    failed = VariantResult.failed("chunk_zb-h1", "x")
    document.results[-1] = failed
    assert print_bench_report(document, names, console) == ["the variant chunk_zb-h1 did not run"]
    assert "no I and W were timed" in console.file.getvalue()  # type: ignore[attr-defined]
