"""Replays have the bits of eager work, for any captured values and any settings of the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from chunkgraph.errors import IllegalOperationError, ReplayMismatchError
from chunkgraph.graphs import GraphBackend, RecorderBackend

Program = Callable[..., torch.Tensor]


def bits(tensors: Sequence[torch.Tensor | None]) -> list[bytes | None]:
    """Return every bit of these tensors, so that signs of zeros count too."""
    return [
        None if t is None else t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for t in tensors
    ]


def assert_equal_to_eager(
    program: Program,
    make_inputs: Callable[[int], Sequence[torch.Tensor]],
    parameters: Sequence[torch.Tensor] = (),
) -> None:
    """Compare outputs, gradients and random states, replay by replay.

    Args:
        program: maps the inputs to one tensor.
        make_inputs: makes a replay's inputs from its number, from 0; the capture uses number -1.
        parameters: further tensors that take gradients.
    """

    def leaves_of(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [t for t in (*inputs, *parameters) if t.requires_grad]

    static = [t.detach().clone().requires_grad_(t.requires_grad) for t in make_inputs(-1)]
    backend = RecorderBackend()
    before = torch.get_rng_state()
    with backend.capture("forward", backend.new_pool("forward")) as forward:
        out = program(*static)
    gradient = torch.zeros_like(out)
    with backend.capture("backward", backend.new_pool("backward")) as backward:
        gradients = torch.autograd.grad(out, leaves_of(static), gradient, allow_unused=True)
    assert torch.equal(torch.get_rng_state(), before)
    for number in range(3):
        inputs = make_inputs(number)
        torch.manual_seed(number)
        expected_out = program(*inputs)
        grad_output = torch.randn_like(expected_out)
        expected = torch.autograd.grad(
            expected_out, leaves_of(inputs), grad_output, allow_unused=True
        )
        state = torch.get_rng_state()
        with torch.no_grad():
            for target, value in zip(static, inputs, strict=True):
                target.copy_(value)
        torch.manual_seed(number)
        forward.replay()
        assert bits([out]) == bits([expected_out])
        gradient.copy_(torch.randn_like(gradient))
        backward.replay()
        assert bits(gradients) == bits(expected)
        assert torch.equal(torch.get_rng_state(), state)


def one_input(*shape: int) -> Callable[[int], Sequence[torch.Tensor]]:
    def make(number: int) -> Sequence[torch.Tensor]:
        generator = torch.Generator().manual_seed(number + 100)
        return [torch.randn(*shape, generator=generator, requires_grad=True)]

    return make


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrent_layers_are_equal_to_eager(kind: type[nn.RNNBase], dtype: torch.dtype) -> None:
    """Kernels of oneDNN save more where gradients are enabled."""
    layer = kind(8, 8, num_layers=2, bidirectional=True).to(dtype)
    assert_equal_to_eager(
        lambda x: layer(x.to(dtype))[0].float(), one_input(3, 2, 8), list(layer.parameters())
    )


def test_a_part_without_gradients_is_equal_to_eager() -> None:
    frozen, layer = nn.LSTM(8, 8), nn.Linear(8, 8)

    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = frozen(x)[0]
        return layer(x) * target

    assert_equal_to_eager(program, one_input(3, 2, 8), list(layer.parameters()))


def test_a_replay_ignores_the_callers_autocast() -> None:
    layer = nn.Linear(16, 16)
    x = torch.randn(9, 16)

    def program() -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            exact = layer(x)
        return exact + layer(x)

    backend = RecorderBackend()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        with backend.capture("parts", backend.new_pool("pool")) as graph:
            out = program()
        graph.replay()
        assert bits([out]) == bits([program()])
    graph.replay()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bits([out]) == bits([program()])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_next_to_dropout_is_equal_to_eager(reentrant: bool) -> None:
    first, second = (nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def program(x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(first, F.dropout(x * 1.5, 0.3), use_reentrant=reentrant)
        return checkpoint(second, F.dropout(x, 0.2), use_reentrant=reentrant).sum()

    assert_equal_to_eager_backward(program, [*first.parameters(), *second.parameters()])


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_in_what_is_recomputed_is_refused(backend: GraphBackend, reentrant: bool) -> None:
    """A graph cannot restore the generator state that its forward started from."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(backend.device)
    x = torch.ones(4, 8, device=backend.device, requires_grad=True)
    with backend.on_capture_stream():
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    with backend.capture("forward", backend.new_pool("forward")):
        loss = checkpoint(layer, x, use_reentrant=reentrant).sum()
    with (
        pytest.raises(IllegalOperationError, match="after the random state was restored"),
        backend.capture("backward", backend.new_pool("backward")),
    ):
        loss.backward()


