from __future__ import annotations

import argparse
import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from commands import output_of_python
from drawn_schedules import CASES
from rich.console import Console

from chunkgraph.cli import plan, plan_export
from chunkgraph.cli.__main__ import main
from chunkgraph.cli.plan_export import Grid
from chunkgraph.errors import ConfigError
from chunkgraph.schedules import build_schedule, list_schedules

REPOSITORY = Path(__file__).parents[2]
CONFIG = """\
model:
  {num_layers: 8, hidden_size: 64, ffn_hidden_size: 256, num_attention_heads: 4, seq_length: 32}
pipeline: {pipeline_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 2}
train: {num_microbatches: [4, 6, 2]}
"""
_ONE_CHUNK = ("pipeline.virtual_pipeline_model_parallel_size=null",)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def run(capsys):
    def call(*arguments):
        parser = argparse.ArgumentParser(prog="chunkgraph")
        plan.add_parser(parser.add_subparsers(dest="command", required=True))
        assert plan.run(parser.parse_args(["plan", *map(str, arguments)])) == 0
        return capsys.readouterr().out

    return call


def test_json_has_one_object_per_rank(run):
    rows = json.loads(run("--pp", 8, "--vpp", 4, "--group-size", 8, "--json", "-"))
    assert [row["rank"] for row in rows] == list(range(8))
    assert set(rows[0]) == {
        "rank", "slots_per_chunk", "num_graphs", "peak_in_flight", "bubble_ratio",
    }  # fmt: skip
    assert rows[0]["slots_per_chunk"] == [16, 16, 8, 8]
    assert rows[7]["slots_per_chunk"] == [16, 9, 8, 1]
    assert (rows[0]["num_graphs"], rows[0]["peak_in_flight"]) == (96, 39)


def test_config_adds_memory(run, config):
    rows = json.loads(run(config, "--json", "-"))
    assert [row["slots_per_chunk"] for row in rows] == [[4, 2], [3, 1]]
    for row, num_slots in zip(rows, (6, 4), strict=True):
        assert row["slot_bytes"] == num_slots * row["slot_bytes_per_chunk"][0] > 0
        assert row["scratch_bytes"] > 0
        assert row["gradient_bytes"] == row["parameter_bytes"]  # float32 model


def test_memory_is_of_the_rows_of_a_rank(run, tmp_path):
    """Also for a separate length of packed microbatches, and for ranks that share them."""
    path = tmp_path / "packed.yaml"
    path.write_text(
        CONFIG.rstrip("}\n") + ", micro_batch_size: 1}\npacking: {max_packed_seqs: 4}\n"
    )

    def memory(*overrides):
        return json.loads(run(path, *overrides, "--json", "-"))[0]

    longer, shared = "packing.max_packed_tokens=128", "pipeline.context_parallel_size=2"
    assert memory(longer) == memory("model.seq_length=128") != memory()
    assert memory(longer, shared) == memory("model.seq_length=64")
    assert memory("model.seq_length=128", shared) == memory("model.seq_length=64")
    note = (
        "Each graph is captured 4 times in the same slots: for 2 lengths x 2 numbers of sequences"
    )
    out = run(path, longer, "packing.buckets=[0.5]", "packing.seq_buckets=[2]")
    assert note in out
    assert "in the same slots" not in run(path, longer)


def test_memory_is_compared_with_a_gpu(config, capsys):
    assert main(["plan", config, "--gpu-memory", "80GiB"]) == 0
    out = capsys.readouterr().out
    assert "Fits in 80.0 GiB: rank 0 needs " in out
    assert "Optimizer" in out
    assert main(["plan", config, "--gpu-memory", "1.5MB"]) == 1
    out = capsys.readouterr().out
    assert "Does not fit in 1.4 MiB: rank 0 needs " in out


