"""The layers of random programs: each maps a float tensor (batch, time, width) to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, weight_norm
from torch.utils.checkpoint import checkpoint

BATCH, TIME, WIDTH = 2, 4, 8


class Apply(nn.Module):
    """A function of the input, with submodules that it may use."""

    def __init__(self, function: Callable[..., torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.layers)


class Channels(nn.Module):
    """A layer for (batch, channels, time)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class First(nn.Module):
    """The first result of a layer that gives several."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class Attention(nn.Module):
    def __init__(self, dropout: float, *, needs_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)
        self.needs_weights = needs_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weights = self.attention(x, x, x, need_weights=self.needs_weights)
        return y if weights is None else y + weights.mean(-1, keepdim=True)


class Embedded(nn.Module):
    """Adds an embedding of integers made of the input."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.embedding((x.detach().float()[..., 0] * 3).long().clamp(0, 9))


class Counter(nn.Module):
    """Buffers updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.float().mean((0, 1)), alpha=0.1)
        return x - self.average.to(x.dtype)


class Elsewhere(nn.Module):
    """Settings and tensors outside of the module's state."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.masks = [torch.ones(WIDTH)]
        values = {"shift": torch.full((WIDTH,), 0.1)}
        self.read: Callable[[str], torch.Tensor] = lambda name: values[name]
        self.replace: Callable[[], None] = lambda: values.update(shift=values["shift"] * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.temperature * self.masks[0].to(x.dtype) + self.read("shift").to(x.dtype)


class LazyMask(nn.Module):
    """A mask made at the first call, kept in an attribute."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.is_buffer = is_buffer
        self.mask: torch.Tensor | None
        if is_buffer:
            self.register_buffer("mask", None, persistent=False)
        else:
            self.mask = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(TIME, TIME, dtype=torch.bool, device=x.device).tril()
        scores = (x @ x.transpose(1, 2)).masked_fill(~self.mask, -torch.inf)
        return scores.softmax(-1).to(x.dtype) @ x


class State(nn.Module):
    """Reads the value that the previous call stored in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.previous = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.previous.to(x.dtype)
        with torch.no_grad():
            self.previous.copy_(y.float().mean((0, 1)))
        return y


class Listed(nn.Module):
    """A parameter that a list also holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.weights = [self.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weights[0].to(x.dtype)).tanh()


class DecayInForward(nn.Module):
    """Updates its parameter in place in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.99)
        return self.linear(x)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain.to(x.dtype)


