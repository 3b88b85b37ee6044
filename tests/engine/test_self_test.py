"""A capture replays each chunk's first slot and compares it with eager passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import library, nn
from torch.multiprocessing.reductions import StorageWeakRef
from toys import Apply

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.engine.bits import digests_of
from chunkgraph.engine.capture import self_test, session
from chunkgraph.engine.capture.layers import LayerWatch
from chunkgraph.engine.capture.saved import saved_tensors
from chunkgraph.engine.capture.session import capture_slot
from chunkgraph.errors import CaptureError, VerifyError
from chunkgraph.graphs.recorder import RecorderBackend

WIDTH = 8


class Layer(nn.Module):
    """A linear layer whose forward and backward are scaled by numbers of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale: Callable[[], float] = lambda: 1.0
        self.backward_scale: Callable[[], float] = lambda: 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scaled.apply(torch.sigmoid(self.linear(x)), self.scale(), self.backward_scale)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: float, backward_scale: Callable[[], float]
    ) -> torch.Tensor:
        ctx.backward_scale = backward_scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad * ctx.backward_scale(), None, None


def three_layers() -> Any:
    layers = nn.Sequential(*(Layer() for _ in range(3)))
    return Apply(lambda m, x: m.layers(x), layers=layers)


class _Keeping(torch.autograd.Function):
    """Keep a tensor; the backward reports whether all that later layers kept has been freed."""

    kept: ClassVar[list[StorageWeakRef]] = []
    freed: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        tensor = x.sigmoid()
        ctx.save_for_backward(tensor)
        ctx.number = len(_Keeping.kept)
        _Keeping.kept.append(StorageWeakRef(tensor.untyped_storage()))
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        later = _Keeping.kept[ctx.number + 1 :]
        _Keeping.freed.append(all(storage.expired() for storage in later))
        return grad * 2.0


def counting() -> Callable[[], float]:
    """Return a function whose result changes with every call."""
    numbers = iter(range(1, 10_000))
    return lambda: 1.0 + next(numbers) / 7


def steps(module: nn.Module, num_slots: int = 2, num: int = 3, **options: Any) -> ChunkGraphs:
    graphs = ChunkGraphs([module], [num_slots], options=CaptureOptions(**options))
    for _ in range(num):
        with graphs.step(num_slots):
            x = torch.randn(2, WIDTH, requires_grad=True)
            graphs.callables[0](x).sum().backward()
    return graphs


def test_what_a_pass_keeps_is_freed_as_its_backward_goes() -> None:
    """Else the capture takes more memory than an eager step."""
    module = Apply(lambda _, x: _Keeping.apply(_Keeping.apply(x)), layer=nn.Linear(1, 1))
    _Keeping.kept.clear()
    _Keeping.freed.clear()
    graphs = ChunkGraphs([module], [1], backend=RecorderBackend())
    graphs.capture([(torch.ones(4, requires_grad=True),)])
    assert len(_Keeping.freed) >= 2
    assert all(_Keeping.freed[:2])


def test_a_number_that_the_forward_reads_and_that_changes_names_its_layer() -> None:
    chunk = three_layers()
    chunk.layers[1].scale = counting()
    with pytest.raises(CaptureError, match=r"chunk 0 slot 0: a replay of its graphs differs"):
        steps(chunk)
    chunk.layers[1].scale = counting()
    with pytest.raises(CaptureError, match=r"(?s)output 0 differs.*first layer .*layers\.[12]"):
        steps(chunk)


def test_a_number_that_the_backward_reads_and_that_changes_names_the_parameter() -> None:
    chunk = three_layers()
    chunk.layers[1].backward_scale = counting()
    with pytest.raises(CaptureError, match=r"(?s)gradient of layers\.1\.linear\.\w+ differs"):
        steps(chunk)


