"""Megatron's parameters of packed sequences without a model: split, joined, made, refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.features.packing.params import (
    join_params,
    make_params,
    refuse_other_context,
    shares_keys,
    split_params,
)
from chunkgraph.packing import PackedShape, pack

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(100)]


def test_pieces_come_together_as_they_were(one_rank: Any) -> None:
    """Also one tensor in two fields, and attributes that a user added."""
    from megatron.core.packed_seq_params import PackedSeqParams

    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    params = PackedSeqParams("thd", offsets, offsets, None, offsets.clone(), 8, 8)
    params.more = "more"
    arguments = split_params(params, "rank 0")
    assert sum(isinstance(value, torch.Tensor) for value in arguments.values()) == 2
    arguments["other"] = 1
    join_params(arguments)
    again = arguments.pop("packed_seq_params")
    assert arguments == {"other": 1}
    assert type(again) is PackedSeqParams
    assert again.cu_seqlens_q is again.cu_seqlens_kv
    assert again.cu_seqlens_q.data_ptr() == offsets.data_ptr()
    assert again.cu_seqlens_q_padded is None
    assert again.cu_seqlens_kv_padded is not again.cu_seqlens_q
    assert (again.max_seqlen_q, again.more) == (8, "more")
    assert copy.copy(again).qkv_format == "thd"
    with pytest.raises(ConfigError, match="Pass Megatron's PackedSeqParams"):
        split_params(SimpleNamespace(), "rank 0")


def test_a_shape_for_another_context_parallel_size_is_refused() -> None:
    shape = PackedShape(4, 32, context_parallel_size=2)
    alone = SimpleNamespace(context_parallel_size=1)
    with pytest.raises(ConfigError, match="for context_parallel_size 2, but the model has 1"):
        refuse_other_context(shape, alone)
    refuse_other_context(shape, SimpleNamespace(context_parallel_size=2))


@pytest.mark.parametrize("counts_padding", [False, True])
def test_attention_gets_tokens_rows_and_padding(counts_padding: bool) -> None:
    shape = PackedShape(4, 32, context_parallel_size=2, counts_padding=counts_padding)
    params = make_params(pack([5, 8], shape), torch.device("cpu"))
    ends = [0, 8, 16, 16, 16] if counts_padding else [0, 5, 13, 13, 13]
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == ends
    assert params.cu_seqlens_q_padded.tolist() == [0, 8, 16, 32, 32]
    assert params.cu_seqlens_kv_padded is params.cu_seqlens_q_padded
    if hasattr(type(params), "pad_between_seqs"):  # Megatron-core 0.17 and later
        assert params.pad_between_seqs is True


def test_keys_are_shared_by_what_the_model_or_its_arguments_say() -> None:
    heads = {"num_attention_heads": 4, "num_query_groups": 1}
    assert shares_keys(SimpleNamespace(**heads))
    # Megatron's arguments have 1 group if heads share no keys.
    assert not shares_keys(SimpleNamespace(**heads, group_query_attention=False))
    assert shares_keys(SimpleNamespace(**heads, group_query_attention=True))
    assert not shares_keys(SimpleNamespace(num_attention_heads=4))
