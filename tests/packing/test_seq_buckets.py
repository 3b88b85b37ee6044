from __future__ import annotations

import numpy as np
import pytest

from chunkgraph.packing import MicrobatchSizes, PackedShape, sizes_of
from chunkgraph.packing.recommend import recommended_seq_buckets
from chunkgraph.packing.seq_counts import default_seq_buckets
from chunkgraph.settings import config_from_mapping, resolved


def test_powers_of_two_up_to_half_and_32_for_short_rows() -> None:
    for most, expected in ((0, ()), (127, ()), (128, (64,)), (512, (64, 128, 256))):
        assert default_seq_buckets(most, 1025) == expected
    for most, expected in ((0, ()), (32, ()), (33, (32,)), (127, (32,)), (128, (32, 64))):
        assert default_seq_buckets(most, 1024) == expected


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        ({}, (64,)),
        ({"seq_buckets": []}, ()),
        ({"seq_buckets": [9, 100]}, (9, 100)),
        ({"context_parallel_sizes": [1]}, (64,)),
        ({"max_packed_tokens": 1024}, (32, 64)),
        ({"buckets": [0.5]}, (32, 64)),
        ({"buckets": [0.75, 1.0]}, (64,)),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_run_has(packing: dict, expected: tuple[int, ...], num_ranks: int) -> None:
    """The same with context-parallel ranks that have as many rows each."""
    if "context_parallel_sizes" in packing:  # these rows are already per rank
        num_ranks = 1
    if "max_packed_tokens" in packing:
        packing = {**packing, "max_packed_tokens": packing["max_packed_tokens"] * num_ranks}
    config = config_from_mapping(
        {
            "device": "cuda",
            "model": {
                "num_layers": 2,
                "hidden_size": 64,
                "ffn_hidden_size": 128,
                "num_attention_heads": 4,
                "layer_spec": "transformer_engine",
                "seq_length": 2048 * num_ranks,
            },
            "pipeline": {"context_parallel_size": num_ranks},
            "train": {"micro_batch_size": 1, "num_microbatches": [2]},
            "packing": {"max_packed_seqs": 200, **packing},
        }
    )
    assert resolved(config).packing.seq_buckets == expected


def sizes_of_counts(most: int, others: int) -> MicrobatchSizes:
    """Return 100 microbatches, every twentieth with ``most`` short documents."""
    counts = np.array([most if i % 20 == 0 else others for i in range(100)])
    ends = np.cumsum(counts)
    return sizes_of(np.ones(ends[-1], dtype=np.int64), ends, PackedShape(2, 16384))


@pytest.mark.parametrize(
    ("most", "others", "tokens", "fewer"),
    [
        (300, 40, 12032, []),  # the default has graphs for 64
        (99, 12, 4096, [32]),  # there is no default
        (99, 60, 4096, []),  # not fewer than half
        (180, 150, 7296, [0]),  # no microbatch has so few
        (3199, 1200, 3200, [1536]),
        (300, 40, 384, []),  # in short rows there are graphs for 32
    ],
)
def test_fewer_sequences_are_recommended_where_the_default_does_not_have_them(
    most: int, others: int, tokens: int, fewer: list[int]
) -> None:
    shape = PackedShape(most + 1, tokens)
    assert recommended_seq_buckets(sizes_of_counts(most, others), shape) == fewer
