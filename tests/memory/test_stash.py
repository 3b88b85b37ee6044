"""The stash alone: pages are conserved, rows come back, an overflow harms no other tensor."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkgraph.errors import StashError
from chunkgraph.memory.stash import (
    PagedStash,
    PageMeter,
    RowsInUse,
    Saving,
    Stashed,
    StashStatus,
)

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def make_stash(num_pages: int, page_bytes: int = 64) -> PagedStash:
    return PagedStash(page_bytes, num_pages, CPU)


def stashing(page_bytes: int = 64, meter: PageMeter | None = None) -> Saving:
    """Make what saves into a stash of 64 pages."""
    saving = Saving(page_bytes, meter)
    saving.mode, saving.stash = "stash", make_stash(64, page_bytes)
    return saving


def expected(tensor: torch.Tensor, rows: RowsInUse) -> torch.Tensor:
    return torch.where((rows.places >= 0).view(-1, *[1] * (tensor.dim() - 1)), tensor, 0).to(
        tensor.dtype
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_pages(stash: PagedStash, live: list[Stashed]) -> StashStatus:
    """Check that every page is free or in exactly one table."""
    status = stash.status()
    free = stash.stack[: status.num_free_pages].tolist()
    held = []
    for stashed in live:
        _, num_taken = stashed.taken.tolist()
        held += stashed.table[:num_taken].tolist()
        assert set(stashed.table[num_taken:].tolist()) <= {stash.num_pages}
    assert sorted(free + held) == list(range(stash.num_pages))
    assert status.num_required_pages == sum(int(s.taken[0]) for s in live)
    return status


@st.composite
def tensors(draw: st.DrawFn) -> tuple[torch.Tensor, RowsInUse]:
    in_use = draw(st.lists(st.booleans(), min_size=1, max_size=20))
    dtype = draw(st.sampled_from(DTYPES))
    width = draw(st.integers(1, 64 // dtype.itemsize))
    data = torch.randint(0, 256, (len(in_use), width * dtype.itemsize))
    tensor = data.to(torch.uint8).view(dtype)
    return tensor, RowsInUse.of(torch.tensor(in_use))


@settings(max_examples=60)
@given(data=st.data(), num_pages=st.integers(0, 40))
def test_pages_are_conserved_and_rows_come_back_in_any_order(
    data: st.DataObject, num_pages: int
) -> None:
    stash = make_stash(num_pages)
    live: list[tuple[Stashed, torch.Tensor]] = []
    most = 0
    for _ in range(data.draw(st.integers(1, 12))):
        if live and data.draw(st.booleans()):
            stashed, tensor = live.pop(data.draw(st.integers(0, len(live) - 1)))
            num_needed, num_taken = stashed.taken.tolist()
            result = stash.reload(stashed)
            if num_needed == num_taken:
                assert same_bits(result, tensor)
            else:
                assert num_taken == 0
                assert not result.view(torch.uint8).any()
            stash.give_back(stashed)
        else:
            tensor, rows = data.draw(tensors())
            room = stash.status().num_free_pages
            stashed = stash.stash(tensor, rows)
            num_needed, num_taken = stashed.taken.tolist()
            assert num_needed == -(-int(rows.total) // (64 // tensor[0].nbytes))
            assert num_taken == (num_needed if num_needed <= room else 0)
            live.append((stashed, expected(tensor, rows)))
        status = check_pages(stash, [s for s, _ in live])
        most = max(most, status.num_required_pages)
        assert status.num_peak_pages == most
    assert (stash.status().num_short > 0) == (most > num_pages)
    for stashed, _ in live:
        stash.give_back(stashed)
    assert check_pages(stash, []).num_required_pages == 0


def test_too_few_pages_are_reported_until_cleared_and_harm_nothing_that_is_stashed() -> None:
    stash = make_stash(4)
    kept = torch.randn(4, 16)
    first = stash.stash(kept, RowsInUse.first(torch.tensor([4]), 4))
    second = stash.stash(kept + 1, RowsInUse.first(torch.tensor([2]), 4))
    assert not stash.reload(second).any()
    stash.give_back(second)
    assert same_bits(stash.reload(first), kept)
    stash.send_status()
    stash.forget_overflow()
    assert stash.sent_status() == StashStatus(0, 4, 6, 1)
    assert stash.status() == StashStatus(0, 4, 4, 0)
    stash.give_back(first)
    assert stash.status().num_free_pages == 4
    stash.reset()
    assert stash.status() == StashStatus(4, 0, 0, 0)


def _expert(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x @ first.t()) @ second.t()


def test_only_rows_are_stashed_once_each_and_no_weights() -> None:
    """A weight with as many rows as tokens is not stashed."""
    saving = stashing()
    stash = saving.stash
    first, second = (torch.randn(16, 16, requires_grad=True) for _ in range(2))
    grads = []
    for is_stashed in (False, True):
        torch.manual_seed(0)
        x = torch.zeros(16, 16)
        x[:5] = torch.randn(5, 16)
        x[8:11] = torch.randn(3, 16)
        x.requires_grad_()
        rows = RowsInUse.of(x.detach().any(1))
        if is_stashed:
            # As wide as long, so that shapes do not distinguish them from weights.
            with saving.scope(rows, [], "experts"):
                out = _expert(x, first.detach(), second.detach())
            assert stash.status().num_required_pages > 0
            saving.forget_waiting()
            stash.reset()
            with saving.scope(rows, [first, second], "experts"):
                out = _expert(x, first, second)
            assert stash.status().num_required_pages == 0  # all have a weight's shape
        else:
            out = _expert(x, first, second)
        out.square().sum().backward()
        grads.append([t.grad for t in (x, first, second)])
        first.grad = second.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class _Flat(torch.autograd.Function):
    """Saves rows flattened to one dimension, as fused grouped products do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.reshape(-1), weight.reshape(-1).clone(), x[:, 0].clone())
        ctx.shape = weight.shape
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        assert x.dim() == 1
        return grad @ weight.view(ctx.shape).t(), x.view(len(grad), -1).t() @ grad


