"""Memory estimates of banks."""

from __future__ import annotations

import pytest

from chunkgraph.errors import ConfigError
from chunkgraph.slots import BankSizes, ModelSizes, estimate_banks, estimate_memory, plan_slots

MODEL = ModelSizes(
    num_layers=8,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    seq_length=32,
    micro_batch_size=2,
    vocab_size=100,
)


def sizes(*pairs):
    return [BankSizes(context_parallel_size=c, tokens_per_rank=t) for c, t in pairs]


def test_banks_of_one_length_add_only_their_tables():
    plan = plan_slots(2, 2, rank=0)
    alone = estimate_memory(plan, MODEL)
    # 64 tokens of one sequence are as many rows as two sequences of 32 tokens.
    large, middle, small = estimate_banks(plan, MODEL, sizes((1, 64), (4, 64), (2, 64)))
    assert [b.context_parallel_size for b in (large, middle, small)] == [4, 2, 1]
    assert {b.slot_bytes for b in (large, middle, small)} == {alone.slot_bytes}
    assert {b.num_graphs for b in (large, middle, small)} == {plan.num_graphs}
    assert [b.table_bytes for b in (large, middle, small)] == [4 * 64 * 64, 2 * 64 * 64, 64 * 64]
    assert large.added_bytes == large.slot_bytes + large.table_bytes
    assert (middle.added_bytes, small.added_bytes) == (middle.table_bytes, small.table_bytes)


def test_shorter_lengths_of_a_size_add_nothing():
    plan = plan_slots(1, rank=0)
    estimates = estimate_banks(plan, MODEL, sizes((2, 16), (2, 64), (1, 64)))
    assert [(b.context_parallel_size, b.tokens_per_rank) for b in estimates] == [
        (2, 64), (2, 16), (1, 64),
    ]  # fmt: skip
    assert estimates[1].added_bytes == 0
    assert estimates[1].slot_bytes < estimates[0].slot_bytes


def test_slots_are_no_more_than_the_microbatches_of_a_step():
    (bank,) = estimate_banks(plan_slots(4, rank=0, max_num_microbatches=2), MODEL, sizes((4, 64)))
    assert bank.slots_per_chunk == (2,)


def test_banks_that_cannot_be():
    plan = plan_slots(1, rank=0)
    for wrong in ([], sizes((2, 8), (2, 8))):
        with pytest.raises(ConfigError, match="pass at least one bank and no bank twice"):
            estimate_banks(plan, MODEL, wrong)
    with pytest.raises(ConfigError, match="size of 3 is not a power of two"):
        sizes((3, 8))
    with pytest.raises(ConfigError, match="0 tokens per rank"):
        sizes((2, 0))
