"""Count the work of packed microbatches, the eager steps that they cause, and the padding."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chunkgraph.data import share_above
from chunkgraph.packing import reason_not_to_fit
from chunkgraph.settings import Config
from chunkgraph.trainer.batches import packed_shape

__all__ = ["Work", "packed_summary", "work_of"]

_OF_ANOTHER = "on another rank"


@dataclass(frozen=True)
class Work:
    """The work of one step's microbatches, on one data-parallel rank.

    Attributes:
        num_tokens: Number of tokens, without padding.
        num_rows: Number of computed rows, including padding.
        num_misfits: Number of packed microbatches that fit no graph.
    """

    num_tokens: int
    num_rows: int
    num_misfits: int = 0


def work_of(
    config: Config,
    num_microbatches: int,
    packings: Sequence[Sequence[int]] | None,
    buckets: Sequence[int] | None,
) -> Work:
    """Count the work of a step.

    Args:
        config: The run's configuration.
        num_microbatches: Number of microbatches of the step.
        packings: Document lengths of each microbatch; None without packing.
        buckets: Number of rows of each microbatch; None if all have the same.
    """
    rows = num_microbatches * config.train.micro_batch_size * config.tokens_per_sequence
    shape = packed_shape(config)
    if packings is None or shape is None:
        return Work(rows, rows)
    return Work(
        num_tokens=sum(map(sum, packings)),
        num_rows=rows if buckets is None else sum(buckets),
        num_misfits=sum(reason_not_to_fit(lengths, shape) is not None for lengths in packings),
    )


def packed_summary(
    config: Config, steps_by_rank: Sequence[Sequence[Any]], times_ms: Sequence[float]
) -> dict[str, Any]:
    """Summarize fallbacks and padding of the measured steps; empty without packing.

    A step falls back as a whole, with all its microbatches on all ranks, so the share of steps is
    larger than the share of microbatches that do not fit.

    Args:
        config: The run's configuration.
        steps_by_rank: The measured steps (`measure.Step`) of each rank.
        times_ms: Time of each step on the slowest rank.
    """
    shape = packed_shape(config)
    if shape is None:
        return {}
    steps = steps_by_rank[0]
    reasons = Counter(reason for step in steps for reason in step.fallbacks)
    causes: Counter[str] = Counter()
    for index in range(len(steps)):
        # A rank whose data fit only reports that another rank's do not.
        all_causes = {cause for rank in steps_by_rank for cause in rank[index].overflows}
        specific_causes = all_causes - {_OF_ANOTHER} or all_causes
        causes.update(sorted(specific_causes)[:1])
    replayed = [ms for step, ms in zip(steps, times_ms, strict=True) if not step.fallbacks]
    eager = [ms for step, ms in zip(steps, times_ms, strict=True) if step.fallbacks]
    # Every data-parallel rank has the same number of ranks here, so the shares are right.
    works = [step.work for rank in steps_by_rank for step in rank]
    num_rows = sum(work.num_rows for work in works)
    counts = [step.num_microbatches for step in steps]
    return {
        "fallbacks": dict(reasons),
        "fallback_share": sum(bool(step.fallbacks) for step in steps) / len(steps),
        "packing_overflows": dict(causes),
        "misfit_share": sum(w.num_misfits for w in works) / (len(steps_by_rank) * sum(counts)),
        **_expected(config, counts),
        "padding_waste": 1 - sum(work.num_tokens for work in works) / num_rows,
        "replayed_step_ms": statistics.median(replayed) if replayed and reasons else None,
        "fallback_step_ms": statistics.median(eager) if eager else None,
    }


def _expected(config: Config, counts: Sequence[int]) -> dict[str, float | None]:
    """Return the shares that the distribution predicts, to compare with the sample."""
    quantiles = config.data.document_counts
    if not quantiles:
        return {"expected_misfit_share": None, "expected_misfit_steps": None}
    misfits = share_above(quantiles, config.packing.max_packed_seqs - 1)
    size = config.pipeline.data_parallel_size
    return {
        "expected_misfit_share": misfits,
        "expected_misfit_steps": statistics.fmean(1 - (1 - misfits) ** (n * size) for n in counts),
    }
