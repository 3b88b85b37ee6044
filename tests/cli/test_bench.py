from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from chunkgraph.bench.document import BenchDocument, VariantResult
from chunkgraph.bench.report import find_failures, print_bench_report
from chunkgraph.cli.__main__ import main
from chunkgraph.errors import ConfigError
from chunkgraph.settings import load_config

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "cpu" / "gpt_pp2_cpu.yaml")
EXPERTS = str(ROOT / "configs" / "gpu" / "moe_ep2_hybridep.yaml")
EXPERTS_ON_CPU = str(ROOT / "configs" / "cpu" / "moe_pp2_ep2_cpu.yaml")
EXPERTS_IN_PIPELINE = str(ROOT / "configs" / "gpu" / "moe_pp2_ep2.yaml")
DROPLESS = str(ROOT / "configs" / "bench" / "moe_ep1_dropless.yaml")
PACKED = str(ROOT / "configs" / "bench" / "packed_pp2_n64.yaml")
NAMES = ("eager", "chunk", "transformer_engine")


def values(**changes: Any) -> dict[str, Any]:
    """Return a small version of what rank 0 writes."""
    steps = [8, 4]
    return {
        "phase": "done",
        "device": "a GPU",
        "num_gpus": 2,
        "versions": {"torch": "2.11.0"},
        "step_ms": 100.0,
        "step_ms_all": [120.0, 80.0],
        "num_microbatches": steps,
        "reserved_bytes": 2**30,
        "allocated_bytes": 2**29,
        "num_captures_after_first": 0,
        "losses_hex": [(1.5).hex(), (1.25).hex()],
        "grad_norms_hex": [(2.0).hex(), (3.0).hex()],
        "parameters_sha256": ["a", "b"],
        **changes,
    }


def document(**changes_of_chunk: Any) -> BenchDocument:
    bench = BenchDocument.start(load_config(CONFIG), command="chunkgraph bench", commit=None)
    bench.add(VariantResult("eager", None, values()))
    bench.add(VariantResult("chunk", None, values(step_ms=40.0, **changes_of_chunk)))
    bench.add(VariantResult.failed("transformer_engine", "RuntimeError: illegal memory access"))
    return bench


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([CONFIG, "--variants", "eager,fast"], "unknown variant 'fast'"),
        ([CONFIG, "--variants", "eager,eager"], "each only once"),
        ([CONFIG, "--variants", ","], "name at least one"),
        ([CONFIG, "bench.num_warmup_steps=1"], "Set bench.num_warmup_steps to 2 or more"),
        ([CONFIG, "bench.num_steps=0"], "bench.num_steps is 0"),
        ([CONFIG, "--timeout", "0"], "greater than 0"),
        ([CONFIG, "--json", "/nowhere/out.json"], "/nowhere does not exist"),
        ([], "bench needs a CONFIG"),
        (["--plot-only", "missing.json"], "needs --plot"),
        (["--plot-only", "missing.json", "--plot", "out.png"], "missing.json: cannot be read"),
    ],
)
def test_bad_usage_ends_with_2_and_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_variants_of_one_count_are_refused_where_it_changes() -> None:
    from chunkgraph.cli.bench import _Bench

    class Arguments:
        commit = None
        profile = False
        timeout = None

    bench = _Bench(load_config(CONFIG), NAMES, Arguments(), Path())  # type: ignore[arg-type]
    result = bench._run_variant("transformer_engine")
    assert "(1 to 7)" in str(result.error)


def test_equal_variants_pass_and_another_systems_crash_does_not_fail() -> None:
    bench = document()
    assert find_failures(bench, NAMES) == []
    chunk = bench.to_mapping()["variants"][1]
    assert chunk["equal_to_eager"] is True
    assert chunk["first_difference"] is None


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"losses_hex": [(1.5).hex(), (1.2500001).hex()]}, "loss of step 2: 1.2500001 and 1.25"),
        ({"grad_norms_hex": [(2.5).hex(), (3.0).hex()]}, "gradient norm of step 1"),
        ({"parameters_sha256": ["a", "c"]}, "parameters of rank 1"),
    ],
)
def test_a_difference_fails_and_is_named(changes: dict[str, Any], where: str) -> None:
    bench = document(**changes)
    assert find_failures(bench, NAMES) == ["the variant chunk differs from eager"]
    chunk = bench.to_mapping()["variants"][1]
    assert chunk["equal_to_eager"] is False
    assert where in chunk["first_difference"]


