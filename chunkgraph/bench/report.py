"""Print the tables of ``chunkgraph bench``, in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from chunkgraph._text import REPORT_WIDTH
from chunkgraph.bench.choice import PROMISED, run_as, schedule_of
from chunkgraph.bench.document import BenchDocument, VariantResult
from chunkgraph.bench.simulated import PIPELINE_SIZES, merged_costs
from chunkgraph.schedules import megatron_schedule_name
from chunkgraph.settings.pipeline import splits_backward

__all__ = ["find_failures", "print_bench_report"]

_SHORT = {
    "eager_dropless": "dropless",
    "eager_stash": "stash",
    "transformer_engine": "te layers",
    "full_iteration": "full iter.",
    "eager_interleaved": "eager interl.",
    "chunk_interleaved-zb": "interl.-zb",
    "eager_interleaved-zb": "eager interl.-zb",
}

_WITHOUT_HALVES = """\
Zero bubble is not simulated: no I and W were timed. Run a variant whose
schedule splits backwards."""
_WITHOUT_EMBEDDING = """\
A chunk with Megatron's embedding has no input gradient: capture.scope=block
leaves the embedding out."""


def print_bench_report(
    document: BenchDocument, names: Sequence[str], console: Console | None = None
) -> list[str]:
    """Print the tables and return the failures, which fail the command."""
    console = console or Console(width=REPORT_WIDTH, highlight=False)
    head = document.head
    gpus = f"{head['num_gpus']} x {head['device']}" if head["num_gpus"] else head["device"]
    console.print(f"{head['config']} on {gpus or 'no device'}")
    console.print(_steps_table(document))
    packed = _packed_table(document)
    if packed.row_count:
        console.print(packed)
    if not document.demands_equality:
        console.print("kernels are not deterministic here: differences do not fail")
    details = _details_table(document)
    if details.row_count:
        console.print(details)
    for table in (_experts_table(document), _idle_table(document)):
        if table.row_count:
            console.print(table)
    simulated = _simulated_table(document)
    if simulated.row_count:
        times = {**document.costs_ms, "optimizer": document.optimizer_ms}
        costs = ", ".join(f"{name} {ms:.2f}" for name, ms in times.items() if ms is not None)
        console.print(f"simulated with {costs} ms")
        console.print(simulated)
        if _lacks_halves(document):
            console.print(_WITHOUT_HALVES)
            if document.config is not None and document.config.bench.runtime == "megatron":
                console.print(_WITHOUT_EMBEDDING)
    for line in _uneven_gpus(document):
        console.print(line, markup=False)
    for result in document.results:
        _, difference = document.equality(result)
        for what, text in (("", result.error), (" differs in", difference), ("", result.note)):
            if text:
                first_line = text.strip().splitlines()[0]
                console.print(f"{result.name}{what}: {first_line}", markup=False)
    failures = find_failures(document, names)
    for failure in failures:
        console.print(f"FAILED: {failure}", style="bold red", markup=False)
    if not failures:
        console.print("OK", style="bold green")
    return failures


def _uneven_gpus(document: BenchDocument) -> list[str]:
    """Describe each variant whose run had one GPU clearly slower than another."""
    lines = []
    for result in document.results:
        speeds = [s for s in result.get("matmul_tflops_by_rank") or () if s is not None]
        if speeds and min(speeds) < 0.9 * max(speeds):
            shown = ", ".join(f"{speed:.0f}" for speed in speeds)
            lines.append(
                f"{result.name}: the GPUs differ in speed, and times are those of the slowest "
                f"(TFLOP/s of bfloat16 products by rank: {shown})"
            )
    return lines


def find_failures(document: BenchDocument, names: Sequence[str]) -> list[str]:
    """List the failures.

    Eager, chunk and schedules must run, be equal, and not capture late. The halves of a backward
    must have its GEMMs.
    """
    failures = []
    for name in names:
        if name not in PROMISED and schedule_of(name) is None:
            continue
        result = document.result(name)
        if result is None:
            failures.append(f"the variant {name} did not run")
            continue
        is_equal, _ = document.equality(result)
        if is_equal is False and document.demands_equality:
            failures.append(f"the variant {name} differs from eager")
        if number := result.get("num_measured_captures"):
            failures.append(
                f"the variant {name} captured in {number} measured steps: raise "
                "bench.num_warmup_steps"
            )
        if result.get("num_captures_after_first"):
            failures.append(f"the variant {name} captured after its first session")
    gemms = merged_costs(result.get("num_gemms") for result in document.results)
    if {"B", "I", "W"} <= gemms.keys() and gemms["I"] + gemms["W"] != gemms["B"]:
        failures.append(
            f"a backward has {gemms['B']:g} GEMMs, but its halves {gemms['I']:g} + {gemms['W']:g}"
        )
    return failures


def _steps_table(document: BenchDocument) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("variant", no_wrap=True, min_width=10)
    layers = document.result("transformer_engine")
    of = ("of\neager", "of te\nlayers") if layers is not None else ("of\neager",)
    for heading in (
        *("ms a\nstep", *of, "tokens\n/ s", "MB re-\nserved", *of),
        *("cap-\nture s", "last\nbit"),
    ):
        table.add_column(heading, justify="right", no_wrap=True, min_width=6)
    for result in document.results:
        if result.error is not None:
            table.add_row(_name(result), "failed")
            continue
        # With torch each schedule also runs eagerly.
        own = document.result(f"eager_{schedule_of(result.name)}")
        eager = own or document.result("eager")
        others = (eager, layers) if layers is not None else (eager,)
        table.add_row(
            _name(result),
            _number(result.get("step_ms"), 1),
            *(_ratio(result, other, "step_ms") for other in others),
            _number(result.get("tokens_per_s"), 0),
            _megabytes(result.get("reserved_bytes")),
            *(_ratio(result, other, "reserved_bytes") for other in others),
            _number(result.get("capture_s"), 1),
            _equality(document, result),
        )
    return table


def _packed_table(document: BenchDocument) -> Table:
    """Show fallbacks and padding of packed documents; no row without them."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("variant", no_wrap=True, min_width=10)
    for heading in (
        *("eager\nsteps", "ex-\npected", "micro-b.\nmisfit", "ex-\npected", "padding"),
        *("mean ms\na step", "replayed\nmedian", "eager\nmedian"),
    ):
        table.add_column(heading, justify="right", no_wrap=True, min_width=7)
    for result in document.results:
        if result.error is not None or result.get("padding_waste") is None:
            continue
        has_graphs = run_as(result.name) != "eager"
        table.add_row(
            _name(result),
            _percent(result.get("fallback_share") if has_graphs else None),
            _percent(result.get("expected_misfit_steps") if has_graphs else None),
            _percent(result.get("misfit_share")),
            _percent(result.get("expected_misfit_share")),
            _percent(result.get("padding_waste")),
            _number(result.get("step_ms_mean"), 1),
            _number(result.get("replayed_step_ms"), 1),
            _number(result.get("fallback_step_ms"), 1),
        )
    return table


