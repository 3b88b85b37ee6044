"""Compare eager training, chunk graphs and Megatron's CUDA graphs on one configuration.

    python benchmarks/training.py configs/bench/dense_pp2.yaml --variants eager,chunk

Every variant trains the same steps, one after the other in processes of its own, in each of
`--rounds` rounds: a host that slows down slows all of them. The table has medians over all rounds.
Host times are of the slowest rank: of the schedule's call, which waits for transfers where there is
a pipeline, and of one forward step. Memory is the peak that torch reserved on the fullest rank.

A variant is `eager`, `chunk`, or Megatron's `transformer_engine`, `local` or `full_iteration`, with
settings of its own after a plus sign: `chunk+pipeline.schedule=zb-h1`.

Exit code 1 if `eager` or `chunk` failed, captured in measured steps, or if they differ under
deterministic kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chunkgraph.cli.train import check_packages, resolve_device, worker_environment
from chunkgraph.errors import ChunkGraphError
from chunkgraph.settings import Config, load_config, to_mapping

WORKER = Path(__file__).with_name("training_worker.py")
ERROR_MARK = "benchmark error: "
IMPLEMENTATIONS = ("eager", "chunk", "transformer_engine", "local", "full_iteration")
FIXED_COUNT = IMPLEMENTATIONS[2:]
"""Megatron's graphs, which cannot change the number of microbatches."""


@dataclass
class Variant:
    """A variant and its results.

    Attributes:
        name: As on the command line: the implementation, then its settings.
        config: The run's configuration with these settings.
        rounds: What the workers wrote, one mapping a round.
        error: Why the last run failed, or None.
    """

    name: str
    overrides: list[str]
    config: Config
    rounds: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None

    @property
    def implementation(self) -> str:
        """Return the part of the name before the settings."""
        return self.name.partition("+")[0]

    @property
    def must_be_equal(self) -> bool:
        """Return whether a failure or a difference fails the command."""
        own_settings, same_model = self.name.split("+")[1:], ("pipeline.", "capture.", "stash.")
        changes_model = any(not s.startswith(same_model) for s in own_settings)
        return self.implementation in ("eager", "chunk") and not changes_model

    def steps(self, key: str) -> list[Any]:
        """Return a list of values by step, of all rounds together."""
        return [value for one in self.rounds for value in one[key]]

    def median(self, key: str) -> float | None:
        """Return the median of a value over the rounds; None if it was not measured."""
        values = [one[key] for one in self.rounds if one[key] is not None]
        return statistics.median(values) if values else None


def main() -> int:
    """Run the command and return the exit code."""
    args = _arguments()
    try:
        variants = [_variant(name, args) for name in args.variants.split(",")]
        for variant in variants:
            check_packages(variant.config)
    except ChunkGraphError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for number in range(args.rounds):
        for variant in variants:
            if variant.error is None:
                _run(variant, args, f"round {number + 1}/{args.rounds}")
        if args.json is not None:  # after each round: a killed run keeps its measurements
            args.json.write_text(json.dumps(_document(variants, args), indent=1) + "\n")
    print(_table(variants))
    failures = _failures(variants)
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file, as in configs/bench/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="its settings")
    parser.add_argument("--variants", default="eager,chunk", help="comma-separated; %(default)s")
    parser.add_argument("--rounds", type=_positive, default=2, help="%(default)s")
    parser.add_argument(
        "--num-steps", type=_positive, default=20, help="measured steps of a round; %(default)s"
    )
    parser.add_argument(
        "--num-warmup-steps",
        type=_positive,
        default=3,
        help="steps before them, in which graphs are captured; %(default)s",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also profile two steps of each variant: the share of their time with a kernel (GPU)",
    )
    parser.add_argument(
        "--router-skew",
        type=float,
        default=0.0,
        metavar="S",
        help="prefer some experts by a bias from 0 to S on their scores; in every layer others",
    )
    parser.add_argument(
        "--document-counts",
        type=int,
        nargs=4,
        default=(),
        metavar="N",
        help="draw the number of documents of a packed microbatch, which 50%%, 90%%, 99%% and "
        "100%% of the microbatches do not exceed",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the workers' output")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds of one variant; %(default)s"
    )
    return parser.parse_args()


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 1")
    return number


