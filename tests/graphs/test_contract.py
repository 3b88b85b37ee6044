"""The contract of graph backends, for the CPU recorder and, on a GPU, CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from toys import capturing

from chunkgraph.errors import CaptureError
from chunkgraph.graphs import CUDABackend, GraphBackend, RecorderBackend

_MAKERS: dict[str, Callable[[], GraphBackend]] = {
    "recorder": lambda: RecorderBackend(can_sleep=True),
    "cuda": CUDABackend,
    "cuda-arenas": lambda: CUDABackend(can_sleep=True),
}


@pytest.fixture(
    params=["recorder", *(pytest.param(n, marks=pytest.mark.gpu) for n in ("cuda", "cuda-arenas"))]
)
def backend(request: pytest.FixtureRequest) -> GraphBackend:
    """Return each implementation of the graph contract, with each kind of pools."""
    return _MAKERS[request.param]()


def make_module(backend: GraphBackend, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Linear(16, 32),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.LayerNorm(32),
        nn.Linear(32, 16),
    ]
    module = nn.Sequential(*layers).to(backend.device)
    with backend.on_capture_stream():  # libraries create their handles outside of captures
        x = torch.randn(4, 16, device=backend.device, requires_grad=True)
        torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
    backend.synchronize()
    return module


def new_input(backend: GraphBackend) -> torch.Tensor:
    return torch.randn(4, 16, device=backend.device)


def test_copies_run_in_both_directions_behind_their_marks(backend: GraphBackend) -> None:
    copier, source = backend.new_copier(), torch.arange(200, device=backend.device).to(torch.uint8)
    expected, back, memory = source.cpu().clone(), torch.zeros_like(source), copier.host_memory(200)
    assert not copier.host_memory(0).numel()
    out = copier.copy([source], memory, [copier.mark()], to_host=True)
    copier.wait(copier.copy([back], memory, [out, copier.mark()], to_host=False))
    assert torch.equal(back.cpu(), expected)
    if backend.name == "recorder":
        assert bool((source == 0xFF).all()), "what leaves is poisoned"
        late = copier.copy([back], source, [], to_host=False)
        assert torch.equal(back, expected), "a copy waits until somebody waits for it"
        copier.wait(late)
        assert torch.equal(back, source)


def test_new_memory_is_not_filled(backend: GraphBackend) -> None:
    """Deterministic torch would fill it on the capture stream, behind writes of other streams."""
    pool, is_deterministic = backend.new_pool("pool"), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for number in range(2):  # the same block serves twice
            values = torch.empty(0, dtype=torch.uint8, device=backend.device)
            values.set_(pool.allocate(1 << 20))
            backend.synchronize()
            assert values.numel() == 1 << 20
            assert number == 0 or bool((values == 7).all())
            values.fill_(7)
            backend.synchronize()
            del values
    finally:
        torch.use_deterministic_algorithms(is_deterministic)


def test_equal_captures_keep_memory_at_equal_offsets(backend: GraphBackend) -> None:
    module, x = make_module(backend), new_input(backend).requires_grad_()
    layouts, kept = [], []
    for number in range(2):
        pool = backend.new_pool(f"pool {number}")
        pool.reserve(1 << 16)
        with backend.capture(f"forward {number}", pool):
            kept.append(module(x))
        places = pool.relative(pool.live())
        if not backend.can_sleep:
            assert places is None
            return
        layouts.append([(offset, place.end - place.start) for offset, place in places])
    assert layouts[0] == layouts[1] != []


def test_writes_cover_results_and_stay_inside_pool_and_targets(backend: GraphBackend) -> None:
    module, x = make_module(backend), new_input(backend)
    pool = backend.new_pool("slot")
    with torch.no_grad(), backend.capture("forward", pool) as graph:
        y = module(x)
    assert graph.writes() & backend.storage_ranges(y)
    assert not graph.writes() & backend.storage_ranges(x)
    assert (graph.writes() & pool.reserved()) == graph.writes()
    assert (pool.live() & backend.storage_ranges(y)).num_bytes > 0
    assert pool.reserved_bytes >= pool.live().num_bytes


def test_freed_memory_serves_later_captures_of_the_same_pool_only(backend: GraphBackend) -> None:
    x = torch.randn(64, 64, device=backend.device)
    shared, other = backend.new_pool("shared"), backend.new_pool("other")
    with backend.capture("first", shared) as first:
        y = x + 1
    freed = backend.storage_ranges(y)
    del y
    with backend.capture("second", shared) as second:
        z = x + 2
    with backend.capture("third", other) as third:
        w = x + 3
    assert backend.storage_ranges(z) & freed
    assert not backend.storage_ranges(w) & freed
    first.replay(), second.replay(), third.replay()
    assert torch.equal(z, x + 2)
    assert torch.equal(w, x + 3)


def test_captures_divide_what_a_pool_reserved_ahead(backend: GraphBackend) -> None:
    pool = backend.new_pool("pool")
    mib = 1 << 20
    before = pool.reserved_bytes  # an arena begins with a segment of small blocks
    assert before <= 2 * mib
    pool.reserve(24 * mib)
    assert (pool.reserved_bytes - before, pool.live().num_bytes) == (24 * mib, 0)
    with backend.capture("thirds", pool) as graph:
        kept = [torch.empty(2 * mib, device=backend.device).fill_(i) for i in range(3)]
    assert (pool.reserved_bytes - before, pool.live().num_bytes) == (24 * mib, 24 * mib)
    graph.replay()
    backend.synchronize()
    assert [t.mean().item() for t in kept] == [0.0, 1.0, 2.0]
    pool.reserve(0)
    assert pool.reserved_bytes - before == 24 * mib


def test_poison_fills_the_pool_with_nan(backend: GraphBackend) -> None:
    x = torch.ones(8, device=backend.device)
    pool = backend.new_pool("slot")
    with backend.capture("add", pool) as graph:
        y = x + 1
    graph.replay()
    assert y.tolist() == [2.0] * 8
    pool.poison()
    assert y.isnan().all()
    graph.replay()
    assert y.tolist() == [2.0] * 8


def test_replays_rely_on_nothing_that_a_sleep_loses(backend: GraphBackend) -> None:
    if not backend.can_sleep:
        pytest.skip("its pools do not sleep")
    pool, x = backend.new_pool("slot"), torch.ones(8, device=backend.device)
    static = torch.empty(0, device=backend.device).set_(pool.allocate(32), 0, (8,), (1,))
    with backend.capture("add", pool) as graph:
        y = static + x
    places = pool.reserved(), pool.live()
    for factor in range(3):
        backend.synchronize()
        pool.sleep()
        pool.wake()
        assert (pool.reserved(), pool.live()) == places
        static.copy_(x * factor)
        graph.replay()
        assert y.tolist() == [factor + 1.0] * 8


_ILLEGAL: dict[str, Callable[[torch.Tensor], object]] = {
    "reads an item": lambda x: x * x.sum().item(),
    "copies to the host": lambda x: x.cpu() + 1,
    "asks for nonzero": lambda x: x.nonzero(),
    "selects by a mask": lambda x: x[x > 0],
    "writes a tensor by a mask": lambda x: x.clone().__setitem__(x > 0, x.sum()),
    "branches on a value": lambda x: x if x.sum() > 0 else -x,
}


@pytest.mark.parametrize("name", _ILLEGAL)
def test_illegal_work_is_refused_with_file_and_line(backend: GraphBackend, name: str) -> None:
    module, x = make_module(backend, dropout=0.5), new_input(backend)
    with pytest.raises(CaptureError) as error, capturing(backend, "chunk 0 slot 0 forward"):
        _ILLEGAL[name](module(x))
    message = str(error.value)
    line = _ILLEGAL[name].__code__.co_firstlineno
    assert f"{__file__}:{line}" in message
    assert "chunk 0 slot 0 forward" in message
    # A failed capture leaves nothing over: eager work, randomness and new captures go on.
    assert module(x).sum().isfinite()
    with torch.no_grad(), capturing(backend, "again") as graph:
        y = module(x)
    torch.manual_seed(1)
    graph.replay()
    torch.manual_seed(1)
    assert torch.equal(y, module(x))


@pytest.mark.gpu
def test_what_a_collection_would_free_does_not_spoil_a_capture() -> None:
    """Tracebacks hold the graphs of failed captures in cycles, which only a collection frees."""
    backend = CUDABackend()
    x = torch.ones(8, device=backend.device)
    with capturing(backend, "old") as old:
        x + 1
    cycle: list[object] = [old.graph]
    cycle.append(cycle)
    old.graph = None
    del cycle
    with capturing(backend, "new") as new:
        # Starts collections of the youngest generation.
        _ = [[i] for i in range(20 * gc.get_threshold()[0])]
        y = x + 2
    new.replay()
    assert y.tolist() == [3.0] * 8


def test_filling_by_a_mask_is_legal(backend: GraphBackend) -> None:
    """``x[mask] = number`` needs no shape from values, forward or backward."""
    x = torch.randn(6, 4, device=backend.device, requires_grad=True)
    rows = torch.tensor([True, False] * 3, device=backend.device)

    def fill() -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        y[rows, :] = 0.0
        y[y < 0] = -1
        z = (y * y).sum()
        return y, torch.autograd.grad(z, x)[0]

    with capturing(backend, "fill") as graph:
        results = fill()
    with torch.no_grad():
        x.copy_(torch.randn(6, 4))
        rows.logical_not_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, fill(), strict=True))
    assert not results[0][rows].any()


@pytest.mark.gpu
def test_a_failed_capture_on_a_gpu_keeps_no_memory() -> None:
    backend = CUDABackend()
    x = torch.ones(1 << 20, device=backend.device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        with pytest.raises(CaptureError), capturing(backend, "chunk"):
            (x.expand(16, -1) + 1).sum().item()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.gpu
def test_what_fails_on_the_capture_stream_is_waited_for() -> None:
    """State that is restored afterwards must not be overwritten by work that still runs."""
    backend = CUDABackend()
    buffer = torch.zeros(1 << 20, device=backend.device)

    def fail_late() -> None:
        with backend.on_capture_stream():
            torch.cuda._sleep(20_000_000)
            buffer.fill_(1.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail_late()
    buffer.fill_(2.0)
    torch.cuda.synchronize()
    assert bool((buffer == 2.0).all())


def test_a_released_graph_refuses_to_replay(backend: GraphBackend) -> None:
    x = torch.ones(8, device=backend.device)
    with capturing(backend, "add") as graph:
        x + 1
    graph.release()
    with pytest.raises(CaptureError, match="add was released"):
        graph.replay()
    graph.release()  # twice is fine
