"""Buckets of packed microbatches, and calls derived for another bucket."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.errors import ConfigError, PackingError
from chunkgraph.megatron.feature import StepInputs, StepPlan
from chunkgraph.megatron.features.packing.bank import PackedBank, PackingOptions, derived_call
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.steps import StepPlans
from chunkgraph.packing import PackedShape, pack

_SHAPE = PackedShape(5, 32)


def _buckets() -> PackedBanks:
    return PackedBanks(_SHAPE.buckets([0.25, 16]))


def _bank(banks: PackedBanks, rows: int, seqs: int | None = None) -> PackedBank:
    """Return the bank with ``rows`` rows, by default with the most sequences."""
    size = (rows, seqs or banks.largest_shape.max_packed_seqs)
    return next(bank for bank in banks.keys if _sizes([bank]) == [size])


def _sizes(banks: Iterable[Any]) -> list[Any]:
    """Return rows and sequences of each bank; None for a missing bank."""
    shapes = [bank and bank.shape for bank in banks]
    return [shape and (shape.max_packed_tokens, shape.max_packed_seqs) for shape in shapes]


def _begin(
    plans: StepPlans,
    packings: list[list[int]] | None,
    misfit: str,
    count: int,
    rows: list[int] | None = None,
    seq_length: int = 32,
) -> StepPlan:
    inputs = StepInputs(packings, misfit, rows)
    return plans.plan(inputs, {"num_microbatches": count, "seq_length": seq_length})


def _announce(
    plans: StepPlans, packings: list[list[int]], misfit: str = "", rows: list[int] | None = None
) -> str:
    return plans.announce(StepInputs(packings, misfit, rows))[0]


def test_lengths_are_those_that_ranks_can_share() -> None:
    shape = PackedShape(5, 64, context_parallel_size=2)
    for settings, expected in (
        ({}, (64, 20)),
        ({"sequence_parallel": False, "tensor_model_parallel_size": 4}, (64, 20)),
        ({"sequence_parallel": True, "tensor_model_parallel_size": 4}, (64, 24)),
        ({"fp8": "hybrid"}, (64, 32)),
        ({"fp8": "hybrid", "sequence_parallel": True, "tensor_model_parallel_size": 2}, (64,)),
    ):
        options = PackingOptions(shape, [0.28], [3])
        banks = PackedBanks.of_model(options, SimpleNamespace(**settings))
        assert (tuple(banks.by_rows), banks.seq_counts) == (expected, (5, 3))
    other, fp8 = replace(shape, max_packed_tokens=48), SimpleNamespace(fp8="e4m3")
    with pytest.raises(PackingError, match=r"tokens is 48.* use a multiple of 32"):
        PackedBanks.of_model(PackingOptions(other, [0.5]), fp8)
    assert list(PackedBanks.of_model(other, fp8).by_rows) == [48]


def test_no_sequence_of_another_bucket_is_longer_than_its_rows() -> None:
    """Offsets are derived; tables and the longest sequence are those of the target bucket."""
    banks = PackedBanks(PackedShape(5, 32).buckets([0.25]), [3])

    def call(bank: PackedBank) -> dict[str, Any]:
        packed = pack([3, 2], bank.shape)
        return {
            "rotary_pos_emb": torch.ones(packed.max_seqlen, 1, 1, 2),
            "packed_seq_params.cu_seqlens_q": torch.from_numpy(packed.cu_seqlens),
            "packed_seq_params.cu_seqlens_kv": "the same tensor as cu_seqlens_q",
            "packed_seq_params.cu_seqlens_q_padded": torch.from_numpy(packed.cu_seqlens_padded),
            "packed_seq_params.max_seqlen_q": packed.max_seqlen,
        }

    for source, target in itertools.permutations(banks.keys, 2):
        source_call = call(source)
        _, kwargs = derived_call(
            0, (torch.ones(source.num_tokens, 1, 2),), source_call, source, target
        )
        expected = call(target)
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert (kwargs[name].shape, kwargs[name].dtype) == (value.shape, value.dtype), name
            else:
                assert kwargs[name] == value, name
        rows = kwargs["packed_seq_params.cu_seqlens_q_padded"]
        tokens = kwargs["packed_seq_params.cu_seqlens_q"]
        assert rows[-1] == target.num_tokens
        assert rows.diff().max() <= expected["packed_seq_params.max_seqlen_q"]
        assert (tokens.diff() <= rows.diff()).all()
    # A script's documents may fill all rows, with a table of one row more.
    only = {
        "rotary_pos_emb": torch.ones(33, 1, 1, 2),
        "packed_seq_params.cu_seqlens_q": torch.tensor([0, 9, 18, 27, 32, 32]).int(),
        "packed_seq_params.max_seqlen_q": 33,
    }
    hidden = torch.ones(32, 1, 2)
    _, kwargs = derived_call(0, (hidden,), only, _bank(banks, 32), _bank(banks, 8, 3))
    assert kwargs["rotary_pos_emb"].size(0) == kwargs["packed_seq_params.max_seqlen_q"] == 9
    assert kwargs["packed_seq_params.cu_seqlens_q"].tolist() == [0, 8, 8, 8]


def test_a_document_that_is_cut_has_no_more_tokens_than_rows() -> None:
    """The cut may be between a document's last token and its last row (context parallelism)."""
    whole = PackedShape(4, 32, context_parallel_size=2)
    banks = PackedBanks(whole.buckets([12]))
    packed = pack([7, 7, 9], whole)
    name = "packed_seq_params.cu_seqlens_q"
    call = {
        name: torch.from_numpy(packed.cu_seqlens),
        f"{name}_padded": torch.from_numpy(packed.cu_seqlens_padded),
    }
    hidden = torch.ones(16, 1, 2)
    _, kwargs = derived_call(0, (hidden,), call, _bank(banks, 32), _bank(banks, 12))
    assert kwargs[f"{name}_padded"].tolist() == [0, 8, 12, 12, 12]
    assert kwargs[name].tolist() == [0, 7, 11, 11, 11]
    assert kwargs[name].dtype == torch.int32


