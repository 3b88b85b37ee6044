"""Packed sequences through captured chunks, two microbatches in flight, in one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping
from in_process import attach
from packed_flights import (
    PACKINGS,
    SHAPE,
    differing,
    packed_batch,
    run_eager,
    run_flight,
    run_step,
)

from chunkgraph.errors import ConfigError, ReplayMismatchError
from chunkgraph.megatron.features.contexts import ContextGroups
from chunkgraph.megatron.features.packing.bank import PackingOptions
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.feature import Packing
from chunkgraph.megatron.features.packing.params import (
    join_params,
    make_params,
    refuse_other_context,
    shares_keys,
    split_params,
)
from chunkgraph.packing import ContextLimits, PackedShape, pack
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import seed_everything

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(100)]


@pytest.fixture
def spec() -> str:
    return "packed"


@pytest.fixture
def chunks(one_rank: Any, make_config: Any, spec: str) -> list[Any]:
    """Make a GPTModel on packed sequences whose backward reads the offsets, as on a GPU."""
    config = config_from_mapping(
        make_config(
            model={
                "layer_spec": f"user_specs:{spec}",
                "num_layers": 2,
                "recompute_granularity": "selective",
            },
            train={"micro_batch_size": 1},
            packing={"max_packed_seqs": SHAPE.max_packed_seqs, "max_packed_tokens": 32},
        )
    )
    seed_everything(1, one_rank)
    return build_model(config, one_rank)


@pytest.fixture(params=["block", "chunk"])
def graphs(chunks: list[Any], request: Any) -> Any:
    """Make graphs of two slots."""
    return attach(chunks, scope=request.param, num_slots=[2], packing=SHAPE)


@pytest.mark.every_release
def test_packings_never_seen_at_capture(chunks: list[Any], graphs: Any) -> None:
    for packings in [*PACKINGS, PACKINGS[1]]:
        expected = run_eager(chunks[0], graphs, packings)
        assert all(value.any() for value in expected.values())
        assert differing(run_step(graphs, chunks[0], packings), expected) == []
    assert graphs.counters.capture_sessions == 1
    assert graphs.counters.replays == 8


@pytest.mark.parametrize("spec", ["packed_poisoned"])
def test_a_poisoned_tail_reaches_nothing(chunks: list[Any], graphs: Any) -> None:
    """NaN in every tail row of query, key and value changes no loss or gradient."""
    from user_specs import PoisonedCore

    for packings in ([[10, 8], [5]], [[3, 1, 1], [20, 2]]):
        actual = run_step(graphs, chunks[0], packings)
        assert all(value.isfinite().all() for value in actual.values())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PoisonedCore, "poison", 0.0)
            expected = run_eager(chunks[0], graphs, packings)
        assert differing(actual, expected) == []
    assert graphs.counters.replays == 2


def test_a_step_that_does_not_fit_runs_eagerly(chunks: list[Any], graphs: Any) -> None:
    run_step(graphs, chunks[0], PACKINGS[0])
    too_many = [[1] * 7, [32]]
    larger = PackedShape(9, 32)
    batches = [packed_batch(lengths, seed, larger) for seed, lengths in enumerate(too_many)]
    wrapped = graphs.wrap_forward_backward(lambda **_: run_flight(chunks[0], batches))
    graphs.announce(too_many)
    first = wrapped(num_microbatches=2)
    assert graphs.counters.captures == 0
    run_step(graphs, chunks[0], PACKINGS[1])
    assert graphs.counters.capture_sessions == 1
    again = wrapped(num_microbatches=2, packings=too_many)
    assert differing(first, again) == []
    run_step(graphs, chunks[0], PACKINGS[2], misfit="a bad day")
    assert dict(graphs.counters.packing_overflows) == {"too many documents": 2, "a bad day": 1}
    expected = run_eager(chunks[0], graphs, PACKINGS[3])
    assert differing(run_step(graphs, chunks[0], PACKINGS[3]), expected) == []
    assert graphs.counters.replays == 4
    assert graphs.counters.fallbacks == {"capture warmup": 1, "packing overflow": 3}


def test_what_differs_from_the_capture_is_named(chunks: list[Any], graphs: Any) -> None:
    def call(**changes: Any) -> None:
        batch = packed_batch([4, 5])
        vars(batch["packed_seq_params"]).update(changes)
        wrapped = graphs.wrap_forward_backward(lambda **_: run_flight(chunks[0], [batch]))
        wrapped(num_microbatches=1, packings=[[4, 5]])

    call()
    with pytest.raises(ReplayMismatchError, match=r"max_seqlen_q'?: captured 32, called 9"):
        call(max_seqlen_q=9)
    with pytest.raises(ReplayMismatchError, match="max_seqlen_kv"):
        call(max_seqlen_kv=torch.tensor(32))


def test_ranks_compare_all_banks(chunks: list[Any]) -> None:
    site = attach(chunks, num_slots=(2,), packing=SHAPE).site
    assert isinstance(site.equal_facts()["packing"], PackedBanks)
    longer = PackedShape(SHAPE.max_packed_seqs, 2 * SHAPE.max_packed_tokens)
    limits = ContextLimits(world_size=1, max_tokens_per_rank=32, max_packed_seqs=4)
    groups = ContextGroups([0], {1: None})
    different = [
        PackedBanks([SHAPE]),
        PackedBanks([longer]),
        PackedBanks([longer, SHAPE]),
        PackedBanks([SHAPE], [2]),
        PackedBanks.of_limits(limits, groups),
        PackedBanks.of_limits(replace(limits, max_packed_seqs=5), groups),
    ]
    assert len({str(banks) for banks in different}) == len(different)


@pytest.mark.parametrize("graphs", ["block", "chunk"], indirect=True)
@pytest.mark.parametrize(
    "names",
    [
        ("cu_seqlens_q_padded",),
        ("cu_seqlens_kv_padded",),
        ("cu_seqlens_q_padded", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_kv_padded"),
        (),
    ],
)
def test_rows_after_the_last_offset_are_refused(
    chunks: list[Any], graphs: Any, names: tuple[str, ...]
) -> None:
    """Megatron's unfused RoPE cannot rotate them; its kernel leaves such rows unchanged."""
    batch = packed_batch([7, 5])
    params = batch["packed_seq_params"]
    check = graphs.features.wrap(graphs.site.parts[0]).check_sample
    is_integer = graphs.site.parts[0].module is not graphs.site.parts[0]._block
    first = None if is_integer else torch.zeros(32, 1, 8)
    check(first, input_ids=batch["input_ids"], **split_params(params))
    check(first, input_ids=batch["input_ids"])  # not packed
    if not names:  # as for sequences without padding between them
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = None
    if names:
        short = params.cu_seqlens_q_padded.clone()
        short[-1] -= 3
        for name in names:  # one tensor in all fields
            setattr(params, name, short)
    ends_at = f"{names[0]} ends at 29" if names else "cu_seqlens_q ends at 12"
    arguments = split_params(params)
    with pytest.raises(ConfigError, match=rf"chunk 0.*{ends_at}, but there are 32 rows"):
        check(first, input_ids=batch["input_ids"], **arguments)
    check(first, input_ids=None)  # not packed, and no token numbers
    check(first)
    if is_integer:  # the caller embeds tokens
        with pytest.raises(ConfigError, match=rf"{ends_at}, but there are 32 rows"):
            check(first, input_ids=None, decoder_input=torch.zeros(32, 1, 8), **arguments)
    # Each of four ranks that share the microbatch has a quarter of the rows.
    rows = {"input_ids": torch.zeros(1, 8)} if is_integer else {}
    part = torch.zeros(8, 1, 8) if first is not None else None
    whole = split_params(packed_batch([7, 5])["packed_seq_params"])
    check(part, **rows, **{**whole, "packed_seq_params.local_cp_size": 4})
    with pytest.raises(ConfigError, match=r"there are 8 rows \(8 on each of 1 context"):
        check(part, **rows, **whole)


