"""``chunkgraph bench``: run the same steps in each variant, in new processes, and compare."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from chunkgraph._outputs import (
    can_be_rewritten,
    check_output,
    is_stdout,
    output_file,
    stream_next_to,
    write_output,
)
from chunkgraph._text import REPORT_WIDTH, shorten
from chunkgraph.bench.choice import FROZEN, VARIANTS, chosen_variants, config_of, run_as
from chunkgraph.bench.document import BenchDocument, VariantResult
from chunkgraph.bench.merged_trace import merge_traces, read_traces
from chunkgraph.bench.plot import check_picture, plot_documents
from chunkgraph.bench.report import print_bench_report
from chunkgraph.cli.arguments import add_json
from chunkgraph.cli.train_setup import (
    STALL_GRACE_S,
    check_packages,
    resolve_device,
    run_folder,
    worker_environment,
)
from chunkgraph.errors import ChunkGraphError, ConfigError, OutputError
from chunkgraph.settings import Config, load_config, to_yaml

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser", "run"]

_WORKER = "chunkgraph.bench.worker:main"
_NUM_PROFILED_STEPS = 2


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "bench",
        help="measure chunk graphs against eager and Megatron's own CUDA graphs",
        description="Run the same steps eagerly, with chunk graphs and with each of Megatron's "
        "CUDA graph implementations, one after the other, and compare times, memory and results. "
        "A variant that fails is recorded with its error. Exit code 1 if a requested eager or "
        "chunk variant failed, or if the two differ.",
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file, as in configs/")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings that replace the file's, such as bench.num_steps=50",
    )
    parser.add_argument(
        "--variants",
        metavar="NAME,...",
        help=f"variants to run, in order; default {', '.join(VARIANTS)}, as far as supported "
        "(eager,chunk on a CPU and for packed documents), and chunk_NAME for each of "
        "bench.schedules. eager_dropless: an all-to-all without a capacity, for experts that have "
        "one. chunk_capacity: room for an even load, for experts without a capacity. eager_stash: "
        "Megatron's own paged stash, only with stash.enabled and HybridEP. With "
        "bench.runtime=torch: eager and chunk (1F1B), and eager_NAME and chunk_NAME of a schedule",
    )
    add_json(parser)
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=output_file,
        help="draw the results to FILE (.png, .svg or .pdf)",
    )
    parser.add_argument(
        "--plot-only",
        nargs="+",
        metavar="FILE.json",
        type=Path,
        help="run nothing; draw saved results (with --plot)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also profile kernels and the idle time between them (GPU)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=output_file,
        help="with --profile: write the profiled steps of the last variant, all ranks, as a trace "
        "for Perfetto",
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        help="longest time of one variant in seconds; default run.timeout_s",
    )
    parser.add_argument("--commit", help="commit to record; default that of the git repository")
    parser.add_argument(
        "--run-dir", metavar="DIR", type=Path, help="keep logs and traces in DIR (empty or new)"
    )
    parser.add_argument(
        "--debug", action="store_true", help="show tracebacks, and set run.debug=true"
    )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    _check_outputs(args)
    if args.plot_only is not None:
        return _plot_only(args)
    if args.config is None:
        msg = "bench needs a CONFIG, or --plot-only with result files."
        raise ConfigError(msg)
    overrides = [*args.overrides, "run.debug=true"] if args.debug else args.overrides
    config = resolve_device(load_config(args.config, overrides))
    if args.trace is not None and not (args.profile and config.device == "cuda"):
        msg = "--trace needs --profile and a GPU, whose kernels it shows."
        raise ConfigError(msg)
    names = chosen_variants(args.variants, config)
    _check_steps(config)
    if config.bench.runtime == "torch" and args.profile:
        msg = "--profile profiles the steps of bench.runtime=megatron only. Leave it out."
        raise ConfigError(msg)
    check_packages(config, uses_megatron=config.bench.runtime == "megatron")
    if args.timeout is not None and not args.timeout > 0:
        msg = f"--timeout {args.timeout:g}: expected seconds greater than 0."
        raise ConfigError(msg)
    with run_folder(args.run_dir) as folder:
        return _Bench(config, names, args, folder).run()


def _check_steps(config: Config) -> None:
    bench, capture = config.bench, config.capture
    if bench.num_warmup_steps <= capture.num_warmup_steps:
        msg = (
            f"bench.num_warmup_steps is {bench.num_warmup_steps}, but chunks are captured after "
            f"capture.num_warmup_steps = {capture.num_warmup_steps} steps; captures must not be "
            f"measured as steps. Set bench.num_warmup_steps to {capture.num_warmup_steps + 1} or "
            "more."
        )
        raise ConfigError(msg)


def _check_outputs(args: argparse.Namespace) -> None:
    check_output("--json", args.json)
    check_output("--trace", args.trace)
    check_picture(args.plot)
    if args.json and args.plot and is_stdout(args.json) and is_stdout(args.plot):
        msg = "--json and --plot cannot both be written to standard output."
        raise ConfigError(msg)


def _plot_only(args: argparse.Namespace) -> int:
    if args.plot is None:
        msg = "--plot-only needs --plot FILE, the picture to draw."
        raise ConfigError(msg)
    documents = []
    for path in args.plot_only:
        try:
            documents.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError) as error:
            msg = f"--plot-only {shorten(str(path))}: cannot be read: {shorten(str(error))}."
            raise ConfigError(msg) from None
    try:
        plot_documents(documents, args.plot)
    except (AttributeError, KeyError, TypeError) as error:
        msg = (
            f"--plot-only: a file is not a result of --json ({type(error).__name__}: "
            f"{shorten(str(error))})."
        )
        raise ConfigError(msg) from None
    return 0


class _Bench:
    """One run of the command."""

    def __init__(
        self, config: Config, names: Sequence[str], args: argparse.Namespace, folder: Path
    ) -> None:
        self._config = config
        self._names = names
        self._args = args
        self._folder = folder
        self._console = Console(stderr=True, highlight=False)
        self._document = BenchDocument.start(
            config, command=shlex.join(["chunkgraph", *sys.argv[1:]]), commit=args.commit
        )

    def run(self) -> int:
        """Run all variants, print the table, and return the exit code."""
        json_path, plot_path = self._args.json, self._args.plot
        for name in self._names:
            started = time.monotonic()
            result = self._run_variant(name)
            self._document.add(result)
            # Write after every variant, so that a killed bench keeps its measurements.
            if json_path is not None and can_be_rewritten(json_path):
                self._write_early(json_path)
            duration_s = time.monotonic() - started
            outcome = (
                f"failed: {result.error}" if result.error else f"{result.step_ms:.2f} ms a step"
            )
            self._print(f"{name}: {outcome} ({duration_s:.0f} s in total)")
        console = Console(
            file=stream_next_to(json_path, plot_path, self._args.trace),
            width=REPORT_WIDTH,
            highlight=False,
        )
        failures = print_bench_report(self._document, self._names, console)
        try:
            if json_path is not None:
                self._document.write(json_path)
        finally:
            if plot_path is not None:
                plot_documents([self._document.to_mapping()], plot_path)
        if self._args.trace is not None:
            self._write_trace(self._args.trace)
        return 1 if failures else 0

    def _write_trace(self, path: Path) -> None:
        traces = read_traces(self._folder / self._names[-1])
        if not traces:
            self._print(f"--trace {path}: {self._names[-1]} was not profiled; there is no trace")
            return
        write_output("--trace", path, merge_traces(traces))

    def _write_early(self, path: Path) -> None:
        """Write the results so far; a failure becomes an error only after all measurements."""
        try:
            self._document.write(path)
        except OutputError as error:
            self._print(str(error))

    def _run_variant(self, name: str) -> VariantResult:
        counts = set(self._config.train.num_microbatches)
        if name in FROZEN and len(counts) > 1:
            return VariantResult.failed(
                name,
                "needs the same number of microbatches in every step, and this run changes it "
                f"({min(counts)} to {max(counts)})",
            )
        from chunkgraph.jobs.launcher import Launcher

        config, folder = config_of(name, self._config), self._folder / name
        folder.mkdir()
        config_path = folder / "config.yaml"
        config_path.write_text(to_yaml(config), encoding="utf-8")
        request = {
            "variant": run_as(name),
            "label": name,
            # Host times are those of Megatron's chunks.
            **({"num_host_steps": 0} if config.bench.runtime == "torch" else {}),
            "num_profiled_steps": _NUM_PROFILED_STEPS if self._args.profile else 0,
        }
        (folder / "bench.json").write_text(json.dumps(request), encoding="utf-8")
        launch = partial(
            Launcher,
            command=("-m", "chunkgraph.jobs.worker_main", _WORKER, str(config_path), str(folder)),
            run_dir=folder,
            num_ranks=config.pipeline.world_size,
            stall_timeout_s=(self._args.timeout or config.run.timeout_s) + STALL_GRACE_S,
            # The profiler must not remove its hooks while graphs are alive.
            environment={**worker_environment(config), "TEARDOWN_CUPTI": "0"},
            debug=config.run.debug,
        )
        error: str | None = None
        with (folder / "output.log").open("w", encoding="utf-8") as log:
            try:
                launch(on_progress=self._progress, output=log.fileno()).run()
            except ChunkGraphError as failure:
                error = str(failure)
        return VariantResult.read(name, folder / "result.json", error)

    def _progress(self, event: Mapping[str, Any]) -> None:
        if event.get("event") != "step":
            return
        step, num_steps, kind = event["step"] + 1, event["num_steps"], event["kind"]
        where = f"step {step}/{num_steps}" if step <= num_steps else "further step"
        self._print(
            f"{event['phase']}: {where}{'' if kind == 'step' else f' ({kind})'}  "
            f"{event['num_microbatches']} microbatches, {event['step_ms']:.2f} ms, "
            f"loss {event['loss']:.6f}"
        )

    def _print(self, line: str) -> None:
        self._console.print(Text.from_ansi(line), soft_wrap=True)
