"""Show the progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from chunkgraph.settings import Config

__all__ = ["TrainProgress"]

_PHASES = {"eager": "eager", "chunk": "chunk graphs"}


class TrainProgress:
    """Shows the progress lines of rank 0 (``progress.jsonl``) and the output of the workers.

    Args:
        config: The run's configuration.
        console: Console for the progress; None for standard error, apart from the report.
    """

    def __init__(self, config: Config, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._config = config
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
        num_phases = 2 if config.train.compare == "eager" else 1
        self._num_steps = num_phases * len(config.train.num_microbatches)

    def __enter__(self) -> Self:
        pipeline = self._config.pipeline
        self.print(
            f"{self._config.name}: {pipeline.world_size} process(es) on {self._config.device}, "
            f"pipeline {pipeline.pipeline_model_parallel_size} x "
            f"{pipeline.num_model_chunks} chunk(s), "
            f"{len(self._config.train.num_microbatches)} steps"
        )
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self._num_steps, note="")
        else:
            self.print("starting the workers")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def print(self, line: str) -> None:
        """Show a line above the bar, unchanged."""
        # Text, not str: brackets in a worker's output are not markup.
        self._console.print(Text.from_ansi(line), soft_wrap=True, highlight=False)

    def update(self, event: Mapping[str, Any]) -> None:
        """Show one progress line."""
        phase = _PHASES.get(str(event.get("phase")), str(event.get("phase")))
        if event.get("event") == "capturing":
            self._show_capturing(phase, event)
            return
        if event.get("event") == "capture":
            self._show(f"{phase}: captured", advance=0, note="")
            return
        step, num_steps = int(event["step"]) + 1, int(event["num_steps"])
        note = f"{event['num_microbatches']} microbatches, loss {float(event['loss']):.6f}"
        self._show(f"{phase}: step {step}/{num_steps}", advance=1, note=note)

    def _show_capturing(self, phase: str, event: Mapping[str, Any]) -> None:
        num_captured, num_graphs = int(event["num_captured"]), int(event["num_graphs"])
        free_bytes = event.get("free_bytes")
        note = "" if free_bytes is None else f"{free_bytes / 2**30:.1f} GiB left"
        if self._bar is None and num_captured not in (num_graphs // 2, num_graphs):
            return  # without a bar every line stays
        self._show(f"{phase}: graph {num_captured}/{num_graphs}", advance=0, note=note)

    def _show(self, description: str, *, advance: int, note: str) -> None:
        if self._bar is None:
            self.print(f"{description}  {note}".rstrip())
        else:
            self._bar.update(self._task, description=description, advance=advance, note=note)
