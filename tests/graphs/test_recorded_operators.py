"""Replays of the recorder have the bits of eager work, and refuse what a graph cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from toys import capturing

from chunkgraph.errors import IllegalOperationError, ReplayMismatchError
from chunkgraph.graphs import RecorderBackend

Program = Callable[[torch.Tensor], torch.Tensor]


def bits(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return every bit of these tensors, so that signs of zeros count too."""
    return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def assert_equal_to_eager(
    program: Program, shape: Sequence[int], parameters: Sequence[torch.Tensor] = ()
) -> None:
    """Compare outputs, gradients and random states over three replays.

    Args:
        program: maps an input of this shape to one tensor.
        shape: shape of the input.
        parameters: further tensors that take gradients.
    """
    static = torch.zeros(*shape, requires_grad=True)
    leaves = [static, *parameters]
    backend = RecorderBackend()
    before = torch.get_rng_state()

    def clear() -> None:
        for leaf in leaves:
            leaf.grad = None

    with capturing(backend, "forward") as forward:
        out = program(static)
    gradient = torch.zeros_like(out)
    clear()
    with capturing(backend, "backward") as backward:
        out.backward(gradient)
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert torch.equal(torch.get_rng_state(), before)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            static.copy_(torch.randn(*shape))
        gradient.copy_(torch.randn_like(gradient))
        state = torch.get_rng_state()
        clear()
        expected = program(static)
        expected.backward(gradient)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        forward.replay()
        backward.replay()
        assert bits([out, *gradients]) == bits(
            [expected, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        )
        assert torch.equal(torch.get_rng_state(), after)


def test_a_replay_ignores_the_callers_autocast() -> None:
    layer, x = nn.Linear(16, 16), torch.randn(9, 16)
    backend = RecorderBackend()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        with capturing(backend, "parts") as graph:
            out = layer(x)
        expected = bits([layer(x)])
        graph.replay()
        assert bits([out]) == expected
    graph.replay()
    assert bits([out]) == expected


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
    with pytest.raises(ReplayMismatchError, match=r"\(1, 8\).*(4, 8)(.|\n)*operators\.py:\d+"):
        graph.replay()


def _without_gradients(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        total = torch.empty(0)
        torch.add(x, w[0], out=total)
        copies = torch._foreach_mul(list(total.split(2)), 0.5)
        torch._foreach_add_(copies, 1.0)
    return x + torch.cat(copies)


def _in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, 1:3].mul_(2).add_(w[0, 1:3])
    y.t()[0] = w[1, 0]
    return y.clamp_(-3, 3)


_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "constant": lambda x, _: x * torch.tensor(0.75) + torch.tensor([1.0, 2, 3, 4]).mul_(0.1),
    "dropout": lambda x, _: F.dropout(x, 0.25),
    "random": lambda x, _: x[:, torch.randperm(4)] + torch.rand(4) * torch.randn_like(x),
    "norm": lambda x, w: F.layer_norm(x, (4,), w[0], w[1]),
    "view": lambda x, w: x.t().reshape(4, -1).t() + w.sum(0).expand_as(x),
    "sign": lambda x, _: x.sgn() * x,  # its gradient has no memory
    "masked": lambda x, w: torch.where(x > w[0], x, -0.5).masked_fill(x > 1, 0.5),
    "complex": lambda x, _: torch.fft.ifft(torch.fft.fft(x).conj()).real,
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], x[None] @ w, x[None])[0],
    "without gradients": _without_gradients,
    "in place": _in_place,
}


@settings(max_examples=40)
@given(names=st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=6))
def test_any_sequence_of_operators_is_equal_to_eager(names: list[str]) -> None:
    w = (torch.arange(16.0).reshape(4, 4) / 20 - 0.3).requires_grad_()

    def program(x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = _STEPS[name](x, w)
        return x

    assert_equal_to_eager(program, (6, 4), [w])


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
