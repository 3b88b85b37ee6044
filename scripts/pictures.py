"""Draw the pictures of the documentation and of schedules/: ``make pictures``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_RUNS = {"256": "speed_s256", "1024": "speed_s1024", "4096": "speed_s4096"}
"""Documents in `benchmarks/` by sequence length."""
_VARIANTS = {
    "eager": ("eager", "#9a9a9a"),
    "transformer_engine": ("per-layer graphs (Transformer Engine)", "#6c8ebf"),
    "chunk": ("chunk graphs", "#d1495b"),
}


def draw_speed(path: Path) -> None:
    """Draw step times relative to eager training, by sequence length."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2), dpi=120, layout="constrained")
    height = 0.26
    for place, name in enumerate(_RUNS.values()):
        document = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
        times_ms = {v["name"]: v["step_ms"] for v in document["variants"]}
        for offset, (variant, (label, colour)) in enumerate(_VARIANTS.items()):
            share = times_ms[variant] / times_ms["eager"]
            y = place + (offset - 1) * height
            axes.barh(y, share, height * 0.9, color=colour, label=label if not place else None)
            text = f"{share:.2f}   {times_ms[variant]:.0f} ms"
            axes.text(share + 0.01, y, text, va="center", fontsize=9)
    axes.set_yticks(range(len(_RUNS)), [f"sequence {length}" for length in _RUNS])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18)
    axes.set_xlabel("step time, eager training = 1")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=3, frameon=False, fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def draw_schedule(path: Path) -> None:
    """Draw an interleaved schedule with its slots."""
    sizes = ["--pp", "2", "--vpp", "2", "--num-microbatches", "4"]
    command = [sys.executable, "-m", "chunkgraph.cli", "plan", *sizes, "--svg", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write_schedules(folder: Path) -> None:
    """Write each named schedule as a CSV file and as a picture, with four ranks."""
    from chunkgraph.schedules import (
        build_schedule,
        draw_svg,
        get_family,
        list_schedules,
        simulate,
    )
    from chunkgraph.slots import assign_slots

    for name in list_schedules():
        num_chunks = get_family(name).num_chunks or 2
        schedule = build_schedule(name, num_ranks=4, num_chunks=num_chunks, num_microbatches=8)
        picture = draw_svg(simulate(schedule), slots=assign_slots(schedule))
        (folder / f"{name}.csv").write_text(schedule.to_csv(), encoding="utf-8")
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    draw_speed(DOCS / "speed.png")
    draw_schedule(DOCS / "schedule.svg")
    write_schedules(ROOT / "schedules")