def test_rows_in_one_dimension_are_stashed() -> None:
    saving = stashing()
    stash = saving.stash
    weight = torch.randn(16, 12, requires_grad=True)
    x = torch.zeros(8, 16)
    x[:3] = torch.randn(3, 16)
    x.requires_grad_()
    _Flat.apply(x, weight).square().sum().backward()
    eager, x.grad, weight.grad = (x.grad, weight.grad), None, None
    with saving.scope(RowsInUse.first(torch.tensor([3]), 8), [weight], "experts"):
        out = _Flat.apply(x, weight)
    # Three rows of 64 bytes; no copy of the weight, and no narrow column.
    assert stash.status().num_required_pages == 3
    out.square().sum().backward()
    assert stash.status().num_required_pages == 0
    assert all(map(torch.equal, (x.grad, weight.grad), eager))


def test_a_tensor_saved_twice_takes_pages_once_and_parts_are_stashed() -> None:
    saving = stashing()
    stash = saving.stash
    x = torch.randn(8, 16)
    x[3:4] = x[6:] = 0.0
    x.requires_grad_()
    rows = RowsInUse.of(x.detach().any(1))
    with saving.scope(rows, [], "experts"):
        y = torch.exp(x * 1)  # saves its result
        z = y.sin() + y.cos()  # both save y
        halves = [half.sin() for half in y.split(4)]
    # All of y, and its two parts.
    assert stash.status().num_required_pages == 5 + 3 + 2
    (z.sum() + sum(half.sum() for half in halves)).backward()
    assert stash.status().num_required_pages == 0
    saving.check_all_read()
    assert x.grad[:3].any()


def test_columns_of_rows_are_stashed_with_all_columns_once() -> None:
    """A gate and its values, split from one product: neither keeps the memory of all rows."""
    grads, num_pages = [], []
    for is_stashed in (False, True):
        meter = PageMeter([1], CPU)
        saving = stashing(256, meter)
        stash = saving.stash
        torch.manual_seed(0)
        x = torch.randn(8, 32)
        x[5:] = 0.0
        x.requires_grad_()
        rows = RowsInUse.of(x.detach().any(1))
        for mode in ("measure", "stash") if is_stashed else ("off",):
            saving.mode = mode  # type: ignore[assignment]
            with meter.forward(0), saving.scope(rows, [], "experts"):
                whole = x * 2
                gate, value = whole.chunk(2, dim=1)
                result = gate.sin() * value.cos()  # saves gate and value, and their sine and cosine
            del whole, gate, value
        num_pages.append(stash.status().num_required_pages)
        result.sum().backward()
        assert stash.status().num_required_pages == 0
        grads.append(x.grad)
    # Rows of 128 bytes, two to a page, and twice rows of 64, four to a page.
    assert num_pages == [0, 3 + 2 * 2]
    assert meter.pages(1) == 7
    assert torch.equal(grads[0][:5], grads[1][:5])  # cos(0) of the other rows comes back as 0


