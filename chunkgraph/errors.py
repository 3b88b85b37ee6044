"""The exceptions of chunkgraph.

::

    ChunkGraphError
     +-- ConfigError            (ValueError)    a setting, flag or file is wrong; exit code 2
     |    +-- TopologyError                     sizes that cannot form a pipeline
     |    +-- PackingError                      documents or offsets that cannot be packed
     +-- MissingDependencyError (ImportError)   an optional package is not installed; exit code 2
     +-- ScheduleError          (ValueError)    a schedule breaks one of its rules; exit code 2
     +-- SlotError              (RuntimeError)  a slot was used out of turn
     +-- CaptureError           (RuntimeError)  a chunk could not be captured
     |    +-- IllegalOperationError             an operator that no graph can hold
     +-- ReplayMismatchError    (ValueError)    a call does not match the capture
     +-- VerifyError            (RuntimeError)  a verified replay differs from the eager pass
     +-- TokenDropError         (RuntimeError)  an expert had no room for a token
     +-- StashError             (RuntimeError)  the paged stash was misused
     +-- MemoryPlanError        (RuntimeError)  two graphs could overwrite each other
     +-- WorkerError            (RuntimeError)  a training process failed or was killed
     +-- OutputError            (OSError)       results could not be written after the run

Every message states the problem, its place (rank, chunk, microbatch, slot, file and line if they
are known) and the remedy. Leaves also subclass the builtin that a caller would already catch.
"""

from __future__ import annotations

from typing import NoReturn

_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout",
    "wait timeout",
)


class ChunkGraphError(Exception):
    """Base class of all exceptions of chunkgraph."""

    exit_code = 1
    """Of a process that ends with it; 2 if a setting is wrong or a package is missing."""


class ConfigError(ChunkGraphError, ValueError):
    """A setting, flag or configuration file is wrong."""

    exit_code = 2


class TopologyError(ConfigError):
    """Parallel sizes, layers or microbatch counts cannot form a pipeline."""


class PackingError(ConfigError):
    """Lengths, offsets or shapes of packed sequences are wrong."""


class MissingDependencyError(ChunkGraphError, ImportError):
    """An optional package that the requested feature needs is not installed."""

    exit_code = 2


class ScheduleError(ChunkGraphError, ValueError):
    """A schedule breaks one of its rules (order, matching, deadlock)."""

    exit_code = 2


class SlotError(ChunkGraphError, RuntimeError):
    """A slot was used out of turn."""


class CaptureError(ChunkGraphError, RuntimeError):
    """A chunk could not be captured; the model still works eagerly."""


class IllegalOperationError(CaptureError):
    """A graph cannot hold an operator of the chunk."""


class ReplayMismatchError(ChunkGraphError, ValueError):
    """A call differs from the captured one in a way that a replay cannot reproduce."""


class VerifyError(ChunkGraphError, RuntimeError):
    """A verified replay differs from the eager pass, or reads dead memory."""


class TokenDropError(ChunkGraphError, RuntimeError):
    """Experts had no room for tokens that chose them, and ``token_drops`` is ``raise``."""


class StashError(ChunkGraphError, RuntimeError):
    """The paged stash was misused."""


class MemoryPlanError(ChunkGraphError, RuntimeError):
    """A graph could overwrite live memory of another."""


class WorkerError(ChunkGraphError, RuntimeError):
    """A training process failed, was killed or did not answer in time.

    Args:
        message: Which rank failed, and why.
        exit_code: The rank's, if it left no message; otherwise 1.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class OutputError(ChunkGraphError, OSError):
    """Results could not be written to the requested file."""


def refuse_deepcopy(self: object, _memo: object) -> NoReturn:
    """Refuse to copy an object with graphs: they read and write the memory of one model."""
    raise TypeError(
        f"A {type(self).__name__} cannot be copied: its graphs read and write the memory of one "
        "model or optimizer. Copy that, and make graphs for the copy."
    )


def describe_loss(error: BaseException, text: str, rank: int) -> str:
    """Describe an error of torch that ended a wait for another rank; return "" for others."""
    is_own = isinstance(error, (ChunkGraphError, BrokenPipeError))
    if is_own or not any(sign in text for sign in _LOST_PEER):
        return ""
    return (
        f"Rank {rank} stopped because another rank ended or did not answer in time "
        f"({text.splitlines()[0]})."
    )