@pytest.fixture
def seen(chunks: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of sequences at each run of attention."""
    from user_specs import PackedCore

    seen: list[int] = []
    forward = PackedCore.forward

    def watched(core: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        seen.append(packed_seq_params.cu_seqlens_q_padded.numel() - 1)
        return forward(core, *args, packed_seq_params=packed_seq_params, **kwargs)

    monkeypatch.setattr(PackedCore, "forward", watched)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["block", "chunk"])
def test_offsets_of_the_most_sequences_are_cut(
    chunks: list[Any], seen: list[int], scope: Any
) -> None:
    """For graphs of fewer sequences and in eager steps; offsets may also have the final number."""
    shape = PackedShape(6, 32)
    attached = attach(
        chunks, scope=scope, num_slots=[2], packing=PackingOptions(shape, seq_buckets=(4, 2))
    )
    packings = [[[10, 8, 6], [20]], [[5, 5, 5, 5, 5], [1, 20]], [[1], [16, 16]], [[3, 9], [20]]]
    few = PackedShape(2, 32)
    run_step(attached, chunks[0], packings[0], shape)  # warmup
    assert set(seen) == {4, 2}
    for own in packings:
        expected = run_eager(chunks[0], attached, own, shape)
        assert differing(run_step(attached, chunks[0], own, shape), expected) == []
    assert attached.replays_of_bank == {
        "32 tokens, 6 sequences": 1,
        "32 tokens, 4 sequences": 4,
        "32 tokens, 2 sequences": 3,
    }
    of_graphs = attached.counters.replays
    seen.clear()
    run_step(attached, chunks[0], [[5, 5, 5, 5, 5], [7]], shape, misfit="a bad day")
    # Two layers, and once more in a recomputing backward.
    assert seen == ([6] * 2 + [2] * 2) * 2
    expected = run_eager(chunks[0], attached, [[7], [20]], few)
    assert differing(run_step(attached, chunks[0], [[7], [20]], few), expected) == []
    assert attached.counters.replays == of_graphs + 2


@pytest.mark.parametrize("lengths", [[7, 5, 20], [4, 4, 4], [7, 5, 4, 3, 2]])
def test_documents_that_were_not_announced_are_not_lost(
    chunks: list[Any], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents that fill the rows or not; only one of them is announced."""
    attached = attach(chunks, num_slots=[2], packing=PackingOptions(SHAPE, seq_buckets=(2,)))
    batch = packed_batch(lengths)
    run = attached.wrap_forward_backward(lambda **_: run_flight(chunks[0], [batch]))
    message = r"chunk 0.*, microbatch 0: packed_seq_params.cu_seqlens_q.* has more than the 1 docum"
    with pytest.raises(ConfigError, match=message):
        run(num_microbatches=1, packings=[[32]])
    run(num_microbatches=1, packings=[lengths])
    monkeypatch.setattr(Packing, "_refuse_lost", lambda *_: pytest.fail("the host waits"))
    batch = packed_batch([5])
    run(num_microbatches=1, packings=[[5]])
    assert attached.counters.replays == 1


def test_offsets_are_cut_for_banks_of_context_parallel_sizes(
    chunks: list[Any], seen: list[int]
) -> None:
    limits = ContextLimits(world_size=1, max_tokens_per_rank=32, max_packed_seqs=6)
    groups = ContextGroups([0], {1: None})
    banks = PackedBanks.of_limits(limits, groups, seq_buckets=(3,))
    attached = attach(chunks, num_slots=[2], packing=banks)
    many, few = banks.keys
    for packings, keys in (
        ([[7, 5], [9]], [few, few]),
        ([[5, 5, 5, 5, 5], [1, 30]], [many, few]),
        ([[32], [3, 4, 5]], [few, many]),
    ):
        batches = [
            packed_batch(lengths, seed, limits.shape(1)) for seed, lengths in enumerate(packings)
        ]
        for batch in batches:
            batch["packed_seq_params"].cp_group = None
            batch["packed_seq_params"].local_cp_size = 1
        run = attached.wrap_forward_backward(lambda **_: run_flight(chunks[0], batches))  # noqa: B023
        expected = run_eager(chunks[0], attached, packings)
        seen.clear()
        assert differing(run(num_microbatches=2, contexts=keys), expected) == []
        if keys == [few, few]:  # warmup
            assert seen == [3] * 8
    assert attached.counters.replays == 4
    assert attached.replays_of_bank == {
        "CP 1 with 32 tokens a rank, 6 sequences": 2,
        "CP 1 with 32 tokens a rank, 3 sequences": 2,
    }
    attached.detach()


# Megatron's parameters of packed sequences without a model: split, joined, made, refused.


@pytest.mark.every_release
def test_pieces_come_together_as_they_were(one_rank: Any) -> None:
    """Also one tensor in two fields, and attributes that a user added."""
    from megatron.core.packed_seq_params import PackedSeqParams

    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    params = PackedSeqParams("thd", offsets, offsets, None, offsets.clone(), 8, 8)
    params.more = "more"
    arguments = split_params(params)
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


@pytest.mark.every_release
def test_a_shape_for_another_context_parallel_size_is_refused() -> None:
    shape = PackedShape(4, 32, context_parallel_size=2)
    alone = SimpleNamespace(context_parallel_size=1)
    with pytest.raises(ConfigError, match="for context_parallel_size 2, but the model has 1"):
        refuse_other_context(shape, alone)
    refuse_other_context(shape, SimpleNamespace(context_parallel_size=2))


@pytest.mark.every_release
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


@pytest.mark.every_release
def test_keys_are_shared_by_what_the_model_or_its_arguments_say() -> None:
    heads = {"num_attention_heads": 4, "num_query_groups": 1}
    assert shares_keys(SimpleNamespace(**heads))
    # Megatron's arguments have 1 group if heads share no keys.
    assert not shares_keys(SimpleNamespace(**heads, group_query_attention=False))
    assert shares_keys(SimpleNamespace(**heads, group_query_attention=True))
    assert not shares_keys(SimpleNamespace(num_attention_heads=4))
