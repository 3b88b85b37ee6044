"""What calls of a chunk get instead of the caller's rows and offsets."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from in_process import attach
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from chunkgraph.engine import StepMode
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.feature import Step, StepInputs
from chunkgraph.megatron.features.packing import pinned
from chunkgraph.megatron.features.packing.bank import PackedBank
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.feature import PackedCalls, Packing
from chunkgraph.packing import PackedShape

pytestmark = [pytest.mark.megatron, pytest.mark.every_release]


def params(**fields: Any) -> Any:
    tensors = {
        name: torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
        for name, value in fields.items()
    }
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return SimpleNamespace(**{**dict.fromkeys(names), "max_seqlen_q": 5, **tensors})


def padded(num_rows: int, size: int = 1, **kwargs: Any) -> dict[str, Any]:
    return pinned._padded(kwargs, num_rows, PackedBank(PackedShape(4, 16, size)), "it")


def test_rows_are_filled_and_offsets_have_one_count() -> None:
    documents = [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]]
    own = params(cu_seqlens_q=[0, 3, 8], cu_seqlens_q_padded=[0, 4, 10], seq_idx=documents)
    own.total_tokens = 10
    own.cu_seqlens_kv, own.cu_seqlens_kv_padded = own.cu_seqlens_q, own.cu_seqlens_q_padded
    ids = torch.arange(1, 11)[None]
    got = padded(10, input_ids=ids, labels=ids, padding_mask=ids > 9, packed_seq_params=own)
    assert got["input_ids"].tolist() == [[*range(1, 11), *[0] * 6]]
    assert got["padding_mask"].tolist() == [[*[False] * 9, *[True] * 7]]
    now = got["packed_seq_params"]
    # The added rows hold tokens of a document that nobody reads; no document has more than rows.
    assert now.cu_seqlens_q.tolist() == [0, 3, 8, 14, 14]
    assert now.cu_seqlens_q_padded.tolist() == [0, 4, 10, 16, 16]
    assert now.cu_seqlens_q is now.cu_seqlens_kv
    assert now.seq_idx.tolist() == [documents[0] + [2] * 6]
    assert (now.max_seqlen_q, now.max_seqlen_kv, now.total_tokens) == (17, 17, 16)
    assert own.cu_seqlens_q.numel() == 3


def test_ranks_that_share_documents_have_their_part_of_the_rows() -> None:
    own = params(cu_seqlens_q=[0, 4, 8], cu_seqlens_kv=[0, 4, 8])
    got = padded(4, 2, input_ids=torch.ones(1, 4), packed_seq_params=own)
    assert got["input_ids"].shape == (1, 8)
    assert got["packed_seq_params"].cu_seqlens_kv.tolist() == [0, 4, 8, 16, 16]


def test_calls_that_differ_from_the_packings_are_refused() -> None:
    own = params(cu_seqlens_q=[0, 4, 8], cu_seqlens_kv=[0, 4, 8])
    with pytest.raises(ConfigError, match=r"input_ids has 9 rows on this rank, but .* have 8"):
        padded(8, input_ids=torch.ones(1, 9), packed_seq_params=own)
    with pytest.raises(ConfigError, match="the call has no packed_seq_params"):
        padded(8, input_ids=torch.ones(1, 8))
    many = params(cu_seqlens_q=[0, 1, 2, 3, 4, 8])
    with pytest.raises(ConfigError, match=r"cu_seqlens_q has 5 sequences, but .* fit 4"):
        padded(8, packed_seq_params=many)


def test_passes_without_gradients_in_a_training_step_are_not_its_microbatches() -> None:
    model: Any = nn.Module()
    model.config, model.post_process = SimpleNamespace(variable_seq_lengths=True), False
    part: Any = SimpleNamespace(index=0, label="chunk 0", module=model, takes_all_calls=False)
    site: Any = SimpleNamespace(chunks=[model], parts=[part], config=model.config)
    site.place, site.shares_experts = SimpleNamespace(rank=0), False
    site.feature_options = {"packing": PackedBanks([PackedShape(8, 16)], seq_buckets=(4,))}
    rows, packing = pinned.PinnedRows(site), Packing(site)
    packing._engine = cast("Any", SimpleNamespace(report=1, misfit_of=lambda _: ""))
    names = "input_ids", "packed_seq_params.cu_seqlens_q"
    call = packing.call(part, lambda _, kwargs: [kwargs[name].numel() for name in names])
    call = rows.call(part, PackedCalls().call(part, call))
    documents = [2] * 7, [3, 5]
    plan = packing.plans.plan(StepInputs(packings=documents), {"num_microbatches": 2})
    seen = []
    for is_training, modes in (True, [False, True]), (False, [False]):
        step = Step(StepMode.EAGER, is_training, plan)
        with rows.step(step), packing.step(step):
            for lengths, enabled in itertools.product(documents, modes):
                own = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
                given = PackedSeqParams("thd", *[own] * 4, max(lengths), max(lengths))
                with torch.set_grad_enabled(enabled):
                    ids = torch.ones(1, sum(lengths))
                    seen.append(call((), {"input_ids": ids, "packed_seq_params": given}))
    assert seen == [[14, 8], [16, 9], [8, 3], [16, 5], [16, 9], [16, 5]]


def test_only_whole_chunks_are_pinned(chunks: list[nn.Module]) -> None:
    chunks[0].config.variable_seq_lengths = True
    with pytest.raises(ConfigError, match="variable_seq_lengths needs graphs of whole chunks"):
        attach(chunks, packing=PackedShape(4, 16), scope="block")
    with pytest.raises(ConfigError, match=r"pass attach\(\) the shapes to which rows are padded"):
        attach(chunks)
