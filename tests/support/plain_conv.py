"""The causal convolution of a Mamba mixer in plain operators, on any device.

It has the functions of causal-conv1d that mamba-ssm calls, for machines without the package's
extension.
"""

from __future__ import annotations

import torch
from torch.nn import functional


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


def causal_conv1d_fwd_function(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: None,
    final_states_out: None,
    silu_activation: bool,
) -> torch.Tensor:
    """Convolve [b, channels, l], in memory [b, l, channels]."""
    assert silu_activation
    assert initial_states is None
    assert final_states_out is None
    rows = x.transpose(1, 2).float()
    out = convolved(rows, weight.float(), bias.float(), seq_idx)
    return out.to(x.dtype).contiguous().transpose(1, 2)


def causal_conv1d_bwd_function(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: None,
    dfinal_states: None,
    dx: torch.Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x (in ``dx``), weight and bias, and None for initial states."""
    assert silu_activation
    assert initial_states is None
    assert dfinal_states is None
    assert not return_dinitial_states
    with torch.enable_grad():
        inputs = [t.detach().float().requires_grad_() for t in (x.transpose(1, 2), weight, bias)]
        out = convolved(*inputs, seq_idx)
    of_x, of_weight, of_bias = torch.autograd.grad(out, inputs, dout.transpose(1, 2).float())
    of_x = of_x.to(x.dtype).transpose(1, 2)
    if dx is not None:
        dx.copy_(of_x)
        of_x = dx
    return of_x, of_weight.to(weight.dtype), of_bias.to(bias.dtype), None


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    seq_idx: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """Convolve [b, channels, l], for Megatron's path that saves everything."""
    assert activation == "silu"
    return convolved(x.transpose(1, 2), weight, bias, seq_idx).transpose(1, 2)