def test_steps_know_the_buckets_of_their_microbatches() -> None:
    plans = StepPlans(_buckets(), 0)

    def begin(*arguments: Any) -> tuple[str | None, Any]:
        plan = _begin(plans, *arguments)
        return plan.misfit, plan.rows

    assert begin([[8], [9]], "", 2) == ("", [8, 16])
    assert begin([[8], [9]], "", 2, [16, 32]) == ("", [16, 32])
    assert begin([[1] * 9], "", 1) == ("too many documents", [32])
    for wrong in ([8, 8], [8], [8, 20]):
        with pytest.raises(ConfigError, match=r"rank 0: the buckets .* do not hold"):
            begin([[8], [9]], "", 2, wrong)
    assert begin([[40]], "", 1, [40]) == ("a document is longer than allowed", [40])
    with pytest.raises(ConfigError, match="neither packings nor buckets"):
        begin(None, "a bad day", 1)
    assert begin(None, "a bad day", 1, [32]) == ("a bad day", [32])
    assert _announce(plans, [[3]], "", [16]) == ""
    assert begin(None, "", 1) == (None, [16])
    _announce(plans, [[3]])
    with pytest.raises(ConfigError, match="announced: 1 with"):
        begin([[3]], "", 1, [16])
    assert begin([[3]], "", 1)[0] is None  # the announcement still holds
    with pytest.raises(ConfigError, match="has 2 microbatches, but buckets for 1"):
        begin(None, "a bad day", 2, [16])


@pytest.mark.parametrize("is_announced", [False, True])
def test_rows_of_a_step_that_fits_nothing_are_the_schedules(is_announced: bool) -> None:
    """Announced or not; otherwise stages would receive another length than is sent."""
    plans = StepPlans(_buckets(), 0)

    def rows(packings: list[list[int]], seq_length: int, *buckets: Any) -> Any:
        if is_announced:
            _announce(plans, packings, "", *buckets)
            buckets = ()
        own = buckets[0] if buckets else None
        return _begin(plans, packings, "", len(packings), own, seq_length).rows

    assert rows([[8], [9]], 32) == [8, 16]
    assert rows([[30, 18], [9]], 48) is None
    assert rows([[30, 18], [9]], 32) == [32, 16]  # buckets hold all of them
    assert rows([[30, 18], [9]], 48, [48, 16]) == [48, 16]
    assert rows([[8], [9]], 32) == [8, 16]
    _announce(plans, [[30, 18]], "", [48])
    plans.withdraw()
    plan = _begin(plans, [[30, 18]], "", 1, None, 48)
    assert (plan.misfit, plan.rows) == ("too many tokens", None)


def test_offsets_of_what_fits_nothing_are_not_cut() -> None:
    """Such offsets may have empty sequences before documents, and cutting would join documents."""
    plans = StepPlans(_counted(3), 0)
    plan = _begin(plans, [[8], [20, 20], [1] * 9], "", 3)
    assert plan.banks is not None
    assert _sizes(plan.banks) == [(16, 3), (32, 3), (32, 9)]
    assert _sizes(plan.cut_for) == [(16, 3), None, None]
    assert _sizes(_begin(plans, [[8]], "a bad day", 1).cut_for) == [(16, 3)]
    assert _begin(plans, None, "a bad day", 1, [32]).cut_for == [None]


def _counted(*counts: int) -> PackedBanks:
    return PackedBanks(PackedShape(9, 32).buckets([0.5]), counts)


