"""`Host`: the part that the program around the chunks plays in a capture session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from chunkgraph.errors import VerifyError

__all__ = ["Host", "with_user_hooks"]


class Host:
    """The program around the chunks. Override the methods it needs; by default all do nothing."""

    def preserving(self) -> AbstractContextManager[object]:
        """Enclose a capture session or an eager pass of ``verify``; restore host-side state."""
        return nullcontext()

    def capturing(self) -> AbstractContextManager[object]:
        """Enclose capture warmup and captures. All ranks enter it together."""
        return nullcontext()

    def verifying(self) -> AbstractContextManager[object]:
        """Enclose an eager pass that ``verify`` compares with a replay."""
        return nullcontext()

    def judge(self, wrong_replay: VerifyError) -> None:
        """Handle a replay that ``verify`` finds wrong: by default, raise the error.

        A program that returns continues the step; ``verify`` may report more replays of it.
        """
        raise wrong_replay

    def generators(self) -> Sequence[torch.Generator]:
        """Return the random generators that the chunks draw from, besides the default one."""
        return ()

    def progress(self, num_done: int, num_graphs: int, free_bytes: int | None) -> None:
        """Follow a session: called after every captured graph.

        Args:
            num_done: graphs captured so far.
            num_graphs: graphs of the session.
            free_bytes: bytes left on the device; None: unknown.
        """


class _WithUserHooks(Host):
    """A host, with generators and a progress callback that a user declares."""

    def __init__(
        self,
        host: Host,
        generators: Callable[[], Sequence[torch.Generator]],
        progress: Callable[[int, int, int | None], object] | None,
    ) -> None:
        self._host, self._generators, self._progress = host, generators, progress

    def preserving(self) -> AbstractContextManager[object]:
        return self._host.preserving()

    def capturing(self) -> AbstractContextManager[object]:
        return self._host.capturing()

    def verifying(self) -> AbstractContextManager[object]:
        return self._host.verifying()

    def judge(self, wrong_replay: VerifyError) -> None:
        self._host.judge(wrong_replay)

    def generators(self) -> Sequence[torch.Generator]:
        return (*self._host.generators(), *self._generators())

    def progress(self, num_done: int, num_graphs: int, free_bytes: int | None) -> None:
        self._host.progress(num_done, num_graphs, free_bytes)
        if self._progress is not None:
            self._progress(num_done, num_graphs, free_bytes)


def with_user_hooks(
    host: Host,
    generators: Callable[[], Sequence[torch.Generator]] | None,
    progress: Callable[[int, int, int | None], object] | None,
) -> Host:
    """Return ``host``, with generators and a progress callback that a user declares."""
    if generators is None and progress is None:
        return host
    return _WithUserHooks(host, generators or tuple, progress)
