from __future__ import annotations

import pytest

from chunkgraph.config import config_from_mapping, default_seq_buckets


@pytest.mark.parametrize(
    ("most", "found"),
    [(0, ()), (64, ()), (127, ()), (128, (64,)), (359, (64, 128)), (512, (64, 128, 256))],
)
def test_powers_of_two_up_to_half(most: int, found: tuple[int, ...]) -> None:
    assert default_seq_buckets(most) == found


@pytest.mark.parametrize(
    ("packing", "model", "found"),
    [
        ({}, {}, (64,)),
        ({"seq_buckets": None}, {}, (64,)),
        ({"seq_buckets": []}, {}, ()),
        ({"seq_buckets": [9, 100]}, {}, (9, 100)),
        ({}, {"fp8": "hybrid"}, (64,)),
        ({"seq_buckets": [9], "buckets": [0.5]}, {"fp8": "hybrid"}, (9,)),
        ({"context_parallel_sizes": [1]}, {}, (64,)),
        ({"context_parallel_sizes": [1], "seq_buckets": [9]}, {}, (9,)),
    ],
)
def test_what_a_run_has(packing: dict, model: dict, found: tuple[int, ...]) -> None:
    config = config_from_mapping(
        {
            "device": "cuda",
            "model": {
                "num_layers": 2,
                "hidden_size": 64,
                "ffn_hidden_size": 128,
                "num_attention_heads": 4,
                "seq_length": 512,
                "layer_spec": "transformer_engine",
                "normalization": "RMSNorm",
                **model,
            },
            "train": {"micro_batch_size": 1, "num_microbatches": [2]},
            "packing": {"max_packed_seqs": 200, **packing},
        }
    )
    assert config.seq_buckets == found