class Square(torch.autograd.Function):
    """A user's autograd function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.abs()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x.abs()


def _linear(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


def _frozen() -> nn.Module:
    return _linear().requires_grad_(False)


def _double(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    return linear(x.double()).to(x.dtype)


def _bfloat16(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    return linear(x.bfloat16()).to(x.dtype)


def _without_autocast(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return linear(x.float()).to(x.dtype)


def _own_autocast(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear(linear(x).tanh()).to(x.dtype)


def _gathered(x: torch.Tensor) -> torch.Tensor:
    index = x.detach().argsort(-1)
    return x + x.gather(-1, index)


def _scattered(x: torch.Tensor) -> torch.Tensor:
    index = x.detach().argsort(1)
    return x + torch.zeros_like(x).scatter_add(1, index, x)


def _sdpa(x: torch.Tensor, qkv: nn.Module) -> torch.Tensor:
    q, k, v = (t.view(BATCH, -1, 2, 4).transpose(1, 2) for t in qkv(x).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(x.shape)


def _spectrum(x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.rfft(x.float(), dim=1)
    return torch.fft.irfft(spectrum * torch.exp(1j * spectrum.real), n=x.shape[1], dim=1).to(
        x.dtype
    )


def _experts(x: torch.Tensor, router: nn.Module, one: nn.Module, two: nn.Module) -> torch.Tensor:
    weights, chosen = router(x).softmax(-1).topk(1, -1)
    return torch.where(chosen[..., :1] % 2 == 0, one(x), two(x)) * weights


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.add_(1).mul_(x)
    y[:, 0] = 0
    return y.tanh_()


def _stopped(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        teacher = linear(x)
    return x + teacher + linear(x).detach()


def _split(x: torch.Tensor) -> torch.Tensor:
    one, two = x.split([3, 5], -1)
    return torch.cat([two.sigmoid(), one], -1)


def _host_constant(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(0.7) + torch.arange(WIDTH, dtype=x.dtype)


def _checkpointed(inner: nn.Module, *, reentrant: bool) -> nn.Module:
    return Apply(lambda x, layer: checkpoint(layer, x, use_reentrant=reentrant), inner)


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": _linear,
    "no_bias": lambda: _linear(bias=False),
    "tied": lambda: Apply(lambda x, f: f(f(x).tanh()), _linear()),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "batch_norm": lambda: Channels(nn.BatchNorm1d(WIDTH)),
    "batch_norm_eval": lambda: Channels(nn.BatchNorm1d(WIDTH)).eval(),
    "group_norm": lambda: Channels(nn.GroupNorm(2, WIDTH)),
    "instance_norm": lambda: Channels(
        nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)
    ),
    "dropout": lambda: nn.Dropout(0.3),
    "alpha_dropout": lambda: nn.AlphaDropout(0.3),
    "noise": lambda: Apply(lambda x: x + torch.randn_like(x) * 0.1),
    "conv": lambda: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "conv_groups": lambda: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4)),
    "conv_transposed": lambda: Channels(nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)),
    "average_pool": lambda: Channels(nn.AvgPool1d(3, 1, 1)),
    "attention": lambda: Attention(0.0, needs_weights=True),
    "attention_dropout": lambda: Attention(0.2, needs_weights=False),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1, batch_first=True),
    "gru": lambda: First(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "lstm": lambda: First(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "rnn": lambda: First(nn.RNN(WIDTH, WIDTH, batch_first=True)),
    "gelu": nn.GELU,
    "relu_in_place": lambda: Apply(lambda x, f: f(x * 1), nn.ReLU(inplace=True)),
    "silu": nn.SiLU,
    "prelu": nn.PReLU,
    "softmax": lambda: nn.Softmax(-1),
    "log_softmax": lambda: nn.LogSoftmax(-1),
    "gate": lambda: Apply(lambda x, q, k: q(x).sigmoid() * k(x), _linear(), _linear()),
    "glu": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU()),
    "cumsum": lambda: Apply(lambda x: x.cumsum(1) * 0.5),
    "weight_norm": lambda: parametrizations.weight_norm(_linear()),
    "spectral_norm": lambda: parametrizations.spectral_norm(_linear()),
    "symmetric": lambda: parametrize.register_parametrization(_linear(), "weight", Symmetric()),
    "embedding": Embedded,
    "counter": Counter,
    "elsewhere": Elsewhere,
    "lazy_buffer": lambda: LazyMask(is_buffer=True),
    "frozen": _frozen,
    "part_frozen": lambda: nn.Sequential(_frozen(), nn.Tanh(), _linear()),
    "scale": Scale,
    "einsum": lambda: Apply(lambda x, f: torch.einsum("btw,bsw->bts", f(x), x) @ x, _linear()),
    "spectrum": lambda: Apply(_spectrum),
    "gather": lambda: Apply(_gathered),
    "scatter": lambda: Apply(_scattered),
    "sdpa": lambda: Apply(_sdpa, nn.Linear(WIDTH, 3 * WIDTH)),
    "double": lambda: Apply(_double, _linear().double()),
    "bfloat16": lambda: Apply(_bfloat16, _linear().bfloat16()),
    "in_place": lambda: Apply(_in_place),
    "split": lambda: Apply(_split),
    "experts": lambda: Apply(_experts, nn.Linear(WIDTH, 2), _linear(), _linear()),
    "stopped": lambda: Apply(_stopped, _linear()),
    "own_function": lambda: Apply(Square.apply),
    "standard": lambda: Apply(lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-3)),
    "quantile": lambda: Apply(lambda x: x - x.float().median(1, keepdim=True).values.to(x.dtype)),
    "identity": nn.Identity,
    "reversed": lambda: Apply(lambda x: x.flip(1).transpose(0, 1).contiguous().transpose(0, 1)),
    "local_response": lambda: Channels(nn.LocalResponseNorm(2)),
    "upsample": lambda: Channels(
        nn.Sequential(nn.Upsample(scale_factor=2, mode="linear"), nn.AvgPool1d(2))
    ),
}
"""Kinds that a graph can hold."""

EXOTIC: dict[str, Callable[[], nn.Module]] = {
    "embedding_max_norm": lambda: Embedded(max_norm=0.5),
    "lazy_mask": lambda: LazyMask(is_buffer=False),
    "state": State,
    "listed": Listed,
    "decay": DecayInForward,
    "old_weight_norm": lambda: weight_norm(_linear()),
    "host_constant": lambda: Apply(_host_constant),
    "without_autocast": lambda: Apply(_without_autocast, _linear()),
    "own_autocast": lambda: Apply(_own_autocast, _linear()),
    "batch_norm_average": lambda: Channels(nn.BatchNorm1d(WIDTH, momentum=None)),
    "item": lambda: Apply(lambda x: x * float(x.detach().abs().amax())),
    "prod": lambda: Apply(lambda x: x.prod(1, keepdim=True) + x),
    "rare": lambda: Apply(lambda x: x[x > 0].sum() + x),
}
"""Kinds that may be refused."""

NESTING: dict[str, Callable[[nn.Module], nn.Module]] = {
    "residual": lambda inner: Apply(lambda x, f: x + f(x), inner),
    "checkpoint": lambda inner: _checkpointed(inner, reentrant=False),
    "reentrant": lambda inner: _checkpointed(inner, reentrant=True),
    "twice": lambda inner: Apply(lambda x, f: f(f(x)), inner),
    "eval": lambda inner: inner.eval(),
}
"""Kinds around another one: "residual:linear"."""


def make_layer(kind: str) -> nn.Module:
    """Make a layer of a kind, which may name nested ones: "residual:checkpoint:linear"."""
    outer, _, inner = kind.partition(":")
    if inner:
        return NESTING[outer](make_layer(inner))
    return (PLAIN.get(kind) or EXOTIC[kind])()
