"""The agent between ``chunkgraph launch`` and its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chunkgraph.launch.script_agent import _Signals

pytest.importorskip("torch")


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Restore signal handlers: the agent replaces those of its process."""
    old = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    yield
    for signum, handler in old.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("own_handlers")
def test_a_rank_that_begins_after_sigterm_gets_it_once(tmp_path: Path) -> None:
    signals = _Signals(tmp_path)
    os.kill(os.getpid(), signal.SIGTERM)  # while the ranks still import torch
    count = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: print('terminated'))\n"
    )
    count += "print('ready', flush=True)\nsys.stdin.read()\n"
    rank = subprocess.Popen(
        [sys.executable, "-u", "-c", count],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        (tmp_path / "pid_rank0").write_text(str(rank.pid), encoding="utf-8")
        for _ in range(3):  # the agent's polling interval
            signals.notify_late_ranks()
        output, _ = rank.communicate(timeout=20)
        assert output == "terminated\n"
    finally:
        rank.kill()
