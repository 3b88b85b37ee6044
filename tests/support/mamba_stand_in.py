"""Mamba-2 without mamba-ssm: plain operators where Megatron expects its kernels.

The published equations of Mamba-2: with a step ``dt = softplus(dt + bias)`` the state of a
head, [width, state], is ``h(t) = exp(dt A) h(t-1) + dt x(t) B(t)^T``, read out as
``y(t) = h(t) C(t) + D x(t)``; x, B and C come through a causal convolution of each channel, and y
is gated by silu(z). Where ``seq_idx`` changes, the convolution sees zeros and the state begins at
zero. Like that of the kernels, the backward reads its inputs again, ``seq_idx`` among them.

Layer specs are functions of this module, ``mamba_stand_in:local`` and others. Each first installs
the recurrence in Megatron's mixer, once per process, even if the package is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import context_specs
import torch
import user_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn
from torch.nn import functional

from chunkgraph.megatron.core.model_kinds import HybridNames

_MIXER = "megatron.core.ssm.mamba_mixer"
_SPLIT = "megatron.core.ssm.mamba_context_parallel"
_Sizes = tuple[int, int]
"""Width of a head, and groups of heads that share B and C."""


def before(t: torch.Tensor, rows: int, fill: float) -> torch.Tensor:
    """Shift [b, l, ...] by ``rows`` rows."""
    return torch.cat([t.new_full((t.size(0), rows, *t.shape[2:]), fill), t], 1)[:, : t.size(1)]


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, seq_idx: torch.Tensor | None
) -> torch.Tensor:
    """Convolve each channel causally and apply SiLU: [b, l, channels]; weight [channels, taps]."""
    taps = weight.size(1)
    out = bias + x * weight[:, taps - 1]
    for back in range(1, min(taps, x.size(1))):
        seen = before(x, back, 0.0)
        if seq_idx is not None:
            is_other = before(seq_idx, back, -1) != seq_idx
            seen = seen.masked_fill(is_other[..., None], 0.0)
        out = out + seen * weight[:, taps - 1 - back]
    return functional.silu(out)


def scanned(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    seq_idx: torch.Tensor | None,
) -> torch.Tensor:
    """Run the recurrence: x [b, l, heads, width], dt [b, l, heads], B and C [b, l, heads, state].

    Each row only computes what the next one needs: every operator per row takes long to record.
    """
    decay = (dt * a).exp()[..., None, None].unbind(1)
    added = ((dt[..., None] * x)[..., None] * b[:, :, :, None, :]).unbind(1)
    begins = None
    if seq_idx is not None:
        begins = (before(seq_idx, 1, -1) != seq_idx)[..., None, None, None].unbind(1)
    state = torch.zeros_like(added[0])
    states = []
    for row in range(x.size(1)):
        if begins is not None:  # not by a factor: 0 times the tail's value may be NaN
            state = state.masked_fill(begins[row], 0.0)
        state = torch.addcmul(added[row], decay[row], state)
        states.append(state)
    read = (torch.stack(states, 1) * c[:, :, :, None, :]).sum(-1)
    return read + d[:, None] * x


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sizes: _Sizes, seq_idx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(seq_idx, *inputs)
        return _mixed(sizes, seq_idx, *inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        seq_idx, *saved = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in saved]
            output = _mixed(ctx.sizes, seq_idx, *inputs)
        return (None, None, *torch.autograd.grad(output, inputs, grad))


def _mixed(
    sizes: _Sizes,
    seq_idx: torch.Tensor | None,
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
) -> torch.Tensor:
    width, groups = sizes
    heads = a.size(0)
    inner = heads * width
    states = (weight.size(0) - inner) // 2
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * states, heads], dim=-1)
    x, b, c = convolved(xbc, weight, bias, seq_idx).split([inner, states, states], dim=-1)
    b, c = (t.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 2) for t in (b, c))
    dt = functional.softplus(dt + dt_bias)
    y = scanned(x.unflatten(-1, (heads, width)), dt, a, b, c, d, seq_idx)
    return y.flatten(2) * functional.silu(z)


class Switch:
    """Options of tests for the recurrence.

    Attributes:
        rooms: if a list, gets the memory after the last row of each call's ``seq_idx``.
    """

    rooms: list[int] | None = None


def split_conv1d_scan(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    *,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stand in for the kernel that the mixer calls; return [b, l, heads * width]."""
    assert chunk_size > 0
    assert activation == "silu"
    assert not norm_before_gate
    assert headdim is not None
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == zxbcdt.shape[:2]
        assert seq_idx.is_contiguous()
        if Switch.rooms is not None:
            held = seq_idx.untyped_storage().nbytes() // seq_idx.element_size()
            Switch.rooms.append(held - seq_idx.storage_offset() - seq_idx.numel())
    inputs = (zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D)
    return _Mixed.apply((headdim, ngroups), seq_idx, *inputs)