def _details_table(document: BenchDocument) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("variant", no_wrap=True, min_width=10)
    for heading in (
        *("host us\nforward", "w/o\nlaunch", "host us\nbackward", "w/o\nlaunch"),
        *("kernel\nms", "kernel\nshare", "ideal\nms", "step of\nideal"),
    ):
        table.add_column(heading, justify="right", no_wrap=True, min_width=6)
    for result in document.results:
        if result.error is not None:
            continue
        kernel_ms = result.get("kernel_ms_by_rank")
        ideal = result.get("ideal_ms")
        cells = [
            _number(result.get("host_us_forward"), 1),
            _number(result.get("host_us_forward_without_launch"), 1),
            _number(result.get("host_us_backward"), 1),
            _number(result.get("host_us_backward_without_launch"), 1),
            _number(max(kernel_ms) if kernel_ms else None, 1),
            _number(result.get("kernel_share"), 3),
            _number(ideal, 1),
            _number(result.step_ms / ideal if ideal else None, 3),
        ]
        if set(cells) != {"-"}:
            table.add_row(_name(result), *cells)
    return table


def _experts_table(document: BenchDocument) -> Table:
    """Show the profiled cost of experts without their products; no row without experts.

    The times are those of the rank with the longest kernel time, including waits for other ranks.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("variant", no_wrap=True, min_width=10)
    for heading in ("dispatch\nms", "of kernel\nms", "stash\nms", "of kernel\nms"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=9)
    for result in document.results:
        kernel_ms = result.get("kernel_ms_by_rank")
        parts = [result.get(f"{part}_ms_by_rank") for part in ("dispatch", "stash")]
        if result.error is not None or not kernel_ms or not any(any(p or ()) for p in parts):
            continue
        rank = kernel_ms.index(max(kernel_ms))
        cells = []
        for part in parts:
            part_ms = part[rank] if part else None
            cells += [_number(part_ms, 1), _percent(part_ms and part_ms / kernel_ms[rank])]
        table.add_row(_name(result), *cells)
    return table


def _idle_table(document: BenchDocument) -> Table:
    """Show where a step with graphs is idle in the profile; exchange between ranks is idle time.

    The times are those of the rank with the longest kernel time. Time between graphs includes the
    pipeline's bubbles.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("variant", no_wrap=True, min_width=10)
    places = ("before_graphs", "in_graphs", "between_graphs", "after_graphs")
    for place in places:
        table.add_column(f"idle ms\n{place.replace('_', ' ')}", justify="right", no_wrap=True)
    for result in document.results:
        kernel_ms, idle = result.get("kernel_ms_by_rank"), result.get("idle_ms_by_rank")
        if result.error is None and kernel_ms and idle and any(idle):
            of_rank = idle[kernel_ms.index(max(kernel_ms))]
            table.add_row(_name(result), *(_number(of_rank.get(place), 2) for place in places))
    return table


