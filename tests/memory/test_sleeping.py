"""Parameters and gradients that sleep between steps: training has the bits of eager training."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from toys import Tower, add_to_main_grads, all_equal, sample

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.errors import SlotError
from chunkgraph.graphs import AddressRanges, CUDABackend, GraphBackend, RecorderBackend
from chunkgraph.memory.sleeping import sleeping_memory

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def built(
    device: str, *, sleeps: bool, backend: GraphBackend | None = None
) -> tuple[torch.nn.Module, list[sleeping_memory]]:
    """Return a module with main gradients, and the memory of both."""
    where = torch.device(device)
    backend = backend or (CUDABackend if device == "cuda" else RecorderBackend)(can_sleep=True)
    weights = sleeping_memory("weights", backup="host", backend=backend)
    gradients = sleeping_memory("gradients", backend=backend)
    torch.manual_seed(3)
    with torch.device(where):
        if not sleeps:
            module = torch.nn.Sequential(*(Tower() for _ in range(3)))
            add_to_main_grads(module)
            return module, []
        with weights:
            module = torch.nn.Sequential(*(Tower() for _ in range(3)))
        with gradients:
            add_to_main_grads(module)
    return module, [weights, gradients]


def trained(
    graphs: ChunkGraphs, memories: list[sleeping_memory], *, eager: bool
) -> list[torch.Tensor]:
    """Alternate log-probabilities, without gradients in memory, and training."""
    module: Any = graphs.chunks[0].module
    torch.manual_seed(5)
    results = []
    for count in (1, 2, 2, 1):
        for is_training in (False, True):
            awake = memories if is_training else memories[:1]
            if memories:
                graphs.wake()
            for memory in awake:
                memory.wake()
            if is_training:
                for p in module.parameters():
                    p.main_grad.zero_()
            with (
                torch.set_grad_enabled(is_training),
                graphs.step(count, forward_only=not is_training, eager=eager),
            ):
                for _ in range(count):
                    y = graphs.callables[0](sample(graphs.backend))
                    results.append(y.detach().clone())
                    if is_training:
                        y.square().sum().backward()
            if is_training:
                with torch.no_grad():
                    for p in module.parameters():
                        results.append(p.main_grad.clone())
                        p.sub_(0.1 * p.main_grad)
            for memory in memories:
                memory.sleep()
            if memories:
                graphs.sleep()
    for memory in memories:
        memory.wake()
    return results + [t.detach().clone() for t in module.state_dict().values()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moves", ["refuse", "recapture"])
def test_all_memory_sleeps_between_all_steps(device: str, moves: Any) -> None:
    """Whether graphs have a backend of their own or that of the memory."""
    options = CaptureOptions(can_sleep=True, on_moved_memory=moves)
    module, _ = built(device, sleeps=False)
    expected = trained(ChunkGraphs(module, 1, options=options), [], eager=True)
    shared = (CUDABackend if device == "cuda" else RecorderBackend)(can_sleep=True)
    backend = None if moves == "refuse" else shared
    module, memories = built(device, sleeps=True, backend=backend)
    graphs = ChunkGraphs(module, 1, options=options, backend=backend)
    assert all_equal(trained(graphs, memories, eager=False), expected)
    assert graphs.counters.replays == 5
    assert graphs.forward_only.counters.replays == 5
    assert not graphs.counters.recaptures


@pytest.mark.parametrize("device", DEVICES)
def test_contents_come_back_from_the_host_alone(device: str) -> None:
    module, (weights, gradients) = built(device, sleeps=True)
    before = [t.clone() for t in module.state_dict().values()]
    addresses = [p.data_ptr() for p in module.parameters()]
    for _ in range(2):
        weights.sleep()
        weights.sleep()
        gradients.sleep()
        assert weights.is_asleep
        if device == "cpu":
            assert all(p.isnan().all() for p in module.parameters())
        weights.wake()
        gradients.wake()
        gradients.wake()
    assert not weights.is_asleep
    assert [p.data_ptr() for p in module.parameters()] == addresses
    assert all_equal(list(module.state_dict().values()), before)
    if device == "cpu":
        assert all(p.main_grad.isnan().all() for p in module.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("eager", [False, True])
def test_a_step_that_uses_sleeping_memory_says_which(eager: bool) -> None:
    module, (weights, gradients) = built("cpu", sleeps=True)
    graphs, x = ChunkGraphs(module, 1), torch.randn(4, 8)
    other = ChunkGraphs(Tower(), 1)
    gradients.sleep()
    with torch.no_grad(), graphs.step(1, forward_only=True, eager=eager):
        graphs.callables[0](x)
    with (
        pytest.raises(
            SlotError,
            match=r"chunk 0 began while memory gradients sleeps.*gradient of shape \(8, 8\)",
        ),
        graphs.step(1, eager=eager),
    ):
        pass
    with other.step(1):
        other.callables[0](x).sum().backward()
    gradients.wake()
    weights.sleep()
    with (
        pytest.raises(SlotError, match=r"memory weights sleeps.*Call its wake\(\)"),
        graphs.step(1, forward_only=True, eager=eager),
    ):
        pass
    optimizer = graphs.capture_optimizer(torch.optim.SGD(module.parameters(), 0.1, fused=True))
    with pytest.raises(SlotError, match=r"step of the optimizer began while memory weights"):
        optimizer.step()
    weights.wake()
    with graphs.step(1, eager=eager):
        graphs.callables[0](x).sum().backward()


@pytest.mark.parametrize("trains", [False, True])
def test_frozen_weights_and_buffers_that_sleep_are_found(trains: bool) -> None:
    """Those of a reference model, and of a base with adapters."""
    memory = sleeping_memory("base", backup="host", backend=RecorderBackend(can_sleep=True))
    with memory:
        frozen = nn.Linear(8, 8).requires_grad_(False)
        table = torch.ones(8)
        assert torch.empty(3, device="meta").is_meta
    module = nn.Sequential(frozen, nn.Linear(8, 8)) if trains else frozen
    other = nn.Linear(8, 8)
    other.register_buffer("table", table)
    memory.sleep()
    for own, shape in ((module, "8, 8"), (other, "8,")):
        with (
            pytest.raises(SlotError, match=rf"memory base sleeps.*gradient of shape \({shape}\)"),
            torch.set_grad_enabled(trains),
            ChunkGraphs(own, 1).step(1, forward_only=not trains),
        ):
            pass


def test_the_innermost_block_of_a_thread_serves_it() -> None:
    backend = RecorderBackend(can_sleep=True)
    outer, inner = (sleeping_memory(n, backup="host", backend=backend) for n in ("outer", "inner"))
    made: dict[str, torch.Tensor] = {}

    def make(name: str) -> None:
        made[name] = torch.full((5,), float(len(made)))

    other = threading.Thread(target=make, args=("of a thread",))
    with outer:
        make("outer")
        with inner:
            make("inner")
        make("outer again")
        other.start()
        other.join()
    make("outside")
    for name, tensor in made.items():
        owners = [m.label for m in (outer, inner) if m.pool.owns(tensor.data_ptr())]
        assert owners == [label for label in ("outer", "inner") if name.startswith(label)]


def test_nothing_is_allocated_in_memory_that_sleeps() -> None:
    memory = sleeping_memory("weights", backup="host", backend=RecorderBackend(can_sleep=True))
    with memory:
        x, y = torch.arange(9), torch.arange(9)
        with pytest.raises(SlotError, match="weights cannot sleep inside its with block"):
            memory.sleep()
    memory.sleep()
    del x
    with pytest.raises(SlotError, match="Memory weights sleeps"), memory:
        pass
    memory.wake()
    with memory:
        x = torch.arange(9)
    memory.sleep()
    memory.wake()
    assert all_equal([x, y], [torch.arange(9)] * 2)


class Framework:
    """Frees parameters and main gradients after each step, as frameworks do."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters: list[Any] = [*module.parameters()]

    def load(self, *, with_gradients: bool) -> None:
        for p in self._parameters:
            p.data = p.kept.to(p.data.device, copy=True)
            if with_gradients:
                p.main_grad.data = torch.zeros_like(p.data)

    def offload(self) -> None:
        for p in self._parameters:
            p.kept = p.data.to("cpu", copy=True)
            p.data, p.main_grad.data = p.data.new_empty(0), p.data.new_empty(0)


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_framework_loads_keeps_its_addresses(device: str) -> None:
    """And on a GPU its graphs; the recorder refuses memory that was freed meanwhile."""
    results: list[list[torch.Tensor]] = []
    for eager in (True, False) if device == "cuda" else (True,):
        module, _ = built(device, sleeps=False)
        options = CaptureOptions(can_sleep=True, on_moved_memory="recapture")
        graphs, framework = ChunkGraphs(module, 1, options=options), Framework(module)
        memory = sleeping_memory("weights", backend=graphs.backend)
        memory.follow(framework, "load", "offload")
        framework.offload()
        assert memory.is_asleep
        torch.manual_seed(5)
        results.append([])
        addresses = []
        for number in range(12):
            is_training = number % 2 == 1
            framework.load(with_gradients=is_training)
            assert not memory.is_asleep
            addresses.append([p.data_ptr() for p in module.parameters()])
            assert all(memory.pool.reserved() & AddressRanges([(a, a + 1)]) for a in addresses[-1])
            with (
                torch.set_grad_enabled(is_training),
                graphs.step(1, forward_only=not is_training, eager=eager),
            ):
                y = graphs.callables[0](sample(graphs.backend))
                results[-1].append(y.detach().clone())
                if is_training:
                    y.square().sum().backward()
            with torch.no_grad():
                for p in module.parameters() if is_training else ():
                    p.sub_(0.1 * p.main_grad)  # type: ignore[attr-defined]
            framework.offload()
            assert memory.is_asleep
        assert addresses[3::2] == addresses[1:-1:2]
        assert addresses[2::2] == addresses[:-2:2]
    assert all_equal(results[0], results[-1])
    if device == "cuda":
        assert graphs.counters.capture_sessions == 1
        assert graphs.forward_only.counters.capture_sessions == 1


def test_memory_that_is_dropped_asleep_goes_with_its_tensors() -> None:
    module, (weights, _) = built("cpu", sleeps=True)
    kept, gone, graphs = [module], weakref.ref(weights), ChunkGraphs(Tower(), 1)
    weights.sleep()
    del module, weights, _
    for is_alive in (True, False):
        with graphs.step(1):
            graphs.callables[0](torch.randn(4, 8)).sum().backward()
        gc.collect()
        assert (gone() is not None) is is_alive
        kept.clear()
        gc.collect()
