"""Packed documents through captured Mamba layers, two microbatches in flight, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from extended_config import config_from_mapping
from in_process import attach
from packed_cases import SMALL_HYBRID
from packed_flights import differing, packed_batch, run_eager, run_flight

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.features.hybrid import (
    rows_after_documents,
)
from chunkgraph.packing import PackedShape, pack
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import seed_everything

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(100)]

_SHAPE = PackedShape(6, 14)
Packings = Sequence[Sequence[int]]
# Two microbatches each; graphs are captured with the first pair.
_PACKINGS: list[Packings] = [
    [[5, 4, 3], [14]],
    [[2, 2, 2, 2, 3], [1, 12]],
    [[1], [7, 7]],
    [[3, 1, 1, 1, 8], [13]],
]


@pytest.fixture
def chunks(one_rank: Any, make_config: Any) -> list[Any]:
    """Make a hybrid model whose backward reads the starts of documents, as kernels on a GPU do."""
    config = config_from_mapping(
        make_config(
            model={
                "layer_spec": "mamba_stand_in:packed",
                "hybrid_layer_pattern": "M*M-",
                "num_layers": 4,
                **SMALL_HYBRID,
            },
            train={"micro_batch_size": 1},
            packing={
                "max_packed_seqs": _SHAPE.max_packed_seqs,
                "max_packed_tokens": _SHAPE.max_packed_tokens,
            },
        )
    )
    seed_everything(1, one_rank)
    return build_model(config, one_rank)


class Flight:
    """Steps of a model chunk: the forwards of all microbatches, then their backwards."""

    def __init__(self, chunk: Any, graphs: Any) -> None:
        self.chunk = chunk
        self.graphs = graphs

    @staticmethod
    def batch(lengths: Sequence[int], seed: int = 1) -> dict[str, Any]:
        return packed_batch(lengths, seed, _SHAPE, with_seq_idx=True)

    def step(
        self, packings: Packings, batches: Sequence[dict[str, Any]] | None = None
    ) -> dict[str, torch.Tensor]:
        """Run a step with graphs, if there are any."""
        flight_batches = batches or [
            self.batch(lengths, seed) for seed, lengths in enumerate(packings)
        ]
        wrapped = self.graphs.wrap_forward_backward(
            lambda **_: run_flight(self.chunk, flight_batches)
        )
        return wrapped(num_microbatches=len(packings), packings=packings)

    def eager(self, packings: Packings) -> dict[str, torch.Tensor]:
        """Run the same step without graphs."""
        return run_eager(self.chunk, self.graphs, packings, _SHAPE, with_seq_idx=True)


@pytest.fixture(params=["block", "chunk"])
def flight(chunks: list[Any], request: Any) -> Flight:
    """Make graphs of two slots."""
    attached = attach(chunks, scope=request.param, num_slots=[2], packing=_SHAPE)
    return Flight(chunks[0], attached)


only_block = pytest.mark.parametrize("flight", ["block"], indirect=True)


@pytest.mark.every_release
def test_packings_never_seen_at_capture(flight: Flight) -> None:
    for packings in [*_PACKINGS, _PACKINGS[1]]:
        expected = flight.eager(packings)
        assert all(value.any() for value in expected.values())
        assert differing(flight.step(packings), expected) == []
    assert flight.graphs.counters.capture_sessions == 1
    assert flight.graphs.counters.replays == 8


def test_documents_of_rows_have_room_after_them(
    flight: Flight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel reads them for 64 rows at once, for any number of rows (here 14)."""
    from mamba_stand_in import Switch

    eager: list[int] = []
    captured: list[int] = []
    monkeypatch.setattr(Switch, "rooms", eager)
    flight.step(_PACKINGS[0])
    monkeypatch.setattr(Switch, "rooms", captured)
    flight.step(_PACKINGS[1])
    assert flight.graphs.counters.replays > 0
    # Eager steps of 0.16's mixers are Megatron's own.
    if hasattr(flight.batch([1])["packed_seq_params"], "seq_idx"):
        assert eager
        assert min(eager) >= 50
    assert captured
    assert min(captured) >= 50


def test_nan_in_the_tail_of_mamba_layers_reaches_nothing(flight: Flight) -> None:
    """Without clearing it would: mixers add up gradients over all rows, and 0 times NaN is NaN."""
    from poison import Poison

    poison = Poison(flight.chunk)
    for packings in ([[5, 4, 3], [11]], [[3, 1, 1], [8, 2]]):
        poison.value.fill_(float("nan"))
        actual = flight.step(packings)
        poison.value.fill_(0.0)
        expected = flight.eager(packings)
        assert all(value.isfinite().all() for value in actual.values())
        assert differing(actual, expected) == []
    assert flight.graphs.counters.replays == 2


@only_block
def test_mamba_layers_know_the_documents(flight: Flight) -> None:
    batch = flight.batch([4, 5])
    if not hasattr(batch["packed_seq_params"], "seq_idx"):
        pytest.skip("in this release mixers number the rows themselves")
    assert batch["packed_seq_params"].seq_idx.tolist() == [[0] * 4 + [1] * 5 + [2] * 5]
    batch["packed_seq_params"].seq_idx = None
    with pytest.raises(ConfigError, match="packed_seq_params without seq_idx: all documents"):
        flight.step([[4, 5]], [batch])


@pytest.mark.every_release
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.config, "use_mamba_mem_eff_path", False), "use_mamba_mem_eff_path"),
        (lambda m: setattr(m.config, "fp8", "hybrid"), "fp8='hybrid' with hybrid model"),
        (lambda m: setattr(m, "mtp_num_depths", 1), "with multi-token prediction its stage"),
        (lambda m: m.decoder.layer_type_list.append("D"), r"sparse attention \(D\)"),
        (lambda m: m.decoder.layer_type_list.append("G"), r"gated delta nets \(G\)"),
    ],
)
def test_what_cannot_be_captured_is_named(chunks: list[Any], change: Any, message: str) -> None:
    change(chunks[0].module)
    with pytest.raises(ConfigError, match=message):
        attach(chunks, packing=_SHAPE)
    assert "forward" not in chunks[0].module.decoder.__dict__


# Mamba layers clear the rows after packed documents.


@pytest.mark.every_release
@pytest.mark.parametrize("size", [1, 2, 4])
def test_they_are_the_tail_of_the_packing_on_every_rank(size: int) -> None:
    shape = PackedShape(6, 64, context_parallel_size=size)
    for lengths in ([5, 11, 3], [1], [16, 16, 16, 16], [9, 1, 1, 1, 20]):
        packed = pack(lengths, shape)
        offsets, padded = map(torch.from_numpy, (packed.cu_seqlens, packed.cu_seqlens_padded))
        tail = np.arange(64) >= packed.cu_seqlens_padded[len(lengths)]
        for rank in range(size):
            expected = tail if size == 1 else tail[packed.rows_of_rank(rank)]
            actual = rows_after_documents(offsets, padded, 0, 64 // size, size)
            assert actual.tolist() == expected.tolist(), (lengths, rank)
            half = rows_after_documents(offsets, padded, 32 // size, 32 // size, size)
            assert half.tolist() == expected[32 // size :].tolist()
