"""Show the progress of a run as lines on standard error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
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

    def __enter__(self) -> Self:
        pipeline = self._config.pipeline
        self.print(
            f"processes: {pipeline.world_size} on {self._config.device}, "
            f"pipeline {pipeline.pipeline_model_parallel_size} x {pipeline.num_model_chunks}, "
            f"steps: {len(self._config.train.num_microbatches)}"
        )
        self.print("starting the workers")
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: every line stays."""

    def print(self, line: str) -> None:
        """Show a line, unchanged."""
        # Text, not str: brackets in a worker's output are not markup.
        self._console.print(Text.from_ansi(line), soft_wrap=True, highlight=False)

    def update(self, event: Mapping[str, Any]) -> None:
        """Show one progress line."""
        phase = _PHASES.get(str(event.get("phase")), str(event.get("phase")))
        if event.get("event") == "capturing":
            self._show_capturing(phase, event)
        elif event.get("event") == "capture":
            self.print(f"{phase}: captured")
        else:
            step, num_steps = int(event["step"]) + 1, int(event["num_steps"])
            note = f"{event['num_microbatches']} microbatches, loss {float(event['loss']):.6f}"
            self.print(f"{phase}: step {step}/{num_steps}  {note}")

    def _show_capturing(self, phase: str, event: Mapping[str, Any]) -> None:
        num_captured, num_graphs = int(event["num_captured"]), int(event["num_graphs"])
        if num_captured in (num_graphs // 2, num_graphs):  # every line stays
            free_bytes = event.get("free_bytes")
            note = "" if free_bytes is None else f"  {free_bytes / 2**30:.1f} GiB left"
            self.print(f"{phase}: graph {num_captured}/{num_graphs}{note}")
