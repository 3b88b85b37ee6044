"""Draw the microbatches of a run whose context-parallel size differs between microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chunkgraph.data import Documents
from chunkgraph.megatron.features.contexts import (
    ContextBank,
    ContextBanks,
    ContextGroups,
    ScheduledBanks,
)
from chunkgraph.megatron.features.packing.attention_limits import shares_keys
from chunkgraph.megatron.features.packing.params import make_params, sent
from chunkgraph.packing import (
    ContextLimits,
    ContextSchedule,
    ContextScheduler,
    RandomSizes,
    SmallestSizes,
    pack,
    schedule_contexts,
)
from chunkgraph.settings import Config

__all__ = ["ContextBatches", "context_limits"]

_NUM_CACHED = 3
"""Number of steps whose schedules are cached: more than the current one and the next."""


def context_limits(config: Config, model_config: Any) -> ContextLimits:
    """Return the limits of every schedule of the run.

    Args:
        config: the run.
        model_config: Megatron's TransformerConfig.
    """
    packing, pipeline = config.packing, config.pipeline
    return ContextLimits(
        world_size=pipeline.data_parallel_size,
        max_tokens_per_rank=config.tokens_per_sequence,
        max_packed_seqs=packing.max_packed_seqs,
        sizes=packing.context_parallel_sizes,
        multiple_of=pipeline.microbatch_group_size if pipeline.num_model_chunks > 1 else 1,
        counts_padding=shares_keys(model_config),
    )


@dataclass(frozen=True)
class _Document:
    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class _Step:
    """The global batch of one step, and its distribution over ranks."""

    documents: Sequence[_Document]
    schedule: ContextSchedule
    keys: ScheduledBanks


class ContextBatches:
    """Whole documents in microbatches that one, two, four, ... of the data-parallel ranks share.

    All ranks draw the documents of the whole step, and so compute the same schedule. The loss of
    each microbatch is a share of the step's mean over all tokens, for any distribution of them.

    Args:
        config: the run.
        device: this rank's device.
        model_config: Megatron's TransformerConfig.

    Attributes:
        banks: this rank's banks.
    """

    def __init__(self, config: Config, device: torch.device, model_config: Any) -> None:
        self._config = config
        self._device = device
        self._limits = limits = context_limits(config, model_config)
        self._documents = Documents.from_file(
            config.data.path,
            num_tokens=limits.max_tokens_per_rank * limits.group_sizes[0],
            seed=config.train.seed,
        )
        self._groups = ContextGroups.of_data_parallel(
            limits.group_sizes, has_experts=config.moe.num_moe_experts is not None
        )
        self.banks = ContextBanks(
            limits,
            self._groups,
            cuda_graph_cp_sizes=config.packing.captured_context_parallel_sizes,
            seq_buckets=config.seq_buckets,
        )
        self._steps: dict[tuple[int, int], _Step] = {}

    def schedule_options(self, step: int, count: int, *, has_graphs: bool) -> dict[str, Any]:
        """Return the keywords of the schedule that Megatron's schedule does not have."""
        return {"contexts": self._step(step, count).keys} if has_graphs else {}

    def num_microbatches(self, step: int, count: int) -> int:
        """Return the schedule's number of microbatches for the documents of ``count`` full ones."""
        return self._step(step, count).schedule.num_microbatches

    def close(self) -> None:
        """Destroy the process groups; see `ContextGroups.close`."""
        self._groups.close()

    def step(self, step: int, count: int) -> Iterator[dict[str, Any]]:
        """Draw this rank's rows of the step's microbatches, for one chunk."""
        contents = self._step(step, count)
        schedule = contents.schedule
        num_tokens = sum(len(document.tokens) for document in contents.documents)
        scale = schedule.num_microbatches * self._limits.world_size / num_tokens
        microbatches = schedule.of_rank(self._groups.rank)
        for number, (microbatch, key) in enumerate(zip(microbatches, contents.keys, strict=True)):
            where = f"step {step}, microbatch {number}"
            batch = self._batch([contents.documents[d] for d in microbatch.documents], key, where)
            yield {**batch, "loss_scale": scale}

    def _batch(
        self, documents: Sequence[_Document], key: ContextBank, where: str
    ) -> dict[str, Any]:
        # A filler forwards one token, whose loss does not count.
        contents = documents or [_Document(np.zeros(1, np.int64), np.zeros(1, np.int64))]
        packed = pack([len(d.tokens) for d in contents], self.banks.shape(key), where=where)
        rows = packed.rows_of_rank(self._groups.rank % key.size)
        is_counted = ~packed.padding_mask if documents else np.zeros_like(packed.padding_mask)
        params = make_params(packed, self._device)
        params.cp_group, params.local_cp_size = key.group, key.size
        whole = {
            "tokens": packed.place(np.concatenate([d.tokens for d in contents])),
            "labels": packed.place(np.concatenate([d.labels for d in contents])),
            "position_ids": packed.position_ids,
            "is_counted": is_counted,
        }
        if self._config.moe.num_moe_experts is not None:
            whole["padding_mask"] = ~is_counted
        batch: dict[str, Any] = {
            name: sent(values[rows][None], self._device) for name, values in whole.items()
        }
        return {**batch, "packed_seq_params": params}

    def _step(self, step: int, count: int) -> _Step:
        key = (step, count)
        if key not in self._steps:
            while len(self._steps) >= _NUM_CACHED:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = self._new_step(step, count)
        return self._steps[key]

    def _new_step(self, step: int, count: int) -> _Step:
        num_rows = count * self._limits.world_size // self._limits.group_sizes[0]
        documents: list[_Document] = []
        for number in range(num_rows):
            row = self._documents.row(step, number)
            ends = np.cumsum(row.lengths)[:-1]
            parts = zip(np.split(row.tokens, ends), np.split(row.labels, ends), strict=True)
            documents += [_Document(tokens, labels) for tokens, labels in parts]
        lengths = [len(document.tokens) for document in documents]
        schedule = schedule_contexts(lengths, self._limits, self._scheduler(step))
        return _Step(documents, schedule, self.banks.of_schedule(schedule, lengths))

    def _scheduler(self, step: int) -> ContextScheduler:
        if self._config.packing.context_parallel_schedule == "smallest":
            return SmallestSizes()
        most = self._limits.max_packed_seqs - 1
        return RandomSizes(f"{self._config.train.seed} {step}", documents_each=most)
