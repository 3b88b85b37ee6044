"""Triton's kernels on a GPU give the same tables, bits and counts as torch's operators on a CPU."""

from __future__ import annotations

import random

import pytest
import torch

from chunkgraph.memory.stash import PagedStash, RowsInUse, Saving

pytestmark = pytest.mark.gpu


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


def test_a_graph_that_stashes_has_the_gradients_of_one_that_does_not() -> None:
    """Also in replays with other rows in use."""
    torch.manual_seed(0)
    saving = Saving(4096)
    saving.stash = PagedStash(4096, 2000, torch.device("cuda"))
    x = torch.randn(512, 256, device="cuda", requires_grad=True)
    in_use = torch.ones(512, dtype=torch.bool, device="cuda")
    weights = [torch.randn(256, 256, device="cuda") / 16 for _ in range(4)]

    def run(*, stashes: bool) -> torch.Tensor:
        rows = RowsInUse.of(in_use)
        h = x * in_use[:, None]
        with saving.during("stash" if stashes else "off"):
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
        assert saving.stash.status().num_required_pages == 0