def _not_here(*_: Any) -> Any:
    raise NotImplementedError("only the memory-efficient path of training is stood in for")


class RMSNorm(nn.Module):
    """Root mean square normalization of groups."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size or hidden_size
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size]."""
        grouped = x.unflatten(-1, (-1, self.group_size))
        scale = (grouped.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (grouped * scale).flatten(-2) * self.weight


def rearrange(t: torch.Tensor, pattern: str) -> torch.Tensor:
    """Stand in for einops: reorder axes and drop those of size 1."""
    left, right = (side.split() for side in pattern.split("->"))
    assert "(" not in pattern
    for place in reversed(range(len(left))):
        if left[place] == "1":
            t = t.squeeze(place)
    names = [name for name in left if name != "1"]
    return t.permute([names.index(name) for name in right])


def repeat(t: torch.Tensor, pattern: str, *, g: int, n: int, r: int) -> torch.Tensor:
    """Stand in for einops if ranks share heads: repeat every group r times."""
    assert pattern == "l b (g n) -> l b (g r n)"
    assert t.size(-1) == g * n
    return t.unflatten(-1, (g, 1, n)).expand(*t.shape[:-1], g, r, n).flatten(-3)


def _places(padded: torch.Tensor, num_rows: int, size: int) -> torch.Tensor:
    """Return the packed places of the rows of rank 0, then of rank 1, ...; int64 [size * rows]."""
    starts, ends = padded[:-1].long(), padded[1:].long()
    rows = torch.arange(num_rows)
    document = torch.searchsorted(ends // size, rows, right=True).clamp(max=len(starts) - 1)
    within = rows - starts[document] // size
    half = (ends - starts)[document] // (2 * size)
    places = []
    for rank in range(size):
        from_front = starts[document] + rank * half + within
        from_back = ends[document] - (rank + 1) * half + (within - half)
        places.append(torch.where(within < half, from_front, from_back))
    return torch.cat(places)


def thd_get_partitioned_indices(
    offsets: torch.Tensor, num_rows: int, size: int, rank: int
) -> torch.Tensor:
    """Stand in for Transformer Engine: return the documents' rows on one of ``size`` ranks."""
    return _places(offsets, num_rows // size, size).chunk(size)[rank]


def _modules() -> dict[str, ModuleType]:
    """Return stand-ins for the modules that Megatron's mixer imports, by name."""
    triton = "mamba_ssm.ops.triton"
    contents: dict[str, dict[str, Any]] = {
        "einops": {"rearrange": rearrange, "repeat": repeat},
        "causal_conv1d": {"__version__": "1.5.0", "causal_conv1d_fn": _not_here},
        "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": _not_here},
        "mamba_ssm": {"__version__": "2.2.5", "__path__": []},
        "mamba_ssm.ops": {"__path__": []},
        triton: {"__path__": []},
        f"{triton}.layernorm_gated": {"RMSNorm": RMSNorm},
        f"{triton}.ssd_combined": {
            "mamba_split_conv1d_scan_combined": split_conv1d_scan,
            "mamba_chunk_scan_combined": _not_here,
        },
    }
    modules = {}
    for name, values in contents.items():
        modules[name] = ModuleType(name)
        modules[name].__dict__.update(values)
    return modules


def load_mixer() -> None:
    """Import Megatron's mixer with the stand-ins, and remove these from `sys.modules` again.

    A mixer that was imported without them, as by ``megatron.training``, is imported again.
    """
    imported = sys.modules.get(_MIXER)
    if getattr(imported, "mamba_split_conv1d_scan_combined", None) is split_conv1d_scan:
        return
    for name in (_MIXER, _SPLIT):
        sys.modules.pop(name, None)
    utils = importlib.import_module("megatron.core.utils")
    modules = _modules()
    if importlib.util.find_spec("einops") is not None:
        del modules["einops"]
    hidden = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        importlib.import_module(_MIXER)
        split: Any = importlib.import_module(_SPLIT)
        split.tex = SimpleNamespace(thd_get_partitioned_indices=thd_get_partitioned_indices)
        split.is_te_min_version = lambda *_: True
        utils.get_mamba_version()  # Megatron caches each version
        utils.get_causal_conv1d_version()
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(hidden)


def hybrid_stack_spec(spec: Any) -> Any:
    """Make the spec of a hybrid stack from the spec of a GPT layer.

    Attention and feed-forward become separate layers, each after its norm, as in Megatron's local
    layers. Mamba layers get plain linear layers. The rest is that of Megatron's stack for
    Transformer Engine.
    """
    names = HybridNames()
    layer, norm = spec.submodules, spec.submodules.input_layernorm
    experts = get_gpt_layer_local_spec(num_experts=4).submodules.mlp
    stack = names.transformer_engine_spec()
    mixer = stack.submodules.mamba_layer.submodules.mixer
    projections = replace(
        mixer.submodules,
        in_proj=ColumnParallelLinear,
        out_proj=RowParallelLinear,
    )
    kind = importlib.import_module("megatron.core.ssm.mamba_mixer").MambaMixer
    parts: dict[str, dict[str, Any]] = {
        "mamba_layer": {
            "norm": norm,
            "mixer": replace(mixer, module=kind, submodules=projections),
        },
        "attention_layer": {"input_layernorm": norm, "self_attention": layer.self_attention},
        "mlp_layer": {"pre_mlp_layernorm": layer.pre_mlp_layernorm, "mlp": layer.mlp},
        "moe_layer": {"pre_mlp_layernorm": layer.pre_mlp_layernorm, "mlp": experts},
    }
    layers = {name: getattr(stack.submodules, name) for name in parts}
    layers = {
        name: replace(one, submodules=replace(one.submodules, **parts[name]))
        for name, one in layers.items()
    }
    layers["attention_layer"].module = spec.module
    return replace(
        stack,
        module=_local_stack(names.stack, norm),
        submodules=replace(stack.submodules, **layers),
    )


def _local_stack(stack: Any, norm: Any) -> Any:
    """Return a subclass of ``stack`` whose final norm is ``norm``, not Transformer Engine's.

    Args:
        stack: The stack class of `HybridNames`.
        norm: Norm class; called with config, hidden_size and eps.
    """

    class LocalStack(stack):
        """Megatron's stack without Transformer Engine."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, post_layer_norm=False, **kwargs)
            self.post_layer_norm = True
            if self.post_process:
                size, eps = config.hidden_size, config.layernorm_epsilon
                self.final_norm = norm(config=config, hidden_size=size, eps=eps)

    return LocalStack


def _stack(make: Callable[[], Any]) -> Any:
    load_mixer()
    return hybrid_stack_spec(make())


def local() -> Any:
    """Return a stack of Megatron's local layers: Mamba, attention, feed-forward and experts."""
    return _stack(get_gpt_layer_local_spec)


def packed() -> Any:
    """Return such a stack with attention of packed sequences."""
    return _stack(user_specs.packed)


def packed_split() -> Any:
    """Return such a stack with attention of documents that context-parallel ranks share."""
    return _stack(context_specs.split)