def test_a_difference_is_reported_and_no_failure_where_kernels_need_not_repeat() -> None:
    other = [(1.5).hex(), (1.25 * 1.01).hex()]
    bench = document(is_deterministic=False, losses_hex=other)
    bench.head["is_deterministic"] = False
    assert find_failures(bench, NAMES) == []
    mapping = bench.to_mapping()
    assert mapping["is_deterministic"] is False
    chunk = mapping["variants"][1]
    assert chunk["equal_to_eager"] is False
    assert chunk["largest_loss_difference"] == pytest.approx(0.01)
    bench.head["num_gpus"] = 0  # a CPU repeats in any case
    assert find_failures(bench, NAMES) == ["the variant chunk differs from eager"]


def test_a_capture_in_a_measured_step_fails() -> None:
    (failure,) = find_failures(document(num_measured_captures=2), NAMES)
    assert "captured in 2 measured steps: raise bench.num_warmup_steps" in failure


def test_packed_documents_are_measured_eagerly_and_by_chunk_graphs() -> None:
    from chunkgraph.bench.choice import chosen_variants

    config = load_config(PACKED)
    assert config.device == "cuda"
    assert chosen_variants(None, config) == ("eager", "chunk")
    with pytest.raises(ConfigError, match="local does not support packed sequences"):
        chosen_variants("eager,local", config)


def test_sizes_of_microbatches_are_not_measured() -> None:
    from chunkgraph.bench.choice import chosen_variants

    changes = ["packing.context_parallel_sizes=[1]", "data.document_counts=[]"]
    with pytest.raises(ConfigError, match="bench does not support microbatches of several"):
        chosen_variants(None, load_config(PACKED, changes))


def test_experts_are_also_measured_without_a_capacity() -> None:
    from chunkgraph.bench.choice import chosen_variants, config_of, run_as

    experts = load_config(EXPERTS)
    assert chosen_variants(None, experts)[:3] == ("eager", "eager_dropless", "chunk")
    assert "eager_dropless" not in chosen_variants(None, load_config(CONFIG, ["device=cuda"]))
    with pytest.raises(ConfigError, match="eager_dropless is for experts"):
        chosen_variants("eager,eager_dropless", load_config(CONFIG))
    assert "eager_dropless" in chosen_variants("eager_dropless", load_config(EXPERTS_ON_CPU))
    packed = ["packing.max_packed_seqs=8", "train.micro_batch_size=1"]
    with pytest.raises(ConfigError, match="eager_dropless is Megatron's own dispatch"):
        chosen_variants("eager,eager_dropless", load_config(EXPERTS_IN_PIPELINE, packed))
    config = config_of("eager_dropless", experts)
    assert (experts.moe.moe_token_dispatcher_type, experts.capture.enabled) == ("flex", True)
    assert (config.moe.moe_token_dispatcher_type, config.capture.enabled) == ("alltoall", False)
    assert config.moe.moe_expert_capacity_factor is None
    assert (run_as("eager_dropless"), run_as("local")) == ("eager", "local")
    assert config_of("chunk", experts).moe == experts.moe


def test_dropless_experts_are_also_measured_with_a_capacity() -> None:
    from chunkgraph.bench.choice import chosen_variants, config_of, run_as
    from chunkgraph.bench.variants import LocalVariant

    for changes, mlp in (([], []), (["moe.moe_layer_freq=[0,1,1,1,1,1,1,1]"], ["mlp"])):
        config = load_config(DROPLESS, changes)
        names = ("eager", "chunk", "chunk_capacity", "transformer_engine", "local")
        assert chosen_variants(None, config) == names
        assert chosen_variants("eager,chunk_capacity", config) == ("eager", "chunk_capacity")
        # Megatron's own graphs contain what it can capture of such a layer.
        modules = LocalVariant._modules(SimpleNamespace(config=config))  # type: ignore[arg-type]
        assert modules == ["attn", *mlp, "moe_router", "moe_preprocess"]
    settings = config_of("chunk_capacity", config)
    assert (settings.moe.moe_expert_capacity_factor, settings.moe.token_drops) == (1.0, "count")
    assert run_as("chunk_capacity") == "chunk"
    for name in ("eager_dropless", "full_iteration"):
        with pytest.raises(ConfigError, match=f"{name} .*moe_expert_capacity_factor is null"):
            chosen_variants(name, config)
    with pytest.raises(ConfigError, match="chunk_capacity is compared with experts that take all"):
        chosen_variants("chunk_capacity", load_config(EXPERTS))


def test_the_stash_is_also_compared_with_megatrons() -> None:
    from chunkgraph.bench.choice import chosen_variants, config_of, run_as

    both = load_config(EXPERTS, ["stash.enabled=true"])
    assert chosen_variants(None, both)[:4] == ("eager", "eager_dropless", "eager_stash", "chunk")
    assert config_of("eager_stash", both).stash == both.stash
    assert run_as("eager_stash") == "eager_stash"
    assert "eager_stash" not in chosen_variants(None, load_config(EXPERTS))
    with pytest.raises(ConfigError, match="eager_stash is compared with chunkgraph"):
        chosen_variants("eager,eager_stash", load_config(EXPERTS))
    for name in (CONFIG, EXPERTS_IN_PIPELINE):
        with pytest.raises(ConfigError, match="Megatron's stash, which only supports HybridEP"):
            chosen_variants("eager_stash", load_config(name))


