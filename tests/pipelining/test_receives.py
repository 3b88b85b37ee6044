"""Memory of receive buffers: used again when nothing refers to it, and never before."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch_release import ShapeError

from chunkgraph.engine.capture import session
from chunkgraph.pipelining.stage import ReceiveMemory

CPU = torch.device("cpu")
META = torch.empty(2, 3, device="meta")


def _with_grad(grad: torch.Tensor) -> torch.Tensor:
    leaf = torch.zeros_like(grad, requires_grad=True)
    leaf.grad = grad
    return leaf


# What may hold a buffer: each turns the tensor into something that keeps only its memory.
HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "view": lambda t: t[1:],
    "array": lambda t: t.numpy(),
    "capsule": torch.utils.dlpack.to_dlpack,
    "saved for a backward": lambda t: t.requires_grad_().square().sum(),
    "gradient": _with_grad,
}


@given(st.lists(st.tuples(st.sampled_from(sorted(HOLDERS)), st.integers(0, 5))))
def test_what_is_held_never_changes_and_the_peak_is_allocated(
    receives: list[tuple[str, int]],
) -> None:
    """Receives, each held for a number of further receives; every receive writes its number."""
    memory = ReceiveMemory()
    held: list[tuple[int, int, int, Any]] = []
    peak = 0
    for number, (name, duration) in enumerate(receives):
        held = [entry for entry in held if entry[0] >= number]
        buffer = memory.empty_like(META, CPU).fill_(number)
        assert (buffer.shape, buffer.dtype) == (META.shape, META.dtype)
        assert not buffer.requires_grad
        assert buffer.grad is None
        held.append((number + duration, number, buffer.data_ptr(), HOLDERS[name](buffer)))
        peak = max(peak, len(held))
        del buffer
        assert all(_read(address) == [value] * META.numel() for _, value, address, _ in held)
    assert len(memory.buffers) == peak


def _read(address: int) -> list[float]:
    """Read the memory itself: not every holder shows its values."""
    return list((ctypes.c_float * META.numel()).from_address(address))


def test_what_is_held_at_the_end_of_a_step_is_left_to_its_holder() -> None:
    memory = ReceiveMemory()
    first, second = (memory.empty_like(META, CPU) for _ in range(2))
    address = second.data_ptr()
    del second
    memory.leave_used()
    assert len(memory.buffers) == 1
    del first
    assert memory.empty_like(META, CPU).data_ptr() == address


def test_a_failed_step_leaves_its_buffers(pipeline: Callable[..., Any]) -> None:
    """A receive may still write to them."""
    one = pipeline(nn.Linear(4, 4))
    for _ in range(2):
        one.step()
    memory = one.schedules.receive_memory
    memory.empty_like(META, CPU)
    one.step()
    assert len(memory.buffers) == 1
    with pytest.raises(ShapeError):
        one.step(rows=3)
    assert not memory.buffers


def test_outputs_of_the_last_step_are_gone_before_a_capture(
    pipeline: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they would keep the rest of their blocks of memory from the graphs."""
    num_kept: list[int] = []

    def capture(*args: Any) -> Any:
        num_kept.append(len(pipe.stages[0].output_chunks))
        return forward(*args)

    forward = session.capture_forward
    monkeypatch.setattr(session, "capture_forward", capture)
    pipe = pipeline(nn.Linear(4, 4))
    pipe.step()
    assert len(pipe.stages[0].output_chunks) == 2
    assert not num_kept
    pipe.step()
    assert num_kept
    assert not any(num_kept)
