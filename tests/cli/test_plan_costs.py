"""Costs of ``chunkgraph plan``, and schedules compared with them."""

from __future__ import annotations

import json

import pytest

from chunkgraph.errors import ConfigError
from chunkgraph.schedules import list_schedules

MEASURED = "F=1.61,B=4.59,I=2.37,W=2.40"


def test_costs_are_those_of_the_grid_and_the_bubble(run, tmp_path):
    out = run("--pp", 4, "--num-microbatches", 8, "--costs", MEASURED)
    assert "One step of 8 microbatches: 68.2 ms" in out  # (8 + 4 - 1) (F + B)
    assert max(map(len, out.splitlines())) <= 80
    arguments = ("--pp", 4, "--num-microbatches", 8, "--schedule", "zb-h1", "--json", "-")
    rows = json.loads(run(*arguments, "--costs", MEASURED))
    (step_ms,) = {row["step_ms"] for row in rows}
    assert 8 * 6.38 < step_ms < 68.2
    for row in rows:
        assert row["bubble_ratio"] == pytest.approx(1 - 8 * 6.38 / step_ms, abs=1e-6)
    assert "step_ms" not in json.loads(run(*arguments))[0]


def test_costs_come_from_a_document(run, tmp_path):
    path = tmp_path / "costs.json"
    arguments = ("--pp", 2, "--num-microbatches", 4, "--json", "-", "--costs")
    expected = run(*arguments, "F=1,B=3,I=1,W=2")
    costs = {"F": 1, "B": 3, "I": 1, "W": 2}
    path.write_text(json.dumps({"costs_ms": costs}))
    assert run(*arguments, path) == expected
    variants = [{"name": "eager", "costs_ms": {"F": 9, "B": 9}}, {"name": "local"}]
    variants.append({"name": "chunk", "costs_ms": costs})
    path.write_text(json.dumps({"config": "a", "variants": variants}))
    assert run(*arguments, f"{path}:chunk") == expected
    with pytest.raises(ConfigError, match=r"costs of the variants eager, chunk\. Name one"):
        run(*arguments, path)
    with pytest.raises(ConfigError, match=r"--costs .*:eager"):
        run(*arguments, f"{path}:local")  # it has none
    path.write_text(json.dumps({"config": "a", "variants": variants[1:]}))
    assert run(*arguments, path) == expected
    # What is not measured follows from the rest.
    assert run(*arguments, "F=1,I=1.5,W=1.5") == run(*arguments, "F=1,B=3")
    assert json.loads(run(*arguments, "F=1,B=3,send=0.5"))[0]["step_ms"] > 20.0


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("F=1", "give F, and B or both I and W"),
        ("F=1,I=1", "give F, and B or both I and W"),
        ("F=1,B=0", "B is '0', but must be ms above 0"),
        ("F=1,B=nan", "B is 'nan', but must be ms above 0"),
        ("F=1,B=inf", "must be ms above 0"),
        ("F=1,B=x", "must be ms above 0"),
        ("F=1,b=2", "there is no cost 'b', but F, B, I, W, send. Did you mean 'B'"),
        ("F=1,F=2,B=3", "'F' is given twice"),
        ("F=1,B=51", "more than 50 times the smallest"),
        ("nowhere.json", "neither a file nor costs such as F=1.6"),
        ("", "neither a file nor costs"),
    ],
)
def test_costs_that_cannot_be(run, costs, message):
    with pytest.raises(ConfigError, match=message):
        run("--pp", 2, "--costs", costs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", 'has no "costs_ms" at its top or in a variant'),
        ('{"costs_ms": 1, "variants": [3]}', 'has no "costs_ms"'),
        ('{"costs_ms": {"F": true, "B": 1}}', "F is True, but must be ms above 0"),
        ('{"costs_ms": {"F": [1], "B": 1}}', r"F is \[1\], but"),
    ],
)
def test_files_without_costs(run, tmp_path, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        run("--pp", 2, "--costs", path)


@pytest.mark.parametrize(
    ("num_ranks", "count", "expected"),
    [
        (4, 8, {"zb-h1": 0.853, "interleaved": 0.864, "zb-v": 0.801, "dualpipe-v": 0.773}),
        (8, 16, {"zb-h1": 0.832, "interleaved": 0.848, "zb-v": 0.775, "dualpipe-v": 0.753}),
        (4, 16, {"zb-h1": 0.927, "interleaved": 0.921, "zb-v": 0.897, "dualpipe-v": 0.869}),
    ],
)
def test_comparison_of_measured_costs(run, num_ranks, count, expected):
    arguments = ("--pp", num_ranks, "--num-microbatches", count, "--costs", MEASURED, "--compare")
    rows = {row["schedule"]: row for row in json.loads(run(*arguments, "--json"))}
    assert set(rows) == set(list_schedules())
    for name, step in expected.items():
        assert rows[name]["relative_step"] == pytest.approx(step, abs=5e-4)
    assert [name for name, row in rows.items() if row["is_recommended"]] == ["dualpipe-v"]
    assert [name for name, row in rows.items() if row["runs_in_megatron"]] == [
        "1f1b", "interleaved", "gpipe", "zb-h1", "interleaved-zb",
    ]  # fmt: skip
    assert rows["1f1b"]["held_microbatches"] == rows["zb-h1"]["held_microbatches"] == num_ranks
    assert rows["zb-v"]["held_microbatches"] == num_ranks + 0.5
    out = run(*arguments)
    assert "Recommended: dualpipe-v" in out
    assert "the best of these is interleaved" in out
    assert max(map(len, out.splitlines())) <= 80


def test_what_a_configuration_is_advised_runs_in_megatron(run, config):
    one = (config, "pipeline.virtual_pipeline_model_parallel_size=null", "--compare")
    rows = json.loads(run(*one, "--num-microbatches", 7, "--json"))
    (advised,) = (row for row in rows if row.get("is_recommended"))
    assert advised["schedule"] == "zb-h1"
    assert min(row["step_ms"] for row in rows if "step_ms" in row) < advised["step_ms"]
    assert "Recommended: zb-h1," in run(*one, "--num-microbatches", 7)


def test_comparison_without_costs_is_that_with_the_default_ones(run):
    arguments = ("--pp", 4, "--num-microbatches", 12, "--compare", "--json")
    closed, simulated = (
        json.loads(run(*arguments)),
        json.loads(run(*arguments, "--costs", "F=1,B=2")),
    )
    for one, other in zip(closed, simulated, strict=True):
        assert one["step_ms"] == pytest.approx(other["step_ms"])
        assert one["bubble_ratio"] == pytest.approx(other["bubble_ratio"], abs=1e-6)


def test_costs_are_of_a_chunk_and_the_work_of_a_rank_stays(run):
    whole = ("--pp", 2, "--num-microbatches", 4, "--compare", "--json", "--costs", "F=2,B=4")
    halves = (*whole[:-1], "F=1,B=2", "--vpp", 2)
    assert json.loads(run(*whole)) == json.loads(run(*halves))


def test_comparison_with_a_config_has_memory(run, config):
    out = run(config, "--compare")
    assert "Memory" in out
    assert max(map(len, out.splitlines())) <= 80
    rows = {row["schedule"]: row for row in json.loads(run(config, "--compare", "--json"))}
    expected = json.loads(run(config, "--json"))
    parts = ("slot_bytes", "scratch_bytes", "parameter_bytes", "gradient_bytes")
    parts += ("optimizer_bytes", "logit_bytes")
    assert rows["interleaved"]["memory_bytes"] == max(
        sum(row[part] for part in parts) for row in expected
    )


def test_the_comparison_names_what_cannot_run(run):
    arguments = ("--pp", 4, "--num-microbatches", 6, "--compare")
    refused = {row["schedule"]: row.get("error") for row in json.loads(run(*arguments, "--json"))}
    assert [name for name, error in refused.items() if error is not None] == [
        "interleaved", "interleaved-zb", "dualpipe-v",
    ]  # fmt: skip
    assert "nearest legal: 8" in refused["dualpipe-v"]
    out = run(*arguments)
    assert "Left out: schedule 'dualpipe-v'" in out
    assert max(map(len, out.splitlines())) <= 80
    alone = run("--pp", 1, "--compare")
    assert "Recommended: 1f1b." in alone


@pytest.mark.parametrize(
    "arguments",
    [("--rank", 0), ("--svg", "x.svg"), ("--full",), ("--schedule", "zb-v"), ("--trace", "x")],
)
def test_comparison_draws_nothing(run, arguments):
    with pytest.raises(ConfigError, match=f"{arguments[0]} has no effect with --compare"):
        run("--pp", 2, "--compare", *arguments)


def test_steps_too_large_to_simulate_are_refused(run):
    with pytest.raises(ConfigError, match="--costs: the step has 12800 forwards"):
        run("--pp", 64, "--num-microbatches", 100, "--costs", "F=1,B=2")
    with pytest.raises(ConfigError, match="--compare: the step has 300 ranks"):
        run("--pp", 300, "--costs", "F=1,B=2", "--compare")