def test_what_drops_no_token_need_not_equal_what_does() -> None:
    bench = document()
    other = values(losses_hex=["0x1.8p+1", "0x1.0p+1"])
    bench.add(VariantResult("eager_dropless", None, other))
    assert bench.equality(bench.results[-1]) == (None, None)
    assert find_failures(bench, (*NAMES, "eager_dropless")) == []
    bench.add(VariantResult("local", None, other))
    assert bench.equality(bench.results[-1])[0] is False


def printed(bench: BenchDocument) -> str:
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        print_bench_report(bench, NAMES, console)
    return capture.get()


def test_the_title_names_what_ran() -> None:
    assert printed(document()).splitlines()[0].endswith(" on 2 x a GPU")
    failed = BenchDocument.start(load_config(CONFIG), command="chunkgraph bench", commit=None)
    failed.add(VariantResult.failed("eager", "no ranks started"))
    assert printed(failed).splitlines()[0].endswith(" on no device")


def test_a_table_of_what_experts_cost() -> None:
    profiled = {
        "kernel_ms_by_rank": [20.0, 40.0],
        "dispatch_ms_by_rank": [1.0, 10.0],
        "stash_ms_by_rank": [0.0, 2.0],
    }
    shown = printed(document(**profiled))
    row = next(line for line in shown.splitlines() if line.startswith("chunk") and "25.0%" in line)
    assert row.split() == ["chunk", "10.0", "25.0%", "2.0", "5.0%"]
    assert "dispatch" not in printed(document(kernel_ms_by_rank=[1.0], dispatch_ms_by_rank=[0.0]))


def test_a_table_of_where_a_step_is_idle() -> None:
    places = ("before_graphs", "in_graphs", "between_graphs", "after_graphs")
    idle = [dict(zip(places, (rank + 0.25, 2.5, 3.0, 4.126), strict=True)) for rank in (0, 1)]
    shown = printed(document(kernel_ms_by_rank=[20.0, 40.0], idle_ms_by_rank=idle))
    assert max(map(len, shown.splitlines())) <= 80
    row = next(line for line in shown.splitlines() if "4.13" in line)
    assert row.split() == ["chunk", "1.25", "2.50", "3.00", "4.13"]
    for nothing in (None, [{}, {}]):  # no profile, no graphs
        assert "idle" not in printed(document(kernel_ms_by_rank=[1.0, 1], idle_ms_by_rank=nothing))


def test_a_table_of_fallbacks_and_padding() -> None:
    shares = {"misfit_share": 0.0625, "expected_misfit_share": 0.0619, "padding_waste": 0.1}
    bench = document(fallback_share=0.4, step_ms_mean=77.7, replayed_step_ms=50.0, **shares)
    text = printed(bench)
    assert max(map(len, text.splitlines())) <= 80
    for cell in ("40.0%", "6.2%", "10.0%", "77.7", "50.0"):
        assert cell in text


def test_a_later_capture_fails() -> None:
    bench = document(num_captures_after_first=2)
    assert find_failures(bench, NAMES) == ["the variant chunk captured after its first session"]


def test_a_promised_variant_that_did_not_run_fails() -> None:
    bench = BenchDocument.start(load_config(CONFIG), command="", commit=None)
    bench.add(VariantResult.failed("eager", "no memory"))
    assert find_failures(bench, ("eager",)) == ["the variant eager did not run"]
    assert find_failures(bench, ("local",)) == []


def test_a_failure_after_the_measured_steps_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(values(phase="host")))
    result = VariantResult.read("chunk", path, "Rank 0 was killed")
    assert result.error is None
    assert result.step_ms == 100.0
    assert result.note == "failed after phase 'host': Rank 0 was killed"
    assert VariantResult.read("chunk", tmp_path / "none.json", "no memory").error == "no memory"


def test_tables_are_80_wide_and_show_ratios() -> None:
    console = Console(width=80, record=True, highlight=False, quiet=True)
    assert print_bench_report(document(kernel_share=0.981, ideal_ms=38.0), NAMES, console) == []
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        print_bench_report(document(kernel_share=0.981, ideal_ms=38.0), NAMES, console)
    text = capture.get()
    assert max(map(len, text.splitlines())) <= 80
    assert "0.400" in text
    assert "0.981" in text
    assert "1.053" in text  # 40 of 38 ms
    assert "failed" in text
    assert "illegal memory access" in text


