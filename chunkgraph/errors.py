"""The exceptions chunkgraph raises.

::

    ChunkGraphError
     +-- ConfigError            (ValueError)    a setting, flag or file is wrong; exit code 2
     |    +-- TopologyError                     sizes that cannot form a pipeline
     |    +-- PackingError                      documents or offsets that cannot be packed
     +-- MissingDependencyError (ImportError)   an optional package is not installed; exit code 2
     +-- ScheduleError          (ValueError)    a schedule breaks one of its rules
     +-- SlotError              (RuntimeError)  a slot was used out of turn
     +-- CaptureError           (RuntimeError)  a chunk could not be captured
     |    +-- IllegalOperationError             an operator that no graph can hold
     +-- ReplayMismatchError    (ValueError)    a call does not fit what was captured
     +-- VerifyError            (RuntimeError)  a verified replay is not what eager gives
     +-- TokenDropError         (RuntimeError)  an expert had no room for a token
     +-- StashError             (RuntimeError)  the paged stash ran out or was misused
     +-- MemoryPlanError        (RuntimeError)  two graphs could overwrite each other
     +-- WorkerError            (RuntimeError)  a training process failed or was killed
     +-- OutputError            (OSError)       results could not be written after the run

Every message says what happened, where (rank, chunk, microbatch, slot, file and line where they
are known) and what to do. Leaves also subclass the builtin a caller would already catch.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "ChunkGraphError",
    "ConfigError",
    "IllegalOperationError",
    "MemoryPlanError",
    "MissingDependencyError",
    "OutputError",
    "PackingError",
    "ReplayMismatchError",
    "ScheduleError",
    "SlotError",
    "StashError",
    "TokenDropError",
    "TopologyError",
    "VerifyError",
    "WorkerError",
]


class ChunkGraphError(Exception):
    """Root of everything chunkgraph raises on purpose."""


class ConfigError(ChunkGraphError, ValueError):
    """A setting, flag or configuration file is wrong."""


class TopologyError(ConfigError):
    """Parallel sizes, layers or microbatch counts that cannot form a pipeline."""


class PackingError(ConfigError):
    """Lengths, offsets or shapes of packed sequences that are wrong."""


class MissingDependencyError(ChunkGraphError, ImportError):
    """An optional package that the requested feature needs is not installed."""


class ScheduleError(ChunkGraphError, ValueError):
    """A schedule breaks one of its rules (order, matching, deadlock)."""


class SlotError(ChunkGraphError, RuntimeError):
    """A slot was used out of turn."""


class CaptureError(ChunkGraphError, RuntimeError):
    """A chunk could not be captured; the model is left working eagerly."""


class IllegalOperationError(CaptureError):
    """An operator in the chunk cannot be held by a graph."""


class ReplayMismatchError(ChunkGraphError, ValueError):
    """A call differs from what was captured in a way a replay cannot honour."""


class VerifyError(ChunkGraphError, RuntimeError):
    """A verified replay differs from the eager pass beside it, or read dead memory."""


class TokenDropError(ChunkGraphError, RuntimeError):
    """Experts had no room for tokens that chose them, and that was not to happen."""


class StashError(ChunkGraphError, RuntimeError):
    """The paged stash ran out of pages and a re-run was not to happen, or it was misused."""


class MemoryPlanError(ChunkGraphError, RuntimeError):
    """The proof that no graph overwrites another's live memory failed."""


class WorkerError(ChunkGraphError, RuntimeError):
    """A training process failed, was killed or did not answer in time."""


class OutputError(ChunkGraphError, OSError):
    """Results could not be written to the file that was asked for."""