def assert_equal_to_eager_backward(
    program: Callable[[torch.Tensor], torch.Tensor], parameters: list[nn.Parameter]
) -> None:
    """As `assert_equal_to_eager`, for programs that allow no `torch.autograd.grad`."""
    x = torch.ones(4, 8, requires_grad=True)
    leaves = [x, *parameters]

    def clear() -> None:
        for leaf in leaves:
            leaf.grad = None

    backend = RecorderBackend()
    with backend.capture("forward", backend.new_pool("forward")) as forward:
        loss = program(x)
    clear()
    with backend.capture("backward", backend.new_pool("backward")) as backward:
        loss.backward()
    gradients = [leaf.grad for leaf in leaves]
    for seed in range(2):
        clear()
        torch.manual_seed(seed)
        program(x).backward()
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        forward.replay()
        backward.replay()
        assert bits(gradients) == bits([leaf.grad for leaf in leaves])
        assert torch.equal(torch.get_rng_state(), state)


def test_gradients_of_extremes_have_the_bits_of_a_cpu() -> None:
    """Under a dispatch mode torch multiplies by a mask, so that zeros get signs."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.max() + x.min() * x.median() - x.nanmedian()

    assert_equal_to_eager(program, one_input(5, 7))


def test_an_evaluated_layer_takes_the_fast_path_of_eager() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    backend = RecorderBackend()
    with torch.no_grad(), backend.capture("layer", backend.new_pool("pool")) as graph:
        out = layer(x)
    x.copy_(torch.randn(2, 5, 16))
    graph.replay()
    with torch.no_grad():
        assert bits([out]) == bits([layer(x)])


@pytest.mark.parametrize("shares", [True, False])
def test_a_kernel_sees_which_arguments_are_one_tensor(shares: bool) -> None:
    """Attention projects query, key and value together if they are."""
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()

    def program(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        key = x if shares else x.clone()
        with torch.no_grad():
            attended = layer(x, key, key)[0]
        return x * attended

    assert_equal_to_eager(program, one_input(2, 4, 8))


def test_the_fast_path_of_attention_is_refused_under_autocast() -> None:
    """Its kernel casts by itself in eager work; a recorded one does not."""
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 4, 8)
    backend = RecorderBackend()
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(IllegalOperationError, match=r"_native_multi_head_attention[^$]*fastpath"),
        backend.capture("layer", backend.new_pool("pool")),
    ):
        layer(x, x, x)


@pytest.mark.parametrize("pool", [F.max_pool1d, torch.max_pool1d])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_pool_without_gradients_has_the_layout_of_eager(
    pool: Callable[..., torch.Tensor], recomputes: bool
) -> None:
    """A CPU has a special kernel, which torch takes where no dispatch mode is active."""

    def part(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            pooled = pool(x.transpose(1, 2), 3, stride=1, padding=1).transpose(1, 2)
        return x * pooled.contiguous() + pooled.as_strided((2, 4, 8), (32, 8, 1))

    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(part, x, use_reentrant=False) if recomputes else part(x)

    assert_equal_to_eager(program, one_input(2, 4, 8))


def test_one_hot_with_a_number_of_classes_is_legal() -> None:
    backend = RecorderBackend()
    x = torch.tensor([[1, 0], [3, 2]])
    with backend.capture("classes", backend.new_pool("pool")) as graph:
        out = F.one_hot(x, 4)
    x.copy_(torch.tensor([[2, 2], [0, 1]]))
    graph.replay()
    assert torch.equal(out, F.one_hot(x, 4))
    with (
        pytest.raises(IllegalOperationError, match=r"test_recorded_operators\.py:\d+"),
        backend.capture("unknown", backend.new_pool("pool")),
    ):
        F.one_hot(x)


def test_a_gradient_without_memory_is_legal() -> None:
    assert_equal_to_eager(lambda x: x.sgn() * x, one_input(3, 2))


def prints(x: torch.Tensor) -> None:
    _ = f"{x.sum()}"


def shows(x: torch.Tensor) -> None:
    repr(x)


def gives_to_numpy(x: torch.Tensor) -> None:
    np.asarray(x)


def exports(x: torch.Tensor) -> None:
    np.from_dlpack(x)


def splits_by_values(x: torch.Tensor) -> None:
    torch.tensor_split(x, x.long())


def splits_by_named_values(x: torch.Tensor) -> None:
    x.tensor_split(tensor_indices_or_sections=x.long()[:1])


def converts(x: torch.Tensor) -> None:
    complex(x.sum())


def seeds(_: torch.Tensor) -> None:
    torch.manual_seed(3)


def seeds_from_outside(_: torch.Tensor) -> None:
    torch.set_rng_state(torch.Generator().get_state())


def forks_and_seeds(x: torch.Tensor) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.seed()


def draws_from_elsewhere(x: torch.Tensor) -> None:
    x.bernoulli(generator=torch.Generator())


@pytest.mark.parametrize(
    "illegal",
    [
        prints,
        shows,
        gives_to_numpy,
        exports,
        splits_by_values,
        splits_by_named_values,
        converts,
        seeds,
        seeds_from_outside,
        draws_from_elsewhere,
    ],
)
def test_what_reaches_the_host_is_refused_with_its_line(
    illegal: Callable[[torch.Tensor], None],
) -> None:
    backend = RecorderBackend()
    x = torch.zeros(3)
    before = torch.get_rng_state()
    line = illegal.__code__.co_firstlineno + 1
    with (
        pytest.raises(IllegalOperationError, match=rf"{__file__}:{line}"),
        backend.capture("chunk", backend.new_pool("pool")),
    ):
        illegal(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_in_a_fork_is_refused_and_leaves_the_state() -> None:
    backend = RecorderBackend()
    before = torch.get_rng_state()
    with (
        pytest.raises(IllegalOperationError, match=r"torch\.seed"),
        backend.capture("chunk", backend.new_pool("pool")),
    ):
        forks_and_seeds(torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["prod", "filled number"])
def test_backwards_that_read_values_are_refused_by_name(name: str) -> None:
    backend = RecorderBackend()
    x = torch.randn(3, requires_grad=True)
    number = torch.tensor(2.0, requires_grad=True)
    with backend.capture("forward", backend.new_pool("forward")):
        out = x.prod() if name == "prod" else x.masked_fill(x > 0, number).sum()
    with (
        pytest.raises(IllegalOperationError, match=r"(Prod|MaskedFill)Backward reads"),
        backend.capture("backward", backend.new_pool("backward")),
    ):
        torch.autograd.grad(out, [x, number], torch.ones(()), allow_unused=True)


def test_a_filled_mask_without_a_gradient_of_the_number_is_legal() -> None:
    assert_equal_to_eager(
        lambda x: x.masked_fill(x > 0, torch.tensor(2.0)).square(), one_input(4, 3)
    )


def test_a_shape_that_depends_on_values_is_never_broadcast() -> None:
    backend = RecorderBackend()
    lengths = torch.tensor([4])
    x = torch.randn(1, 4, 8)
    with backend.capture("packed", backend.new_pool("pool")) as graph:
        nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    graph.replay()
    lengths.fill_(1)
    with pytest.raises(ReplayMismatchError, match=r"\(1, 8\).*(4, 8)(.|\n)*operators\.py:\d+"):
        graph.replay()


def test_assertions_on_the_device_hold_in_replays() -> None:
    backend = RecorderBackend()
    x = torch.zeros(3)
    with backend.capture("asserts", backend.new_pool("pool")) as graph:
        torch._assert_async((x < 1).all())
    graph.replay()
    x.fill_(2)
    with pytest.raises(RuntimeError, match="nonzero"):
        graph.replay()


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return (x @ w).float()


def _frozen(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        factor = F.softmax(x @ w, -1)
    return x * factor


def _out(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        total = torch.empty(0)
        torch.add(x, w[0], out=total)
        torch.mul(total, 0.5, out=total)
    return x + total


def _each(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    parts = list((x * 1).split(2))
    with torch.no_grad():
        copies = torch._foreach_mul(parts, 0.5)
        torch._foreach_add_(copies, 1.0)
    return x + torch.cat(copies)


def _in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, 1:3].mul_(2).add_(w[0, 1:3])
    y.t()[0] = w[1, 0]
    return y.clamp_(-3, 3)


def _checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    result = checkpoint(lambda a: torch.tanh(a @ w), x, use_reentrant=False)
    assert isinstance(result, torch.Tensor)
    return result


_STEPS: dict[str, Step] = {
    "matmul": lambda x, w: x @ w,
    "constant": lambda x, _: x * torch.tensor(0.75) + torch.tensor([1.0, 0, -1, 2]),
    "changed constant": lambda x, _: x + torch.tensor([1.0, 2, 3, 4]).mul_(0.1),
    "dropout": lambda x, _: F.dropout(x, 0.25),
    "random": lambda x, _: x + torch.rand(4) * torch.randn_like(x),
    "permutation": lambda x, _: x[:, torch.randperm(4)],
    "norm": lambda x, w: F.layer_norm(x, (4,), w[0], w[1]),
    "softmax": lambda x, _: F.softmax(x, -1),
    "view": lambda x, _: x.t().reshape(4, -1).t().contiguous(),
    "expand": lambda x, w: x + w.sum(0).expand_as(x),
    "extremes": lambda x, _: x - x.max() + x.min(),
    "sorted": lambda x, _: x.sort(-1).values,
    "where": lambda x, w: torch.where(x > w[0], x, -0.5),
    "masked": lambda x, _: x.masked_fill(x > 1, 0.5),
    "complex": lambda x, _: torch.fft.ifft(torch.fft.fft(x).conj()).real,
    "cumulative": lambda x, _: x.cumsum(0).tanh(),
    "double": lambda x, w: (x.double() @ w.double()).float(),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], x[None] @ w, x[None])[0],
    "autocast": _autocast,
    "frozen": _frozen,
    "out": _out,
    "each": _each,
    "in place": _in_place,
    "checkpoint": _checkpointed,
}


@settings(max_examples=60)
@given(names=st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=6))
def test_any_sequence_of_operators_is_equal_to_eager(names: list[str]) -> None:
    w = (torch.arange(16.0).reshape(4, 4) / 20 - 0.3).requires_grad_()

    def program(x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = _STEPS[name](x, w)
        return x

    assert_equal_to_eager(program, one_input(6, 4), [w])


ROWS, PLACES, ONES = torch.tensor([0, 1, 1, 2]), torch.tensor([[0, 0, 1, 2]]), torch.ones(1, 4)


def _hooked(x: torch.Tensor) -> torch.Tensor:
    y = x[ROWS]
    y.register_hook(lambda grad: grad - grad.index_put((ROWS[:1],), ONES))
    return y.sin()


def _checkpointed(x: torch.Tensor) -> torch.Tensor:
    y = checkpoint(lambda h: h.scatter_add(0, PLACES, ONES)[ROWS], x.tanh(), use_reentrant=False)
    return y * x[ROWS].sin()


@pytest.mark.parametrize("program", [_hooked, _checkpointed])
def test_work_inside_the_backward_of_indexing_is_equal_to_eager(program: Program) -> None:
    assert_equal_to_eager(program, one_input(3, 4))
