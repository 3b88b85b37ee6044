"""What a microbatch of sequences holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from chunkgraph.data import END_OF_DOCUMENT
from chunkgraph.settings import config_from_mapping

pytestmark = [pytest.mark.megatron, pytest.mark.every_release]


def test_documents_of_a_sequence_do_not_mix(
    one_rank: Any, make_config: Callable[..., Any], tmp_path: Path
) -> None:
    from chunkgraph.trainer.batches import SequenceBatches

    path = tmp_path / "text.txt"
    path.write_text("one\n\na\n\nlonger than a sequence\n\nfour\n\nfive5")
    config = config_from_mapping(make_config(data={"path": str(path)}))
    for batch in SequenceBatches(config, one_rank).step(0, 4):
        tokens, mask = batch["tokens"], batch["attention_mask"]
        assert mask.shape == (2, 1, 16, 16)
        assert torch.equal(tokens[:, 1:], batch["labels"][:, :-1])
        assert torch.equal(batch["is_counted"], tokens != END_OF_DOCUMENT)
        for row in range(2):
            ids = [int((tokens[row, :i] == END_OF_DOCUMENT).sum()) for i in range(16)]
            assert batch["position_ids"][row].tolist() == [ids[:i].count(ids[i]) for i in range(16)]
            for query in range(16):
                sees = [key <= query and ids[key] == ids[query] for key in range(16)]
                assert (~mask[row, 0, query]).tolist() == sees


def test_context_parallel_ranks_share_every_sequence(
    one_rank: Any, make_config: Callable[..., Any]
) -> None:
    from chunkgraph.megatron.core.access import import_megatron
    from chunkgraph.trainer.batches import SequenceBatches

    model = {"layer_spec": "transformer_engine"}
    whole, split = (
        config_from_mapping(
            {**make_config(model=model, pipeline={"context_parallel_size": n}), "device": "cuda"}
        )
        for n in (1, 2)
    )
    (expected,) = SequenceBatches(whole, one_rank).step(0, 1)
    state = import_megatron("megatron.core.parallel_state")
    parts = []
    for rank in range(2):
        with mock.patch.object(state, "get_context_parallel_rank", lambda rank=rank: rank):
            parts += SequenceBatches(split, one_rank).step(0, 1)
    for name in ("tokens", "labels", "position_ids", "is_counted"):
        # Each rank has a piece from the front and one from the end; put them back in order.
        (a, d), (b, c) = (part[name].chunk(2, dim=1) for part in parts)
        assert torch.equal(torch.cat([a, b, c, d], dim=1), expected[name])
    assert {float(part["num_counted"]) for part in parts} == {float(expected["is_counted"].sum())}
