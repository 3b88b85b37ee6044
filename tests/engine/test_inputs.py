"""Small inputs are copied into a slot once, and again whenever they change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from toys import Apply

from chunkgraph.engine import CaptureOptions, ChunkGraphs, mark_constant
from chunkgraph.graphs import GraphBackend

NUM_SLOTS = 2


def masked() -> nn.Module:
    """Return a module that uses a mask in the forward and, by multiplication, in the backward."""
    return Apply(lambda m, x, mask: m.linear(x) * mask, linear=nn.Linear(4, 4))


@pytest.fixture
def train(backend: GraphBackend) -> Callable[..., None]:
    """Run microbatches through graphs and through a twin; output and gradients must be equal."""
    torch.manual_seed(0)
    module = masked().to(backend.device)
    twin = masked().to(backend.device)
    twin.load_state_dict(module.state_dict())
    graphs = ChunkGraphs(
        [module], [NUM_SLOTS], backend=backend, options=CaptureOptions(verify="poison")
    )
    x = torch.randn(3, 4, device=backend.device)
    graphs.capture([(x, torch.full((4,), 7.0, device=backend.device))])

    def run(*masks: torch.Tensor | Callable[[], torch.Tensor]) -> None:
        """Run all forwards, then all backwards; a callable makes its mask before its forward."""
        outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        with graphs.step(len(masks)):
            for source in masks:
                mask = source() if callable(source) else source
                expected = twin(x, mask.clone())
                output = graphs.callables[0](x, mask)
                assert torch.equal(output, expected)
                outputs.append((output, expected))
            for output, expected in outputs:
                output.sum().backward()
                expected.sum().backward()
        assert torch.equal(module.linear.weight.grad, twin.linear.weight.grad)

    run.graphs = graphs  # type: ignore[attr-defined]
    return run


@pytest.fixture
def num_copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Count the copies of tensors with a mask's shape that the host starts."""
    copies: list[Any] = []
    copy = torch.Tensor.copy_

    def counting(target: torch.Tensor, source: torch.Tensor, *rest: Any) -> torch.Tensor:
        if target.shape == (4,):
            copies.append(source)
        return copy(target, source, *rest)

    def counting_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            counting(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    monkeypatch.setattr(torch, "_foreach_copy_", counting_each)
    return copies


def new_mask(backend: GraphBackend, value: float) -> torch.Tensor:
    return torch.full((4,), value, device=backend.device)


def test_an_unchanging_input_is_copied_once_for_each_slot(
    train: Callable[..., None], backend: GraphBackend, num_copies: list[Any]
) -> None:
    mask = mark_constant(new_mask(backend, 2.0))
    for _ in range(3):
        train(mask, mask)
    assert len(num_copies) == NUM_SLOTS


def test_without_the_promise_it_is_copied_every_time(
    train: Callable[..., None], backend: GraphBackend
) -> None:
    """Version counters miss writes through ``.data``, and those of collectives."""
    mask = new_mask(backend, 2.0)
    train(mask, mask)
    version = mask._version
    mask.data.add_(1.0)
    assert mask._version == version
    train(mask, mask)


@pytest.mark.parametrize(
    "write",
    [
        lambda mask: mask[1:2].zero_(),
        lambda mask: torch.neg(mask, out=mask),
    ],
    ids=["view", "out"],
)
def test_a_write_between_microbatches_is_seen(
    train: Callable[..., None],
    backend: GraphBackend,
    num_copies: list[Any],
    write: Callable[[torch.Tensor], object],
) -> None:
    mask = mark_constant(new_mask(backend, 2.0))
    train(mask, mask)

    def written() -> torch.Tensor:
        write(mask)
        return mask

    train(mask, written)  # between the forwards of two microbatches in flight
    train(mask, mask)  # the slot with the old values gets the new ones
    assert len(num_copies) == 2 * NUM_SLOTS
    train(mask, mask)
    assert len(num_copies) == 2 * NUM_SLOTS


def test_other_tensors_in_between_are_loaded_and_forgotten(
    train: Callable[..., None], backend: GraphBackend
) -> None:
    """A slot alternates between two masks, with and without the promise."""
    first, second = mark_constant(new_mask(backend, 2.0)), mark_constant(new_mask(backend, 3.0))
    plain = new_mask(backend, 4.0)
    for mask in (first, second, first, plain, first, plain, second):
        train(mask)


def test_the_source_is_held_until_another_takes_its_place(
    train: Callable[..., None], backend: GraphBackend
) -> None:
    """No other tensor can get its address while a slot compares with it."""
    mask = mark_constant(new_mask(backend, 2.0))
    source = weakref.ref(mask)
    train(mask)
    del mask
    assert source() is not None
    plain = new_mask(backend, 3.0)
    train(plain, plain)
    assert source() is None


def test_receiving_into_the_static_input_forgets_the_source(
    train: Callable[..., None], backend: GraphBackend
) -> None:
    """The static input then holds the received value, not the source's."""
    mask = mark_constant(new_mask(backend, 2.0))
    train(mask, mask)
    graphs: ChunkGraphs = train.graphs  # type: ignore[attr-defined]

    def received() -> torch.Tensor:
        memory = graphs.reserve_input(0, index=1)
        return memory.fill_(9.0)

    train(received, received)
    train(mask, mask)


def test_an_input_may_be_received_in_some_microbatches(backend: GraphBackend) -> None:
    """Then the graph copies the other one; otherwise the host copies both."""
    module = masked().to(backend.device)
    graphs = ChunkGraphs([module], [2], backend=backend)
    ways, num_received = [True, False, False, True, True, False], 0
    for step in range(4):
        with graphs.step(len(ways)):
            for i, is_received in enumerate(ways):
                hidden = torch.randn(3, 4, device=backend.device)
                scale = torch.full((3, 4), 1.0 + i + step, device=backend.device)
                received = graphs.reserve_input(0) if is_received else None
                if received is not None:
                    num_received += 1
                    with torch.no_grad():
                        received.copy_(hidden)
                y = graphs.callables[0](hidden if received is None else received, scale)
                assert torch.equal(y, module(hidden, scale))
                y.sum().backward()
    assert num_received == 3 * 3