def test_the_first_slot_is_tested_before_the_next_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[int] = []

    def capture(*args: Any) -> Any:
        done.append(args[-1])
        return capture_slot(*args)

    monkeypatch.setattr(session, "capture_slot", capture)
    chunk = three_layers()
    chunk.layers[0].scale = counting()
    graphs = ChunkGraphs([chunk], [4])
    with pytest.raises(CaptureError):
        graphs.capture([torch.randn(2, WIDTH, requires_grad=True)])
    assert done == [0]


def test_other_numbers_of_draws_are_found() -> None:
    calls = itertools.count(1)

    def draw(module: Any, x: torch.Tensor) -> torch.Tensor:
        if next(calls) > 2:
            torch.rand(3)
        return module.layer(x)

    with pytest.raises(CaptureError, match="a different number of random values is drawn"):
        steps(Apply(draw, layer=Layer()))


def noisy(size: float, fault: Callable[[], float] = lambda: 0.0) -> Any:
    """Make a layer whose forward and backward differ from call to call, as atomics do."""
    parts: dict[str, Any] = {"linear": nn.Linear(64, 64), "size": size, "fault": fault}
    return Apply(lambda m, x: _Noise.apply(m.linear(x), m), **parts)


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        return _with_noise(x, layer)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _with_noise(grad, ctx.layer), None


def _with_noise(x: torch.Tensor, layer: Any) -> torch.Tensor:
    return torch.ops.chunkgraph_noise.add(x, layer.size, layer.fault())


@library.custom_op("chunkgraph_noise::add", mutates_args=())
def _operator(x: torch.Tensor, size: float, fault: float) -> torch.Tensor:
    """Add noise that no seed repeats, and a fault."""
    noise = torch.randn(x.shape, generator=_unseeded, dtype=x.dtype)
    return x * (1 + size * noise) + fault


_unseeded = torch.Generator()


class NoisyBackend(RecorderBackend):
    """A recorder whose eager work is not taken to repeat its bits."""

    repeats_bits = False


def noisy_steps(module: nn.Module, **options: Any) -> ChunkGraphs:
    graphs = ChunkGraphs([module], [2], backend=NoisyBackend(), options=CaptureOptions(**options))
    for _ in range(4):
        with graphs.step(2):
            graphs.callables[0](torch.randn(64, 64, requires_grad=True)).sum().backward()
    return graphs


@pytest.mark.parametrize("size", [0.0, 1e-6, 1e-3])
@pytest.mark.parametrize("verify", ["none", "shadow"])
def test_noise_of_kernels_is_accepted(size: float, verify: Any) -> None:
    assert noisy_steps(noisy(size), verify=verify).counters.replays == 3


def routed(backward_scale: Callable[[], float] = lambda: 1.0) -> Any:
    """Make a chunk that routes the only token of other experts elsewhere in each pass."""
    _unseeded.manual_seed(3)
    parts = {"scale": nn.Parameter(torch.ones(64)), "size": 1e-6, "fault": lambda: 0.0}
    experts = nn.ParameterList([nn.Parameter(torch.randn(64, 64)) for _ in range(200)])

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        weights = _Routed.apply(torch.stack([*module.experts]), backward_scale)
        return _Noise.apply(torch.einsum("bi,eij->bj", x, weights) * module.scale, module)

    return Apply(forward, experts=experts, **parts)


@pytest.mark.parametrize("verify", ["none", "shadow"])
def test_gradients_of_experts_whose_tokens_are_routed_otherwise_are_accepted(verify: Any) -> None:
    assert noisy_steps(routed(), verify=verify).counters.replays == 3


@pytest.mark.parametrize("fault", [0.0, torch.nan])
def test_wrong_gradients_of_all_experts_are_found(fault: float) -> None:
    values = iter([1.0, 1.0, 1.0])  # an eager step, and two passes
    with pytest.raises(CaptureError, match=r"the gradient of experts\.\d+ differs"):
        noisy_steps(routed(lambda: next(values, fault)))


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: torch.Tensor, backward_scale: Callable[[], float]
    ) -> torch.Tensor:
        ctx.backward_scale = backward_scale
        return weights.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.chunkgraph_noise.route(grad * ctx.backward_scale()), None


