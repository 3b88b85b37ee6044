"""Stand-ins for a rank's work, without torch: ``stub_workers.py BEHAVIOUR FOLDER`` as one rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from chunkgraph.errors import CaptureError, ConfigError
from chunkgraph.jobs.processes import leave, run_rank

RANK = os.environ.get("RANK", "0")


def succeed(folder: Path) -> int:
    # One write: unbuffered, `print` writes the line's end separately, and ranks share the pipe.
    sys.stdout.write(f"hello from [rank {RANK}]\n")
    return 0


def fail(folder: Path) -> int:
    if RANK == "1":
        raise CaptureError("model.py:12: .item() waits for the device.")
    return hang(folder)


def crash(folder: Path) -> int:
    if RANK == "1":
        raise ZeroDivisionError("one\n\ntwo")
    return hang(folder)


def refuse(folder: Path) -> int:
    raise ConfigError("model.layer_spec: cannot import nowhere.")


def exit_silently(folder: Path) -> int:
    return 7


class CheckpointException(BaseException):
    """Stands for torch's, which is no Exception and whose text is the tracebacks of the ranks."""

    def __init__(self) -> None:
        self.failures = {0: (RuntimeError("unexpected EOF"), None)}

    def __str__(self) -> str:
        return "CheckpointException ranks:dict_keys([0])\nTraceback (most recent call last):"


def load_a_broken_checkpoint(folder: Path) -> int:
    if RANK == "1":
        raise CheckpointException
    raise RuntimeError("Connection closed by peer")


def be_terminated(folder: Path) -> int:
    if RANK == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return hang(folder)


def stop(folder: Path) -> int:
    if RANK == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")


def stop_before_the_groups(folder: Path) -> int:
    if RANK == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise RuntimeError("wait timeout after 1000ms, keys: /default_pg/0//cpu//0/1")


def stop_and_be_given_up(folder: Path) -> int:
    """Behave as with NCCL, whose watchdog aborts the rank that waits in vain."""
    mark = folder / "stops"
    if RANK == "1":
        mark.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    while not mark.exists():
        time.sleep(0.05)
    time.sleep(1)
    os.abort()


def never_answer(folder: Path) -> int:
    if RANK == "1":
        return hang(folder)
    raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")


def fail_late(folder: Path) -> int:
    if RANK == "0":
        raise RuntimeError("Connection closed by peer")
    time.sleep(1)
    raise ValueError("no such corpus")


def be_killed(folder: Path) -> int:
    if RANK == "1":
        while not (folder / "pid0").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return hang(folder)


def hang(folder: Path) -> int:
    time.sleep(600)
    return 0


def behave(name: str, folder: Path) -> int:
    """Behave as the function of this name, after writing the process id into the folder."""
    partial = folder / f".pid{RANK}"
    partial.write_text(str(os.getpid()))
    partial.rename(folder / f"pid{RANK}")
    return int(globals()[name](folder))


if __name__ == "__main__":
    leave(run_rank(lambda: behave(sys.argv[1], Path(sys.argv[2])), debug=False))