def test_a_slow_gpu_is_reported() -> None:
    assert "equally fast" not in printed(document(matmul_tflops_by_rank=[None, None]))
    assert "equally fast" not in printed(document(matmul_tflops_by_rank=[700.0, 650.0]))
    text = " ".join(printed(document(matmul_tflops_by_rank=[401.2, 702.9])).split())
    assert "chunk: the GPUs differ in speed, and times are those of the slowest" in text
    assert "by rank: 401, 703)" in text


def test_document_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    document().write(path)
    read = json.loads(path.read_text())
    assert read["device"] == "a GPU"
    assert read["num_gpus"] == 2
    assert [v["name"] for v in read["variants"]] == list(NAMES)
    assert list(tmp_path.iterdir()) == [path]


def test_results_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results, picture = tmp_path / "out.json", tmp_path / "out.png"
    document().write(results)
    arguments = ["--plot-only", str(results), str(results), "--plot", str(picture)]
    assert main(["bench", *arguments]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bars_are_relative_to_eager_and_missing_ones_are_hatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from chunkgraph.bench import plot

    figures: list[Any] = []
    monkeypatch.setattr(plot, "write_picture", lambda figure, _: figures.append(figure))

    def variant(name: str, step_ms: float | None) -> dict[str, Any]:
        error = None if step_ms else "no"
        return {"name": name, "error": error, "step_ms": step_ms, "reserved_bytes": 2**30}

    def result(seq_length: int, *variants: dict[str, Any]) -> dict[str, Any]:
        settings = {
            "model": {"seq_length": seq_length},
            "pipeline": {"pipeline_model_parallel_size": 2},
        }
        head = {"config": "x", "device": "a GPU", "num_gpus": 2, "settings": settings}
        return {**head, "variants": list(variants)}

    short = result(256, variant("eager", 100.0), variant("chunk", 25.0), variant("local", None))
    long = result(4096, variant("eager", 200.0), variant("chunk", 150.0), variant("local", 180.0))
    plot.plot_documents([short, long], tmp_path / "x.png")
    times, memory = figures[0].axes
    assert [label.get_text() for label in times.get_yticklabels()] == [
        "PP 2, sequence 256",
        "PP 2, sequence 4096",
    ]
    texts = [text.get_text() for text in times.texts]
    expected = {"1.00   100 ms", "1.00   200 ms", "0.90   180 ms", "0.25   25 ms"}
    assert set(texts) == {*expected, "0.75   150 ms", "not run"}
    assert sum(bar.get_hatch() is not None for bar in times.patches) == 1
    assert memory.get_xlabel() == "peak reserved memory, eager training = 1"
    plot.plot_documents([short, result(512, variant("chunk", 3.0))], tmp_path / "x.png")
    label = "step time, eager training (the largest where it did not run) = 1"
    assert figures[1].axes[0].get_xlabel() == label


def test_traces_of_ranks_become_one(tmp_path: Path) -> None:
    from chunkgraph.bench.merged_trace import merge_traces, read_traces

    for rank in (0, 1, 10):
        events = [
            {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
            {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": 5.0, "dur": 1.0},
            {"ph": "s", "id": 3, "pid": "Spans", "ts": 1.0},
        ]
        trace = {"baseTimeNanoseconds": 1000 * rank, "traceEvents": events}
        (tmp_path / f"trace_rank{rank}.json").write_text(json.dumps(trace))
    merged = json.loads(merge_traces(read_traces(tmp_path)))["traceEvents"]
    assert [e["args"]["name"] for e in merged if e["ph"] == "M"] == [
        "rank 0: python",
        "rank 1: python",
        "rank 2: python",
    ]
    assert [e["ts"] for e in merged if e["ph"] == "X"] == [5.0, 6.0, 15.0]
    assert len({e["pid"] for e in merged}) == 9
    assert len({e["id"] for e in merged if "id" in e}) == 3


def test_a_trace_needs_a_gpu_and_the_profiler(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(CONFIG), "--trace", "x.json"]) == 2
    assert "--trace needs --profile and a GPU" in capsys.readouterr().err


def test_a_commit_that_is_named_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from chunkgraph.bench import document as bench_document

    monkeypatch.setattr(bench_document, "_commit", lambda: "of the checkout")
    for named, recorded in (("v1.0", "v1.0"), (None, "of the checkout")):
        bench = BenchDocument.start(load_config(CONFIG), command="", commit=named)
        assert bench.head["commit"] == recorded


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench = BenchDocument.start(load_config(CONFIG), command="", commit=None)
    bench.write(tmp_path / "out.json")
    arguments = ["--plot-only", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    assert main(["bench", *arguments]) == 2