@pytest.mark.parametrize(
    "name",
    ["moe_ep1_dropless", "moe_ep2_dropless_s4096", "dense_pp2_s4096", "dense_pp2_recompute"],
)
def test_memory_is_about_as_measured(run, name):
    config = f"configs/bench/{name.removesuffix('_s4096')}.yaml"
    length = 4096 if name.endswith("_s4096") else 1024
    planned = json.loads(run(REPOSITORY / config, f"model.seq_length={length}", "--json", "-"))[0]
    document = json.loads((REPOSITORY / f"benchmarks/{name}.json").read_text())
    graphs = next(v for v in document["variants"] if v["name"] == "chunk")
    measured_bytes = sum(graphs["pool_bytes_by_rank"][0].values())
    ratio = (planned["slot_bytes"] + planned["scratch_bytes"]) / measured_bytes
    assert 0.85 < ratio < 1.35


def test_memory_of_hybrid_models_is_not_made_up(run, config):
    hybrid = (config, "model.hybrid_layer_pattern=M-M*|M-|M|-")
    assert [set(row) & {"slot_bytes"} for row in json.loads(run(*hybrid, "--json", "-"))] == [
        set()
    ] * 2
    assert "Memory is not estimated for hybrid models" in run(*hybrid)
    with pytest.raises(ConfigError, match="not estimated for hybrid models"):
        run(*hybrid, "--gpu-memory", "80GiB")


def test_table_and_grid(run, config):
    out = run(config)
    assert "slots for any legal number of microbatches" in out
    assert "One step of 6 microbatches" in out
    assert "estimated" in out
    assert "rank 0 |F0.0/0" in out
    assert "F3.1/0: microbatch 3, chunk 1, slot 0. F: forward, B: backward" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_v_has_two_chunks_by_default(run):
    out = run("--pp", 4, "--schedule", "dualpipe-v")
    assert "B: backward, I: input gradient, W: weight gradient" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    row = json.loads(run("--pp", 4, "--schedule", "zb-v", "--json", "-"))[1]
    assert row["slots_per_chunk"] == [7, 2]
    assert row["num_graphs"] == 3 * 9


def page_data(text):
    (data,) = re.findall(r'type="application/json">(.*?)</script>', text)
    return json.loads(data)


def test_page_holds_the_whole_step(run, config, tmp_path):
    path = tmp_path / "plan.html"
    assert "Drawn in" in run(config, "--num-microbatches", 2000, "--html", path)
    text = path.read_text()
    assert "{{" not in text
    assert "http" not in text  # nothing is loaded
    data = page_data(text)
    (schedule,) = data["schedules"]
    assert [len(rank["actions"]) for rank in schedule["ranks"]] == [8000, 8000]
    assert schedule["ranks"][0]["actions"][0] == ["F", 0, 0, 0, 0.0, 0.5]
    assert data["has_memory"]
    assert schedule["memory_bytes"] > schedule["slot_bytes"] > 0
    with pytest.raises(ConfigError, match="--html: the step has 800000 forwards"):
        run(config, "--num-microbatches", 100_000, "--html", path)


def test_trace_is_chromes(run, tmp_path):
    path = tmp_path / "trace.json"
    run("--pp", 2, "--num-microbatches", 2, "--trace", path)
    events = json.loads(path.read_text())["traceEvents"]
    boxes = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert boxes[:2] == [(0, "F0", 0.0, 1000.0), (0, "F1", 1000.0, 1000.0)]
    assert len(boxes) == 8
    in_use = [e["args"]["slots"] for e in events if e["ph"] == "C" and "rank 0" in e["name"]]
    assert in_use == [1, 2, 1, 0]


def test_svg_is_written_whole(run, tmp_path):
    path = tmp_path / "plan.svg"
    out = run("--pp", 2, "--vpp", 2, "--svg", path, "--json", "-")
    json.loads(out)
    root = ET.fromstring(path.read_text())
    assert "interleaved: 2 ranks, 2 chunks each, 4 microbatches" in "".join(root.itertext())
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.svg"]
    run("--pp", 4, "--svg", path)
    assert "4 ranks" in path.read_text()


def test_command_without_torch(config):
    """The whole command, with torch made impossible to import."""
    code = (
        "import sys\n"
        "for name in ('torch', 'megatron', 'transformer_engine', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "from chunkgraph.cli.__main__ import main\n"
        f"sys.exit(main(['plan', {config!r}, 'train.num_microbatches=[4]']))\n"
    )
    assert "slots for any legal number of microbatches" in output_of_python("-c", code)