def test_what_no_backward_reads_or_reads_twice_is_an_error() -> None:
    saving = stashing()
    x = torch.randn(8, 16, requires_grad=True)
    rows = RowsInUse.first(torch.tensor([8]), 8)
    with saving.scope(rows, [], "layer 3"):
        y = x.exp()
        kept = y.sin()
    with pytest.raises(StashError, match=r"layer 3.*no backward read"):
        saving.check_all_read()
    saving.check_all_read()  # reported once
    kept.sum().backward(retain_graph=True)
    with pytest.raises(StashError, match=r"layer 3.*second time"):
        kept.sum().backward()


def test_the_meter_counts_what_slots_in_flight_would_take() -> None:
    meter, x = PageMeter([2, 1], CPU), torch.randn(8, 16, requires_grad=True)
    saving = Saving(64, meter)
    assert not meter.was_used
    saving.mode = "measure"
    for chunk, count in ((0, 3), (0, 5), (0, 4), (1, 8)):
        rows = RowsInUse.first(torch.tensor([count]), 8)
        with meter.forward(chunk), saving.scope(rows, [], "experts"):
            x.exp().sin().cos()  # saves two tensors, one of them twice
    assert meter.was_used
    # A microbatch takes 16 pages in chunk 1 and 10 in chunk 0; both need 16 for all rows.
    assert [meter.pages(in_flight) for in_flight in (1, 2, 3)] == [16, 26, 36]
    assert [meter.most_pages(in_flight) for in_flight in (1, 2, 3)] == [16, 32, 48]


# Rows in use, computed in every layer of every microbatch with few operators.


@given(st.integers(0, 9), st.integers(0, 7), st.sampled_from([torch.int32, torch.int64]))
def test_leading_rows_are_the_first_in_use(count: int, num_rows: int, dtype: torch.dtype) -> None:
    first = RowsInUse.first(torch.tensor([count], dtype=dtype), num_rows)
    like = RowsInUse.of(torch.arange(num_rows) < count)
    expected = [place if place < count else -1 for place in range(num_rows)]
    for rows in (first, like) if num_rows else (first,):
        assert rows.places.tolist() == expected
        assert rows.total.tolist() == [min(count, num_rows)]
        assert (rows.places.dtype, rows.total.dtype) == (torch.int32, torch.int64)


# Triton's kernels on a GPU give the same tables, bits and counts as torch's operators on a CPU.


@pytest.mark.gpu
@pytest.mark.parametrize("num_pages", [4000, 300, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_triton_does_what_the_reference_does(num_pages: int, dtype: torch.dtype) -> None:
    rng = random.Random(num_pages)
    torch.manual_seed(0)
    stashes = [PagedStash(4096, num_pages, torch.device(name)) for name in ("cpu", "cuda")]
    live = []
    for _ in range(60):
        if live and rng.random() < 0.45:
            pair = live.pop(rng.randrange(len(live)))
            first, second = (stash.reload(s) for stash, s in zip(stashes, pair, strict=True))
            assert torch.equal(first.view(torch.uint8), second.cpu().view(torch.uint8))
            for stash, stashed in zip(stashes, pair, strict=True):
                stash.give_back(stashed)
        else:
            num_rows, width = rng.randint(1, 2000), rng.randint(1, 1000)
            tensor = torch.randint(0, 200, (num_rows, width)).to(dtype)
            in_use = torch.rand(num_rows) < rng.random()
            pair = [
                stash.stash(tensor.to(device), RowsInUse.of(in_use.to(device)))
                for stash, device in zip(stashes, ("cpu", "cuda"), strict=True)
            ]
            assert torch.equal(pair[0].table, pair[1].table.cpu())
            assert torch.equal(pair[0].taken, pair[1].taken.cpu())
            live.append(pair)
        on_cpu, on_gpu = stashes
        assert on_cpu.status() == on_gpu.status()
        free = on_cpu.status().num_free_pages
        assert torch.equal(on_cpu.stack[:free], on_gpu.stack[:free].cpu())
