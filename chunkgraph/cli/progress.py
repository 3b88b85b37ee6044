"""Show the progress of a run as lines on standard error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from chunkgraph.settings import Config

if TYPE_CHECKING:
    from chunkgraph.trainer.trained_model import StepRecord

__all__ = ["TrainProgress"]

_PHASES = {"eager": "eager", "chunk": "chunk graphs"}


class TrainProgress:
    """Shows the steps and captures of rank 0.

    Args:
        config: The run's configuration.
        console: Console for the progress; None for standard error, apart from the report.
        is_shown: False on the other ranks.
    """

    def __init__(
        self, config: Config, console: Console | None = None, *, is_shown: bool = True
    ) -> None:
        self._console = console or Console(stderr=True, quiet=not is_shown)
        self._num_steps = len(config.train.num_microbatches)
        pipeline = config.pipeline
        self._print(
            f"processes: {pipeline.world_size} on {config.device}, "
            f"pipeline {pipeline.pipeline_model_parallel_size} x {pipeline.num_model_chunks}, "
            f"steps: {self._num_steps}"
        )

    def step(self, phase: str, record: StepRecord) -> None:
        """Show a step of the phase ``eager`` or ``chunk``."""
        if record.captures:
            self._print(f"{_PHASES[phase]}: captured")
        note = f"{record.num_microbatches} microbatches, loss {record.loss:.6f}"
        self._print(f"{_PHASES[phase]}: step {record.step + 1}/{self._num_steps}  {note}")

    def capture(self, num_captured: int, num_graphs: int, free_bytes: int | None) -> None:
        """Show half of the captured graphs, and all."""
        if num_captured in (num_graphs // 2, num_graphs):
            note = "" if free_bytes is None else f"  {free_bytes / 2**30:.1f} GiB left"
            self._print(f"chunk graphs: graph {num_captured}/{num_graphs}{note}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