def _variant(name: str, args: argparse.Namespace) -> Variant:
    """Return a variant with its configuration.

    Raises:
        ChunkGraphError: The name, a setting, or the number of warmup steps is wrong.
    """
    implementation, *own = name.strip().split("+")
    if implementation not in IMPLEMENTATIONS:
        raise ChunkGraphError(
            f"--variants: unknown variant {implementation!r}; choose from "
            f"{', '.join(IMPLEMENTATIONS)}."
        )
    # Without settings of their own, the others run Megatron's schedule.
    schedule = [] if implementation == "chunk" else ["pipeline.schedule=auto"]
    overrides = [*args.overrides, "train.compare=none", *schedule, *own]
    config = resolve_device(load_config(args.config, overrides))
    if implementation == "chunk" and args.num_warmup_steps <= config.capture.num_warmup_steps:
        raise ChunkGraphError(
            f"--num-warmup-steps is {args.num_warmup_steps}, but chunks are captured after "
            f"capture.num_warmup_steps = {config.capture.num_warmup_steps} steps, and captures are "
            f"not to be measured. Set it to {config.capture.num_warmup_steps + 1} or more."
        )
    return Variant(name.strip(), overrides, config)


def _run(variant: Variant, args: argparse.Namespace, where: str) -> None:
    """Train a variant in new processes, and add its results or its error."""
    counts = set(variant.config.train.num_microbatches)
    if variant.implementation in FIXED_COUNT:
        if variant.config.device == "cpu":
            variant.error = "captures CUDA graphs, and needs a GPU"
        elif len(counts) > 1:
            variant.error = "needs the same number of microbatches in every step"
    if variant.error is None:
        with tempfile.TemporaryDirectory() as folder:
            _train(variant, args, Path(folder))
    outcome = f"failed: {variant.error}"
    if variant.error is None:
        outcome = f"{statistics.median(variant.rounds[-1]['step_ms']):.2f} ms a step"
    print(f"{where}, {variant.name}: {outcome}", file=sys.stderr)


def _train(variant: Variant, args: argparse.Namespace, folder: Path) -> None:
    request = {
        "variant": variant.implementation,
        "config": args.config,
        "overrides": [*variant.overrides, f"device={variant.config.device}"],
        "num_warmup_steps": args.num_warmup_steps,
        "num_steps": args.num_steps,
        "profiles": args.profile,
        "router_skew": args.router_skew,
        "document_counts": args.document_counts,
    }
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    num_ranks = str(variant.config.pipeline.world_size)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
        *(num_ranks, str(WORKER), str(folder / "request.json"), str(folder / "result.json")),
    ]
    # The profiler must not remove its hooks while graphs are alive.
    environment = {**worker_environment(variant.config), "TEARDOWN_CUPTI": "0", **os.environ}
    log = folder / "output.log"
    with log.open("w") as output:
        job = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            job.wait(timeout=args.timeout)
        except subprocess.TimeoutExpired:
            variant.error = f"was not done after --timeout {args.timeout:g} s"
        finally:
            job.terminate()  # torchrun then ends its workers
            job.wait()
    text = log.read_text(errors="replace")
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
        (args.logs / f"{variant.name}.{len(variant.rounds)}.log").write_text(text)
    if job.returncode == 0:
        variant.rounds.append(json.loads((folder / "result.json").read_text(encoding="utf-8")))
    elif variant.error is None:
        errors = [line for line in text.splitlines() if line.startswith(ERROR_MARK)]
        last = text.strip().splitlines()[-1:]
        variant.error = errors[0].removeprefix(ERROR_MARK) if errors else f"no results: {last}"


def _difference(variant: Variant, variants: Sequence[Variant]) -> str | None:
    """Return where a variant first differs from the first eager round; None if nowhere."""
    eager = _eager(variants)
    assert eager is not None
    base = eager.rounds[0]
    for one in variant.rounds:
        for key, what in (("losses", "loss"), ("grad_norms", "gradient norm")):
            for step, (left, right) in enumerate(zip(one[key], base[key], strict=True)):
                if left != right:
                    values = f"{float.fromhex(left)!r} and {float.fromhex(right)!r}"
                    return f"{what} of step {step + 1}: {values}"
        if one["parameters_sha256"] != base["parameters_sha256"]:
            return "parameters after the last step"
    return None


def _eager(variants: Sequence[Variant]) -> Variant | None:
    return next((v for v in variants if v.implementation == "eager" and v.rounds), None)


def _failures(variants: Sequence[Variant]) -> list[str]:
    failures = []
    for variant in variants:
        if not variant.must_be_equal:
            continue
        if variant.error is not None:
            failures.append(f"{variant.name}: {variant.error}")
        if not variant.rounds:
            continue
        if number := sum(one["num_captures"] for one in variant.rounds):
            failures.append(f"{variant.name}: {number} captures in measured steps")
        is_deterministic = all(one["is_deterministic"] for one in variant.rounds)
        if _eager(variants) and is_deterministic and (where := _difference(variant, variants)):
            failures.append(f"{variant.name} differs from eager: {where}")
    return failures