def test_each_takes_the_fewest_sequences_that_hold_it() -> None:
    banks = _counted(3, 5)
    assert _sizes(banks.keys) == [(32, 9), (32, 5), (32, 3), (16, 9), (16, 5), (16, 3)]
    packings = [[8], [8, 1], [1] * 3, [1] * 4, [1] * 5, [9, 9], [1] * 8, [1] * 9]
    tokens = banks.choose(packings)
    assert tokens == [16, 16, 16, 16, 16, 32, 16, 32]
    seqs = [3, 3, 5, 5, 9, 3, 9, 9]  # no bucket holds the last one
    keys = [
        banks.fewest_sequences(lengths, banks.by_rows[rows])
        for lengths, rows in zip(packings, tokens, strict=True)
    ]
    assert _sizes(keys) == list(zip(tokens, seqs, strict=True))
    assert [repr(bank) for bank in _counted().keys] == ["32 tokens", "16 tokens"]
    for wrong in (1, 9, 10, 2.5, True):
        with pytest.raises(
            ConfigError, match=r"seq_buckets contains .* below max_packed_seqs \(9\)"
        ):
            _counted(3, wrong)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    size=st.sampled_from([1, 2]),
    parts=st.lists(st.sampled_from([0.25, 0.5]), max_size=2),
    counts=st.sets(st.integers(2, 8), min_size=1, max_size=3),
)
def test_cut_offsets_are_those_of_fewer_sequences(
    lengths: list[int], size: int, parts: list[float], counts: set[int]
) -> None:
    """Equal to packing for the microbatch's own graphs; other arguments stay unchanged."""
    shape = PackedShape(9, 128, size)
    banks = PackedBanks(shape.buckets(parts), sorted(counts))
    (rows,) = banks.choose([lengths])
    bank = banks.fewest_sequences(lengths, banks.by_rows[rows])
    name = "packed_seq_params.cu_seqlens_q"

    def call(shape: PackedShape) -> dict[str, Any]:
        packed = pack(lengths, shape)
        return {
            name: torch.from_numpy(packed.cu_seqlens),
            f"{name}_padded": torch.from_numpy(packed.cu_seqlens_padded),
            "packed_seq_params.max_seqlen_q": 128,
        }

    expected = call(bank.shape)
    for shape_of_offsets in (banks.by_rows[rows], bank.shape):
        kwargs = banks.with_offsets_of(bank, call(shape_of_offsets))
        assert kwargs.keys() == expected.keys()
        assert all(np.array_equal(kwargs[key], expected[key]) for key in expected)


def test_other_arguments_and_offsets_are_left_as_they_are() -> None:
    name = "packed_seq_params.cu_seqlens_kv_padded"
    offsets = torch.arange(10, dtype=torch.int32)
    same = "the same tensor as cu_seqlens_q"
    kwargs = {"packed_seq_params.cu_seqlens_kv": same, name: offsets[:4]}
    banks = _counted(3)
    assert banks.with_offsets_of(_bank(banks, 32, 3), kwargs) is kwargs
    for bank in (_bank(banks, 32), None):  # for the most sequences, and for rows without a bank
        assert banks.with_offsets_of(bank, kwargs := {name: offsets}) is kwargs


def test_steps_know_the_banks_of_their_microbatches() -> None:
    plans = StepPlans(_counted(3), 0)

    def begin(*arguments: Any) -> tuple[str | None, Any]:
        plan = _begin(plans, *arguments)
        return plan.misfit, _sizes(plan.banks or ())

    assert begin([[8], [1] * 4, [17]], "", 3) == ("", [(16, 3), (16, 9), (32, 3)])
    assert begin([[8]], "", 1, [32]) == ("", [(32, 3)])
    assert begin(None, "a bad day", 2, [16, 32]) == ("a bad day", [(16, 9), (32, 9)])
    assert begin(None, "a bad day", 2, [16, 40]) == ("a bad day", [(16, 9), None])
    assert _announce(plans, [[3] * 3]) == ""
    assert begin(None, "", 1) == (None, [(16, 9)])
    alone = StepPlans(PackedBanks([_SHAPE], [3]), 0)
    plan = _begin(alone, None, "a bad day", 2)
    assert (plan.misfit, _sizes(plan.banks or ())) == ("a bad day", [(32, 5), (32, 5)])


def test_ranks_that_share_experts_are_to_agree() -> None:
    plans = StepPlans(_buckets(), 0, needs_buckets=True)
    with pytest.raises(ConfigError, match=r"share experts.*agree_on_buckets"):
        _begin(plans, [[8]], "", 1)
    assert _begin(plans, [[8]], "", 1, [32]).misfit == ""
    alone = StepPlans(PackedBanks([_SHAPE]), 0, needs_buckets=True)
    assert _begin(alone, [[8]], "", 1).misfit == ""


def test_rows_that_were_promised_to_hold_documents_hold_them() -> None:
    plans = StepPlans(PackedBanks([_SHAPE], fills_rows=True), 3)
    rows = _SHAPE.max_packed_tokens
    assert _begin(plans, [[rows - 2, 2], [rows]], "", 2).misfit == ""
    assert _begin(plans, [[2, 2]], "a bad day", 1).misfit == "a bad day"
    with pytest.raises(ConfigError, match=rf"rank 3, microbatch 1: .* {rows - 1} of {rows} rows"):
        _begin(plans, [[rows], [rows - 3, 2]], "", 2)
    with pytest.raises(ConfigError, match="have 2 of"):
        _announce(plans, [[2]])
