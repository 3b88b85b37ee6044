"""Triton's kernels give the same tables, bits and counts as the reference."""

from __future__ import annotations

import random

import pytest
import torch

from chunkgraph.memory.stash import ArenaSize, PagedStash, RowsInUse, Saving

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_pages", [4000, 300, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_triton_does_what_the_reference_does(num_pages: int, dtype: torch.dtype) -> None:
    rng, device = random.Random(num_pages), torch.device("cuda")
    torch.manual_seed(0)
    stashes = [
        PagedStash(ArenaSize(4096, num_pages), device, kind) for kind in ("reference", "triton")
    ]
    live = []
    for _ in range(60):
        if live and rng.random() < 0.45:
            pair = live.pop(rng.randrange(len(live)))
            results = [stash.reload(s) for stash, s in zip(stashes, pair, strict=True)]
            assert torch.equal(*[f.view(torch.uint8) for f in results])
            for stash, stashed in zip(stashes, pair, strict=True):
                stash.give_back(stashed)
        else:
            num_rows, width = rng.randint(1, 2000), rng.randint(1, 1000)
            tensor = torch.randint(0, 200, (num_rows, width), device=device).to(dtype)
            rows = RowsInUse.of(torch.rand(num_rows, device=device) < rng.random())
            pair = [stash.stash(tensor, rows) for stash in stashes]
            assert torch.equal(*[s.ticket.table for s in pair])
            assert torch.equal(*[s.ticket.taken for s in pair])
            live.append(pair)
        first, second = (stash.arena for stash in stashes)
        assert first.status() == second.status()
        free = first.status().num_free_pages
        assert torch.equal(first.stack[:free], second.stack[:free])


def test_spilled_pages_come_back_from_pinned_memory() -> None:
    stash = PagedStash(ArenaSize(4096, 10, 200), torch.device("cuda"), "triton")
    tensors = [torch.randn(32, 300, device="cuda") for _ in range(4)]
    rows = RowsInUse.first(torch.tensor([32], device="cuda"), 32)
    stashed = [stash.stash(tensor, rows) for tensor in tensors]
    status = stash.arena.status()
    assert status.num_free_pages == 0
    assert status.num_free_spill_pages < 200
    assert status.num_short == 0
    for tensor, held in zip(tensors, stashed, strict=True):
        assert torch.equal(stash.reload(held), tensor)
        stash.give_back(held)
    status = stash.arena.status()
    assert (status.num_free_pages, status.num_free_spill_pages) == (10, 200)


def test_reloads_ahead_run_next_to_the_backward_of_a_graph() -> None:
    """Replays with other rows in use have the gradients of a run without a stash."""
    torch.manual_seed(0)
    stash = PagedStash(ArenaSize(4096, 2000), torch.device("cuda"), "triton")
    saving = Saving(4096, prefetches=True)
    saving.mode, saving.stash = "stash", stash
    x = torch.randn(512, 256, device="cuda", requires_grad=True)
    in_use = torch.ones(512, dtype=torch.bool, device="cuda")
    weights = [torch.randn(256, 256, device="cuda") / 16 for _ in range(4)]

    def run(*, stashes: bool) -> torch.Tensor:
        rows = RowsInUse.of(in_use)
        saving.mode = "stash" if stashes else "off"
        with saving.forward(0):
            h = x * in_use[:, None]
            for weight in weights:
                with saving.scope(rows, [], "experts"):
                    h = torch.nn.functional.silu(h @ weight)
        (grad,) = torch.autograd.grad(h.square().sum(), x)
        return grad

    run(stashes=True)  # compiles the kernels
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        grad = run(stashes=True)
    for share in (1.0, 0.3, 0.0, 0.7):
        x.data.normal_()
        in_use.copy_(torch.rand(512, device="cuda") < share)
        graph.replay()
        assert torch.equal(grad, run(stashes=False))
        assert stash.arena.status().num_required_pages == 0
