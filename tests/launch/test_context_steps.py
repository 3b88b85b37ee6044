"""Batches that a script reads after documents are redistributed, without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.launch.packed_steps import SpreadDocuments
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.contexts import ContextGroups
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.documents import ROWS as ROWS_OF_SAMPLE
from chunkgraph.packing import ContextLimits

pytestmark = [pytest.mark.megatron, pytest.mark.every_release]

LENGTH, ROWS = 12, 8
LIMITS = ContextLimits(world_size=2, max_tokens_per_rank=ROWS, max_packed_seqs=3)


def sample(first: int, *ends: int, num_counted: int = LENGTH) -> dict[str, Any]:
    """Make a sample: tokens from ``first`` on, ends of documents, losses in the first rows."""
    offsets = torch.full((1, LENGTH + 1), LENGTH, dtype=torch.int32)
    offsets[0, 0] = 0
    offsets[0, 1 : len(ends) + 1] = torch.tensor(ends, dtype=torch.int32)
    rows = torch.arange(LENGTH)[None]
    return {
        "tokens": rows + first,
        "labels": rows + first + 1,
        "loss_mask": (rows < num_counted).float(),
        "position_ids": rows,
        "cu_seqlens": offsets,
        "max_seqlen": torch.tensor([LENGTH], dtype=torch.int32),
    }


class Model(nn.Module):
    """Records its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[dict[str, Any], Any]] = []
        self.besides: list[dict[str, Any]] = []

    def forward(
        self, batch: dict[str, Any], packed_seq_params: Any = None, **besides: Any
    ) -> torch.Tensor:
        self.seen.append((batch, packed_seq_params))
        self.besides.append(besides)
        return self.weight


def forward_step(data: Iterator[dict[str, Any]], model: nn.Module) -> None:
    """Run a forward step as the script does."""
    batch = next(data)
    row = batch["cu_seqlens"][0]
    row = row[: int((row == batch["tokens"].shape[1]).nonzero()[0]) + 1]
    kind = import_megatron("megatron.core.packed_seq_params").PackedSeqParams
    model(batch, packed_seq_params=kind(qkv_format="thd", cu_seqlens_q=row, cu_seqlens_kv=row))


class OtherRank:
    """Stands in for the exchange: the other rank has documents of the same samples."""

    def __init__(self, documents: list[dict[str, Any]]) -> None:
        self.documents = documents

    def gather(self, mine: list[Any]) -> list[list[Any]]:
        others = [{n: torch.from_numpy(v) for n, v in d.items()} for d in self.documents]
        return [mine, others]

    def close(self) -> None:
        """Do nothing: there are no resources to free."""


@pytest.fixture
def run(one_rank: Any) -> Callable[..., tuple[dict[str, Any], list[Model]]]:
    """Run a step of the first of two ranks; return the schedule's arguments and the chunks."""

    def run(
        *samples: dict[str, Any],
        lengths: tuple[int, ...] = (5,),
        num_chunks: int = 1,
        each: Callable[..., None] = forward_step,
        has_experts: bool = False,
        multiple_of: int = 1,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], list[Model]]:
        groups = ContextGroups([0], {1: None})
        groups._groups, groups.world = {2: "of two", 1: None}, (0, 1)
        models = [Model() for _ in range(num_chunks)]
        others = [
            {name: sample(100 * (i + 1), LENGTH)[name][0, :n].numpy() for name in ROWS_OF_SAMPLE}
            for i, n in enumerate(lengths)
        ]
        data_ranks: Any = OtherRank(others)
        banks = PackedBanks.of_limits(replace(LIMITS, multiple_of=multiple_of), groups)
        steps = SpreadDocuments(
            banks,
            models,
            3,
            device=torch.device("cpu"),
            data_ranks=data_ranks,
            has_experts=has_experts,
        )
        arguments: dict[str, Any] = {}

        def schedule(**kwargs: Any) -> None:
            arguments.update(kwargs)
            for model, data in zip(models, kwargs["data_iterator"], strict=True):
                for _ in range(kwargs["num_microbatches"]):
                    each(data, model)

        iterators = [iter([dict(sample) for sample in samples]) for _ in models]
        call = {"data_iterator": iterators, "num_microbatches": len(samples)}
        steps.wrap(schedule)(**{**call, "seq_length": LENGTH, "micro_batch_size": 1, **kwargs})
        steps.close()
        return arguments, models

    return run


def test_a_long_document_is_shared_and_short_ones_are_not(run: Any) -> None:
    """10 tokens need both ranks of 8 rows each; then each rank has one of the other documents."""
    arguments, models = run(sample(0, 10, 12), num_chunks=2)
    assert [key.size for key in arguments["contexts"]] == [2, 1]
    assert (arguments["num_microbatches"], arguments["seq_length"]) == (2, ROWS)
    for model in models:
        (batch, shared), (_, short) = model.seen
        assert (short.cp_group, short.local_cp_size) == (None, 1)
        assert (shared.cp_group, shared.local_cp_size) == ("of two", 2)
        assert shared.cu_seqlens_q.tolist() == [0, 10, 10, 10]
        assert shared.cu_seqlens_q_padded.tolist() == [0, 12, 16, 16]
        # Pieces 0 and 3 of a document of 12 rows; two of the rows hold no token.
        assert batch["tokens"].tolist() == [[0, 1, 2, 9, 0, 0, 0, 0]]
        assert batch["labels"].tolist() == [[1, 2, 3, 10, 0, 0, 0, 0]]
        assert batch["position_ids"].tolist() == [[0, 1, 2, 9, 0, 0, 0, 0]]
        assert batch["loss_mask"].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]
        assert batch["cu_seqlens"].shape == (1, LENGTH + 1)
        assert {name: batch[name].dtype for name in batch} == {
            name: values.dtype for name, values in sample(0, 12).items()
        }
    # Each chunk has its own dictionary.
    assert models[0].seen[0][0] is not models[1].seen[0][0]


def test_rows_that_no_loss_needs_are_left_out(run: Any) -> None:
    arguments, (model,) = run(sample(0, 4, 12, num_counted=7), lengths=(1,))
    assert [key.size for key in arguments["contexts"]] == [1]
    ((batch, params),) = model.seen
    assert params.cu_seqlens_q.tolist() == [0, 4, 7, 7]
    assert batch["tokens"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 0]]


def test_experts_know_which_rows_are_padding(run: Any) -> None:
    """These are the rows after this rank's pieces of documents, and all rows of a filler."""
    _, models = run(sample(0, 10, 12), num_chunks=2, has_experts=True)
    for model in models:
        shared, short = (besides["padding_mask"] for besides in model.besides)
        assert shared.tolist() == [[False] * 4 + [True] * 4]
        assert short.tolist() == [[False] * 5 + [True] * 3]
    alone = {"lengths": (), "multiple_of": 2, "has_experts": True}
    _, (model,) = run(sample(0, 12, num_counted=4), **alone)
    of_tokens, filler = (besides["padding_mask"] for besides in model.besides)
    assert of_tokens.tolist() == [[False] * 2 + [True] * 6]
    assert filler.tolist() == [[True] * 8]
    _, (model,) = run(sample(0, 12))
    assert model.besides == [{}] * len(model.seen)