@library.custom_op("chunkgraph_noise::route", mutates_args=())
def _route(grads: torch.Tensor) -> torch.Tensor:
    """Lose most of a few experts' gradients, of others in each call."""
    is_lost = torch.rand(grads.shape[0], generator=_unseeded) < 0.005
    return grads * (1 - 0.9 * is_lost.to(grads.dtype))[:, None, None]


def test_a_fault_larger_than_the_noise_is_found() -> None:
    values = iter([0.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # an eager step, and two passes
    with pytest.raises(CaptureError, match="differs from an eager pass"):
        noisy_steps(noisy(1e-6, lambda: next(values, 1e-2)))


def test_shadow_finds_a_fault_larger_than_the_noise() -> None:
    module = noisy(1e-6)
    graphs = noisy_steps(module, verify="shadow")
    module.fault = lambda: 1e-2  # eager passes see it, replays do not
    with pytest.raises(VerifyError, match="output 0"), graphs.step(2):
        graphs.callables[0](torch.randn(64, 64, requires_grad=True)).sum().backward()


def test_passes_that_differ_by_more_than_rounding_are_refused() -> None:
    with pytest.raises(CaptureError, match="two eager passes on the same inputs"):
        noisy_steps(noisy(0.0, counting()))


def test_a_replay_that_rarely_repeats_its_bits_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both eager passes may agree by chance, where a kernel adds in no fixed order."""

    def rounded(tensors: list[torch.Tensor | None]) -> Any:
        factor = next(factors, 1.0)
        return digests_of([t if t is None else t * factor for t in tensors])

    def measure(*values: float) -> None:
        nonlocal factors
        factors = iter([1.0, 1.0, 1.0, *values])  # an eager pass: forward, saved, backward
        graphs = ChunkGraphs([three_layers()], [1])
        graphs.capture([torch.randn(2, WIDTH, requires_grad=True)])

    factors = iter([1.0])
    monkeypatch.setattr(self_test, "digests_of", rounded)
    measure(1 + 1e-6, 1.0)
    measure(1 + 1e-6, 1.0, 1 + 3e-6, 1 + 1e-6)
    with pytest.raises(CaptureError, match=r"output 0 differs by [\d.]+e-0[67]"):
        measure(*[1 + 1e-6, 1.0] * 4)
    with pytest.raises(CaptureError, match="output 0 differs by"):
        measure(*[x for i in range(4) for x in (1.1 + i / 10, 1.0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_digests_see_every_bit(dtype: torch.dtype) -> None:
    for shape in [(), (1,), (7,), (250,), (300, 70)]:
        torch.manual_seed(sum(shape))
        one = torch.randn(shape).to(dtype)
        other = one.clone().reshape(-1)
        place = int(torch.randint(other.numel(), ()))
        other.view(torch.uint8)[place * other.element_size()] ^= 1
        same, differs = digests_of([one, one]), digests_of([one.clone(), other.view_as(one)])
        assert same.equal(differs).tolist() == [True, False]
        # A view that begins in the middle of a word has the digest of its copy.
        longer = torch.cat([torch.zeros(3, dtype=dtype), one.reshape(-1)])[3:]
        assert digests_of([longer]).equal(digests_of([one])).all()
    expanded = torch.ones((), dtype=dtype).expand(300)
    assert digests_of([expanded]).equal(digests_of([expanded.clone()])).all()


def test_saved_tensors_whose_memory_is_freed_are_not_read() -> None:
    """Recomputation frees a tensor that an operator keeps, and fills it again in the backward."""
    x = torch.ones(4, requires_grad=True)
    hidden = x.tanh()
    y = hidden * x
    assert len(saved_tensors([y], LayerWatch())) == 3
    hidden.untyped_storage().resize_(0)
    (kept,) = saved_tensors([y], LayerWatch())
    assert kept.address == x.data_ptr()
    digests_of([kept.read()])