def _measured(variant: Variant, variants: Sequence[Variant]) -> dict[str, Any]:
    """Return the numbers of a variant that finished a round."""
    times = variant.steps("step_ms")
    eager = _eager(variants)
    is_fallback = variant.steps("is_fallback")
    replayed = [ms for ms, is_eager in zip(times, is_fallback, strict=True) if not is_eager]
    reserved = max(one["reserved_bytes"] for one in variant.rounds)
    tenths = statistics.quantiles(times, n=10) if len(times) > 1 else times * 9
    measured = {
        "step_ms": statistics.median(times),
        "step_ms_p10": tenths[0],
        "step_ms_p90": tenths[-1],
        "step_ms_mean": statistics.fmean(times),
        "step_ms_by_round": [statistics.median(one["step_ms"]) for one in variant.rounds],
        "replayed_step_ms": statistics.median(replayed) if replayed else None,
        "fallback_share": sum(is_fallback) / len(times),
        "tokens_per_s": sum(variant.steps("num_tokens")) / (sum(times) / 1e3),
        "host_schedule_ms": variant.median("host_schedule_ms"),
        "host_forward_us": variant.median("host_forward_us"),
        "kernel_share": variant.median("kernel_share"),
        "reserved_bytes": reserved,
        "num_reruns": sum(one["num_reruns"] for one in variant.rounds),
    }
    if eager is not None:
        measured["difference_to_eager"] = _difference(variant, variants)
        eager_ms = statistics.median(eager.steps("step_ms"))
        eager_bytes = max(one["reserved_bytes"] for one in eager.rounds)
        measured["step_of_eager"] = measured["step_ms"] / eager_ms
        measured["reserved_of_eager"] = reserved / eager_bytes if eager_bytes else None
    return measured


def _document(variants: Sequence[Variant], args: argparse.Namespace) -> dict[str, Any]:
    """Return the results as plain values."""
    first = next((one for v in variants for one in v.rounds), {})
    return {
        "config": Path(args.config).stem,
        **{key: first.get(key) for key in ("device", "num_gpus", "versions", "is_deterministic")},
        "command": shlex.join(["python", *sys.argv]),
        "commit": _commit(),
        "settings": to_mapping(load_config(args.config, args.overrides)),
        "variants": [
            {
                "name": v.name,
                "error": v.error,
                **(_measured(v, variants) if v.rounds else {}),
                "rounds": v.rounds,
            }
            for v in variants
        ],
    }


def _commit() -> str | None:
    """Return the checkout's commit, marked if files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        shown = subprocess.run(
            command, cwd=WORKER.parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.strip() or None


_COLUMNS = {
    "ms a step": ("step_ms", "{:.1f}"),
    "p10": ("step_ms_p10", "{:.1f}"),
    "p90": ("step_ms_p90", "{:.1f}"),
    "of eager": ("step_of_eager", "{:.3f}"),
    "host ms": ("host_schedule_ms", "{:.1f}"),
    "forward us": ("host_forward_us", "{:.0f}"),
    "kernels": ("kernel_share", "{:.1%}"),
    "MiB": ("reserved_bytes", "{:.0f}"),
    "of eager ": ("reserved_of_eager", "{:.3f}"),
    "eager steps": ("fallback_share", "{:.1%}"),
    "tokens/s": ("tokens_per_s", "{:.0f}"),
    "equal": ("difference_to_eager", "{}"),
}


def _table(variants: Sequence[Variant]) -> str:
    """Return the table, in Markdown."""
    rows = [["variant", *_COLUMNS], ["---"] * (1 + len(_COLUMNS))]
    for variant in variants:
        measured = _measured(variant, variants) if variant.rounds else {}
        cells = [_cell(key, form, measured) for key, form in _COLUMNS.values()]
        rows.append([variant.name, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines += [f"{v.name} failed: {v.error}" for v in variants if v.error is not None]
    return "\n".join(lines)


def _cell(key: str, form: str, measured: Mapping[str, Any]) -> str:
    value = measured.get(key)
    if key in measured and key == "difference_to_eager":
        return "yes" if value is None else "no"
    if value is None or (key == "reserved_bytes" and not value):
        return "-"
    return form.format(value / 2**20 if key == "reserved_bytes" else value)


if __name__ == "__main__":
    sys.exit(main())