def _lacks_halves(document: BenchDocument) -> bool:
    """Return whether a schedule of split backwards was asked for, without times of the halves."""
    names = () if document.config is None else document.config.bench.schedules
    return any(map(splits_backward, names)) and not {"I", "W"} <= document.costs_ms.keys()


def _simulated_table(document: BenchDocument) -> Table:
    """Show simulated steps by pipeline size, and the measured step of the run's size."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("schedule", no_wrap=True, min_width=10)
    for size in PIPELINE_SIZES:
        for heading in (f"P = {size}\nms", "of\n1f1b"):
            table.add_column(heading, justify="right", no_wrap=True, min_width=6)
    pipeline = document.config and document.config.pipeline
    own_size = pipeline and pipeline.pipeline_model_parallel_size
    table.add_column(f"measured\nat P = {own_size}", justify="right", no_wrap=True, min_width=10)
    steps = document.simulated_step_ms
    for name, of_size in steps.items():
        cells = []
        for size in PIPELINE_SIZES:
            ms, base = of_size.get(str(size)), steps["1f1b"].get(str(size))
            cells += [_number(ms, 1), _number(ms / base if ms and base else None, 3)]
        table.add_row(name, *cells, _number(_measured_ms(document, name), 1))
    return table


def _measured_ms(document: BenchDocument, schedule: str) -> float | None:
    """Return the step time of chunk graphs under a schedule, if all steps have one size."""
    config = document.config
    if config is None or len(set(config.train.num_microbatches)) > 1:
        return None
    pipeline = config.pipeline
    own = pipeline.schedule
    if own == "auto":
        own = megatron_schedule_name(
            pipeline.pipeline_model_parallel_size, pipeline.num_model_chunks
        )
    name = f"chunk_{schedule}"
    result = document.result(name) or (document.result("chunk") if own == schedule else None)
    return None if result is None else result.step_ms


def _name(result: VariantResult) -> str:
    if (short := _SHORT.get(result.name)) is not None:
        return short
    schedule = schedule_of(result.name)
    if schedule is None:
        return result.name
    return schedule if run_as(result.name) == "chunk" else f"eager {schedule}"


def _equality(document: BenchDocument, result: VariantResult) -> str:
    is_equal = document.equality(result)[0]
    if is_equal is None:
        return "-"
    return "equal" if is_equal else "DIFFERS" if document.demands_equality else "no"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _number(value: Any, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _megabytes(value: int | None) -> str:
    """Format bytes in MB of 2^20 bytes, like torch and nvidia-smi."""
    return f"{value / 2**20:.0f}" if value else "-"


def _ratio(result: VariantResult, base: VariantResult | None, key: str) -> str:
    if base is None or not base.get(key) or result.get(key) is None:
        return "-"
    return f"{result.get(key) / base.get(key):.3f}"
