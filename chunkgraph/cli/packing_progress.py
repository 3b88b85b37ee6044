"""Show the progress of reading and packing long files, on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

__all__ = ["PackingProgress"]

_SECONDS_BETWEEN_LINES = 10.0


class PackingProgress:
    """A progress bar on a terminal, or a line every ten seconds elsewhere.

    Args:
        console: Console for the progress; None for standard error, apart from the report.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def phase(self, name: str) -> Callable[[int, int], None]:
        """Return a callback that takes the completed and the total amount of one phase."""
        if self._bar is None:
            return self._lines(name)
        bar, task = self._bar, self._bar.add_task(name, total=None)
        return lambda done, total: bar.update(task, completed=done, total=total)

    def _lines(self, name: str) -> Callable[[int, int], None]:
        last = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                share = f"{done / total:.0%}" if total else "done"
                self._console.print(f"{name}: {share}", highlight=False)

        return report