def test_the_schedule_of_a_configuration_is_planned(run, config, tmp_path):
    config = (config, *_ONE_CHUNK)
    assert "zb-h1: slots" in run(*config, "pipeline.schedule=zb-h1")
    assert "1f1b: slots" in run(*config, "pipeline.schedule=zb-h1", "--schedule", "1f1b")
    path = csv_of(tmp_path, "zb-h1", num_ranks=2, num_microbatches=4)
    four = (*config, "train.num_microbatches=[4]")
    rows = json.loads(run(*four, "pipeline.schedule=zb-h1", "--json"))
    assert json.loads(run(*four, f"pipeline.schedule={path}", "--json")) == rows
    assert json.loads(run(*four, "--schedule", path, "--json")) == rows
    assert "1f1b: slots" in run(*four, f"pipeline.schedule={path}", "--schedule", "1f1b")


def csv_of(tmp_path, name, **sizes):
    path = tmp_path / "mine.csv"
    path.write_text(build_schedule(name, **sizes).to_csv())
    return path


def test_a_file_is_planned_with_its_own_sizes(run, tmp_path):
    path = csv_of(tmp_path, "zb-v", num_ranks=2, num_chunks=2, num_microbatches=4)
    out = run("--schedule", path)
    assert "mine.csv: slots for steps of 4 microbatches" in out
    assert "F: forward, I: input gradient, W: weight gradient" in " ".join(out.split())
    named = ("--pp", 2, "--schedule", "zb-v", "--num-microbatches", 4)
    assert json.loads(run("--schedule", path, "--json")) == json.loads(run(*named, "--json"))
    row = json.loads(run("--schedule", path, "--json"))[1]
    assert (row["slots_per_chunk"], row["num_graphs"]) == ([3, 2], 3 * 5)


def compared(out):
    """Return the cells of each schedule in a printed comparison."""
    lines = (line.split() for line in out.splitlines() if "%" in line)
    return {name.rstrip("*"): cells for name, *cells in lines}


def test_schedules_are_compared(run, config, tmp_path):
    out = run("--pp", 4, "--num-microbatches", 8, "--compare")
    cells = compared(out)
    assert set(cells) == set(list_schedules())
    assert cells["1f1b"] == ["1", "27.3%", "33.0", "1.000", "4"]
    assert cells["interleaved"] == ["2", "15.8%", "28.5", "0.864", "6"]
    assert "Recommended: zb-v, 0.773 times 1f1b's step time and 1.12 times its slots" in out
    assert [name for name in list_schedules() if f"{name}*" not in out] == [
        *("gpipe", "zb-v", "dualpipe-v")  # chunk graphs refuse the first
    ]
    assert "* Runs in Megatron with graphs; the best of these is interleaved-zb." in out
    # With a config only what Megatron runs is recommended, and memory has a column.
    out = run(config, "train.num_microbatches=[4]", "--compare")
    assert "Recommended: interleaved-zb, " in out
    assert out.count("iB") == len(list_schedules())
    assert max(len(line) for line in out.splitlines() if "Recommended" not in line) <= 80


def test_a_file_is_compared_with_the_schedules_by_name(run, config, tmp_path):
    path = csv_of(tmp_path, "interleaved-zb", num_ranks=2, num_chunks=2, num_microbatches=4)
    arguments = (config, "train.num_microbatches=[4]", "--compare", "--schedule", path)
    out = run(*arguments)
    assert " mine.csv* " in out
    other = tmp_path / "other.csv"
    other.write_text("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n")  # not in Megatron's order
    assert " other.csv " in run("--schedule", other, "--compare")
    cells = compared(out)
    assert cells["mine.csv"] == cells["interleaved-zb"]
    page = tmp_path / "plan.html"
    run(*arguments, "--html", page)
    assert [one["name"] for one in page_data(page.read_text())["schedules"]][-1] == str(path)


