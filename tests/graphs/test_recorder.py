"""Checks that only the recorder makes: exact addresses, freed memory, host calls, collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import library, nn
from toys import capturing

from chunkgraph.errors import CaptureError, IllegalOperationError, ReplayMismatchError
from chunkgraph.graphs import AddressRanges, RecorderBackend, host_call
from chunkgraph.graphs.random_state import CapturedGenerator, answering_device_calls


def test_writes_are_exact_for_views_in_place_and_results() -> None:
    backend = RecorderBackend()
    target = torch.zeros(4, 8)
    with capturing(backend, "mixed") as graph:
        y = target.sum(1)
        target[1, 2:4].add_(1)
    first = target.data_ptr() + (8 + 2) * 4
    expected = AddressRanges([(first, first + 8)]) | AddressRanges(
        [(y.data_ptr(), y.data_ptr() + 16)]
    )
    assert graph.writes() == expected


def test_freed_external_memory_is_an_error_and_names_the_operator() -> None:
    backend = RecorderBackend()
    weight = nn.Parameter(torch.ones(4))
    with torch.no_grad(), capturing(backend, "scale") as graph:
        weight * 2
    weight.data = torch.ones(4)  # rebinding instead of copying in place
    with pytest.raises(ReplayMismatchError, match=r"aten\.mul.*test_recorder\.py"):
        graph.replay()


def test_a_tensor_of_another_device_is_refused_before_its_address_is_read() -> None:
    backend = RecorderBackend()
    x = torch.ones(4, device="meta")
    with (
        pytest.raises(CaptureError, match=r"on meta; capturing scale(.|\n)*test_recorder\.py"),
        capturing(backend, "scale"),
    ):
        x.mul_(2)


def test_an_illegal_operator_inside_a_custom_backward_is_found() -> None:
    class Syncs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad * grad.sum().item()

    backend = RecorderBackend()
    x = torch.ones(4, requires_grad=True)
    with capturing(backend, "forward"):
        y = Syncs.apply(x)
    with (
        pytest.raises(IllegalOperationError, match=r"(?s)grad\.sum\(\)\.item\(\).*SyncsBackward"),
        capturing(backend, "backward"),
    ):
        torch.autograd.grad(y, x, torch.ones(4))


def test_host_calls_run_again_in_every_replay_in_order() -> None:
    backend = RecorderBackend()
    seen: list[float] = []
    x = torch.zeros(1)
    host_call(lambda: seen.append(-1))  # outside a capture: just runs
    with capturing(backend, "calls") as graph:
        x.add_(1)
        host_call(lambda: seen.append(x.item()))
        x.add_(1)
    assert seen == [-1, 1.0]
    graph.replay()
    graph.replay()
    assert seen == [-1, 1.0, 1.0, 3.0]


def test_memory_of_a_collective_is_free_when_the_capture_drops_it() -> None:
    """A thread of gloo holds tensors for a moment after a collective has ended."""
    held = []

    def triple_slowly(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        for tensor in tensors:
            tensor.mul_(3)
        held.extend(tensors)
        return tensors

    operators = library.Library("c10d", "FRAGMENT")
    operators.define("triple_slowly_(Tensor[] tensors) -> Tensor[]")
    operators.impl("triple_slowly_", triple_slowly, "CPU")
    collective = torch.ops.c10d.triple_slowly_.default
    backend = RecorderBackend()
    pool = backend.new_pool("pool")
    total = torch.ones(8)
    with backend.capture("sum", pool) as graph:
        part = total * 2
        assert collective([part])[0] is part
        result = part + 1
        collective([total])
        del part
        assert pool.live().num_bytes == 512  # of the result
    assert len(held) == 2
    graph.replay()
    assert torch.equal(result, torch.full((8,), 7.0))
    assert torch.equal(total, torch.full((8,), 3.0))


# Captures preserve random states, and refuse to set them.


def test_another_thread_keeps_its_calls_of_the_random_state() -> None:
    backend = RecorderBackend()
    seeds: list[int] = []
    with backend.capture("nothing", backend.new_pool("pool")):
        thread = threading.Thread(target=lambda: seeds.append(torch.manual_seed(7).initial_seed()))
        thread.start()
        thread.join()
    assert seeds == [7]
    assert torch.random.default_generator is torch.default_generator


def test_a_capture_on_a_gpu_draws_only_from_its_current_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint's backward sets the state that its forward saved, and puts the current back."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    draw = torch.ops.aten.rand.default, ([3],), {}
    forward, backward = CapturedGenerator("forward"), CapturedGenerator("backward")
    with answering_device_calls(forward):
        saved = torch.cuda.get_rng_state()
        forward.draw(*draw)
        forward.finish()
    with answering_device_calls(backward):
        current = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(saved)
        with pytest.raises(IllegalOperationError, match="in a recomputation"):
            backward.draw(*draw)
        with pytest.raises(IllegalOperationError, match="sets the random state"):
            backward.finish()
        torch.cuda.set_rng_state(current)
        backward.draw(*draw)
        backward.finish()
        torch.cuda.set_rng_state(current)  # from before the draw
        with pytest.raises(IllegalOperationError, match="in a recomputation"):
            backward.draw(*draw)
        with pytest.raises(IllegalOperationError, match="sets the random state"):
            torch.cuda.set_rng_state(torch.zeros(3, dtype=torch.uint8))


# What reaches the host, and values that decide shapes.

_ILLEGAL: dict[str, Callable[[torch.Tensor], object]] = {
    "prints": lambda x: f"{x.sum()}",
    "gives to numpy": lambda x: np.asarray(x) * 1,
    "converts": lambda x: complex(x.sum()),
    "seeds": lambda _: torch.manual_seed(3),
    "seeds from outside": lambda _: torch.set_rng_state(torch.Generator().get_state()),
    "draws from elsewhere": lambda x: x.bernoulli(generator=torch.Generator()),
}


@pytest.mark.parametrize("name", _ILLEGAL)
def test_what_reaches_the_host_is_refused_with_its_line(name: str) -> None:
    backend = RecorderBackend()
    before = torch.get_rng_state()
    illegal = _ILLEGAL[name]
    line = illegal.__code__.co_firstlineno
    with (
        pytest.raises(IllegalOperationError, match=rf"{__file__}:{line}"),
        capturing(backend, "chunk"),
    ):
        illegal(torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_shape_that_depends_on_values_is_never_broadcast() -> None:
    backend = RecorderBackend()
    lengths, x = torch.tensor([4]), torch.randn(1, 4, 8)
    with capturing(backend, "packed") as graph:
        nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    graph.replay()
    lengths.fill_(1)
    with pytest.raises(ReplayMismatchError, match=r"\(1, 8\).*(4, 8)(.|\n)*recorder\.py:\d+"):
        graph.replay()


@pytest.mark.parametrize("name", ["prod", "filled number"])
def test_backwards_that_read_values_are_refused_by_name(name: str) -> None:
    backend = RecorderBackend()
    x = torch.randn(3, requires_grad=True)
    number = torch.tensor(2.0, requires_grad=True)
    with capturing(backend, "forward"):
        out = x.prod() if name == "prod" else x.masked_fill(x > 0, number).sum()
    with (
        pytest.raises(IllegalOperationError, match=r"(Prod|MaskedFill)Backward reads"),
        capturing(backend, "backward"),
    ):
        torch.autograd.grad(out, [x, number], torch.ones(()), allow_unused=True)
