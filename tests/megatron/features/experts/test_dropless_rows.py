"""Destinations of rows without a capacity equal plain loops, as do products of experts."""

from __future__ import annotations

import importlib.util
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toys import Operators

from chunkgraph.engine.capture.accumulate import Accumulation
from chunkgraph.errors import ConfigError
from chunkgraph.graphs import RecorderBackend
from chunkgraph.megatron.features.experts import grouped_gemm
from chunkgraph.megatron.features.experts.dropless_rows import (
    ChosenRows,
    DeviceSplits,
    padded_rows,
)
from chunkgraph.megatron.features.experts.grouped_gemm import (
    GroupedGemm,
    add_biases,
    as_one,
    grouped_linear,
    lay_together,
    lie_reversed,
)
from chunkgraph.megatron.features.experts.room import LOAD_OF, Room

_SIZES = (3, 12, 4)  # experts, in, out


def test_rows_have_room_for_the_load_and_for_no_more_than_all() -> None:
    config: Any = SimpleNamespace(
        num_moe_experts=4, moe_router_topk=2, expert_model_parallel_size=2
    )
    room = Room(config)
    room.add_load(LOAD_OF // 2)
    assert room.rows(32, 64) == 64
    room.is_limited = True
    assert room.rows(32, 64) == 24  # 19.2, aligned
    room.give(LOAD_OF // 2)
    assert room.rows(32, 64) == 24  # 22.4
    room.give(9 * LOAD_OF)
    assert room.rows(32, 64) == 64
    assert Room(config).factor == math.inf


@pytest.mark.parametrize("ends", [(2, 2, 6), (0, 0, 0), (0, 8, 8), (3, 5, 7), (4, 8, 8)])
def test_padding_replays_with_other_ends(ends: tuple[int, ...]) -> None:
    """Each expert's rows begin at a multiple, with zeros after them, and come back in place."""
    torch.manual_seed(1)
    rows = torch.randn(8, 3, requires_grad=True)
    places = torch.tensor([1, 4, 8], dtype=torch.int32)
    backend = RecorderBackend()
    with backend.capture("padding", backend.new_pool("all")) as graph:
        shuffle, splits = padded_rows(DeviceSplits(places), rows.shape[0], 4)
        padded = shuffle.move(rows)
        back = shuffle.move_back(padded)
        (gradient,) = torch.autograd.grad(back, rows, torch.ones_like(rows))
        padded_ends = splits.ends
    places.copy_(torch.tensor(ends))
    graph.replay()
    pieces, begin = [], 0
    for end in ends:
        pieces += [rows[begin:end], rows.new_zeros(-(end - begin) % 4, 3)]
        begin = end
    expected = torch.cat(pieces)
    assert padded_ends[-1] == len(expected) <= len(padded)
    assert not len(padded) % 4
    assert torch.equal(padded[: len(expected)], expected)
    assert not padded[len(expected) :].any()
    assert torch.equal(back[: ends[-1]], rows[: ends[-1]])
    assert gradient[: ends[-1]].all()
    assert not gradient[ends[-1] :].any()


def test_weights_that_lie_together_are_seen_as_one() -> None:
    weights = [torch.nn.Parameter(torch.randn(4, 5).bfloat16()) for _ in range(3)]
    expected = torch.stack([w.detach() for w in weights])
    copied = as_one(weights)
    assert torch.equal(copied, expected)
    weights[1].data.zero_()
    assert torch.equal(copied, expected)
    weights[1].data.copy_(expected[1])
    # An odd stride in bytes, which no product accepts.
    lay_together(weights)
    assert torch.equal(as_one(weights), expected)
    assert as_one(weights).data_ptr() != weights[0].data_ptr()
    wide = [torch.nn.Parameter(torch.randn(4, 8)) for _ in range(3)]
    expected = torch.stack([w.detach() for w in wide])
    lay_together(wide)
    seen = as_one(wide)
    assert seen.data_ptr() == wide[0].data_ptr()
    wide[2].data.mul_(2)
    assert torch.equal(seen, torch.stack([w.detach() for w in wide]))
    lay_together(wide)
    assert as_one(wide).data_ptr() == seen.data_ptr()
    # Pieces of one buffer are not copied.
    buffer = torch.zeros(3 * 32)
    pieces = [torch.nn.Parameter(buffer[i * 32 : (i + 1) * 32].view(4, 8)) for i in (2, 1, 0)]
    lay_together(pieces)
    assert all(p.untyped_storage().data_ptr() == buffer.data_ptr() for p in pieces)
    assert torch.equal(as_one(pieces), torch.zeros(3, 4, 8))


def _buffer_of(num_experts: int) -> list[torch.nn.Parameter]:
    """Return weights [8, 8] that lie in one buffer, the last one first, as DDP lays them."""
    buffer = torch.randn(num_experts, 8, 8).bfloat16()
    return [torch.nn.Parameter(buffer[-1 - index]) for index in range(num_experts)]


@pytest.mark.parametrize("num_rows", [32, 40, 24])
def test_experts_in_reverse_order_have_the_same_bits_and_copy_no_weight(num_rows: int) -> None:
    """All rows are in use, some are not, some have no room."""
    torch.manual_seed(7)
    num_tokens, num_experts = 16, 5
    weights, biases = _buffer_of(num_experts), [torch.randn(8).bfloat16() for _ in range(5)]
    assert lie_reversed(weights)
    assert not lie_reversed([weights[0], weights[2], weights[1]])
    scores = torch.rand(num_tokens, num_experts)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(2).indices, True)
    hidden, probs = torch.randn(num_tokens, 8).bfloat16().requires_grad_(), scores.bfloat16()
    leaves = [hidden, probs.requires_grad_(), *weights, *(b.requires_grad_() for b in biases)]
    gemm, of_order = GroupedGemm(), []
    for are_reversed in (False, True):
        exact = num_rows == 32
        at = ChosenRows.of(chosen, num_rows, are_exact=exact, are_reversed=are_reversed)
        assert at.splits.are_reversed is are_reversed
        with Operators() as operators:
            rows = grouped_linear(gemm, at.take_rows(hidden), at.splits, weights)
        assert ("aten::stack" in operators.names) is not are_reversed
        rows = rows + add_biases(gemm, num_rows, at.splits, biases)
        rows = at.clear(rows * at.take(probs)[:, None])
        out = at.sum_rows(rows, num_tokens)
        of_order.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    if num_rows >= 32:  # else other rows have no room
        assert all(map(torch.equal, *of_order))


def test_experts_without_rows_get_no_gradient() -> None:
    grads = torch.full((4, 2, 2), 3.0)
    ends = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    with Operators() as operators:
        torch.ops.chunkgraph.zero_empty(grads, ends)
    # A split backward defers it with the gradients that it writes.
    assert operators.names == ["chunkgraph::zero_empty"]
    assert [bool(g.any()) for g in grads] == [False, True, False, True]


def test_the_gradients_of_one_product_are_added_together() -> None:
    weights = [torch.randn(16, 8).bfloat16().requires_grad_() for _ in range(4)]
    num_added: list[int] = []
    sums = Accumulation(
        lambda sinks, gradients: num_added.append(len(gradients)),
        [torch.zeros(16, 8) for _ in weights],
    )
    for index, weight in enumerate(weights):

        def receive(leaf: torch.Tensor, index: int = index) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            sums.add(index, gradient)

        weight.register_post_accumulate_grad_hook(receive)
    splits = DeviceSplits(torch.tensor([3, 3, 11, 20], dtype=torch.int32))
    grouped_linear(GroupedGemm(), torch.randn(20, 8).bfloat16(), splits, weights).sum().backward()
    assert num_added == [4]


# Which grouped GEMM a machine gets, and why not Transformer Engine's.

_GPU = torch.device("cuda")


def _machine(
    monkeypatch: pytest.MonkeyPatch, *, version: int | None = 130802, supports: bool | None = True
) -> None:
    """Pretend a GPU with Transformer Engine; it lacks the GEMM if ``supports`` is None."""

    def names(_module: str, *wanted: str) -> tuple[Any, ...]:
        if supports is None:
            raise ConfigError("missing")
        return tuple((lambda *_: supports) for _ in wanted)

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: object() if name == "transformer_engine" else real(name),
    )
    monkeypatch.setattr(grouped_gemm, "cublaslt_version", lambda: version)
    monkeypatch.setattr(grouped_gemm, "private_names", names)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"version": None}, "cuBLASLt 13.8.1 or newer was not found"),
        ({"version": 130100}, "cuBLASLt 13.1.0 moves token counts through the host"),
        ({"supports": None}, "has no grouped GEMM with counts on the device"),
        ({"supports": False}, "does not multiply tensorwise on this GPU"),
    ],
)
def test_what_a_machine_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], message: str
) -> None:
    _machine(monkeypatch, **machine)
    need = grouped_gemm.native_need(torch.bfloat16, "tensorwise")
    assert need is not None
    assert message in need
    # bfloat16 has torch's, nothing else has.
    gemm, _ = grouped_gemm.choose_gemm(_GPU, torch.bfloat16)
    assert type(gemm) is grouped_gemm.GroupedGemm
    for dtype, recipe in ((torch.float16, None), (torch.bfloat16, "tensorwise")):
        gemm, text = grouped_gemm.choose_gemm(_GPU, dtype, recipe)
        assert gemm is None
        assert text


def test_transformer_engines_is_chosen_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch)
    for dtype, recipe in (
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.bfloat16, "blockwise"),
    ):
        gemm, text = grouped_gemm.choose_gemm(_GPU, dtype, recipe)
        assert isinstance(gemm, grouped_gemm.NativeGemm)
        assert text == "Transformer Engine's grouped GEMM (cuBLASLt 13.8.2)"