@pytest.mark.parametrize("name", list_schedules())
def test_table_pages_and_grid_of_a_schedule_have_the_same_numbers(run, tmp_path, name):
    """Steps in forwards of all layers of a rank, the bubble of the rank that idles most."""
    sizes = ("--pp", 3, "--num-microbatches", 9)
    page = tmp_path / "plan.html"
    cells = compared(run(*sizes, "--compare", "--html", page))[name]
    pages = {one["name"]: one for one in page_data(page.read_text())["schedules"]}
    out = run(*sizes, "--schedule", name, "--html", page)
    (alone,) = page_data(page.read_text())["schedules"]
    numbers = {
        (f"{one['makespan']:.1f}", f"{one['bubble_ratio']:.1%}") for one in (alone, pages[name])
    }
    assert numbers == {(cells[2], cells[1])}
    assert max(re.findall(r"\d+\.\d%", out), key=lambda share: float(share[:-1])) == cells[1]
    assert float(re.findall(r"time \S+ to (\S+)", out)[-1]) == pytest.approx(
        float(cells[2]), abs=0.06
    )


def test_options_without_effect_on_a_comparison_are_refused(run):
    with pytest.raises(ConfigError, match="--schedule has no effect with --compare"):
        run("--pp", 4, "--compare", "--schedule", "zb-h1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schedule", "mine.csv", "--pp", "2"), "--pp cannot be combined with mine.csv"),
        (("mine.csv",), "'mine.csv' is a schedule; write --schedule before it"),
        (("config.yaml", "--schedule", "mine.csv"), "has 2 ranks of 1 chunk, but the pipeline"),
        (
            ("config.yaml", *_ONE_CHUNK, "--schedule", "mine.csv", "--num-microbatches", "3"),
            "of 4 microbatches, but a step has 3. Change --num-microbatches",
        ),
        (("--schedule", "none.csv"), "none.csv: cannot read the schedule: No such file or dir"),
        (("--schedule", "bytes.csv"), "schedule 'bytes.csv', row 1, cell 1: '\ufffd' is not"),
        (("--schedule", "deadlock.csv"), "schedule 'deadlock.csv', rank 1, position 0: deadlock"),
    ],
)
@pytest.mark.usefixtures("config")
def test_a_file_that_cannot_be_planned_is_named(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    csv_of(tmp_path, "1f1b", num_ranks=2, num_microbatches=4)
    Path("deadlock.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    Path("bytes.csv").write_bytes(b"\xff")
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


# The picture of a step on a terminal.


@pytest.fixture(params=CASES, ids=lambda built: built.name)
def built(request):
    return request.param


def printed(grid, width=80):
    """Return the printed lines."""
    stream = io.StringIO()
    grid.print(Console(file=stream, width=width, highlight=False))
    return stream.getvalue().splitlines()


def words_of_ranks(lines, num_ranks, width=0):
    """Return the words of each rank's rows, one row after the other."""
    joined = dict.fromkeys(range(num_ranks), "")
    for line in lines:
        label, is_row, body = line.partition(" |")
        if is_row:
            joined[int(label.split()[1])] += body + " " * (width - len(line))
    return [body.replace("-", " ").split() for body in joined.values()]


def test_a_small_schedule():
    built = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    assert printed(Grid.of(built)) == [
        "time 0 to 9",
        "rank 0 |F0/0 F1/1           B0/0-----      B1/1-----",
        "rank 1 |     F0/0 B0/0----- F1/0 B1/0-----",
        "",
        "F3/0: microbatch 3, slot 0. F: forward, B: backward",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_the_width_and_keeps_every_action(built, width, monkeypatch):
    monkeypatch.setattr(plan_export, "_MAX_PANELS", 100)
    text = printed(Grid.of(built), width)
    assert max(map(len, text)) <= width
    words = words_of_ranks(text, built.num_ranks, width)
    for of_rank, actions in zip(words, built.actions, strict=True):
        shown = [word for word in of_rank if word[0] in "FBIW"]
        assert len(shown) == len(actions)


def test_a_long_step_ends_with_a_hint():
    built = build_schedule("1f1b", num_ranks=2, num_microbatches=200)
    assert "more panels: --svg FILE draws them" in printed(Grid.of(built))[-2]
