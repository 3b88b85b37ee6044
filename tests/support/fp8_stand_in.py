"""FP8 without a GPU: layers and process-wide state shaped like Transformer Engine's.

Rounded numbers stand for FP8. As in Transformer Engine, a layer keeps its quantized weight. An
attribute decides whether to renew it; in a capture a flag on the device does. Scales come from the
tensor (any recipe except ``delayed``) or from the history of the largest magnitudes, which becomes
new scales at the end of a chunk's forward and of its backward. The layer specs are
``fp8_stand_in:quantized`` and, for packed sequences, ``quantized_packed``. They put this module
where chunkgraph expects the real one.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

MODULE = "transformer_engine.pytorch.fp8"
_STEPS = 64.0


class FP8GlobalStateManager:
    """The process-wide state."""

    quantization_state: Any = None

    @classmethod
    def reset(cls) -> None:
        """Reset the state to that at the start of the process."""
        cls.quantization_state = SimpleNamespace(
            skip_fp8_weight_update_tensor=None,
            global_amax_history_buffer={},
            global_scale_buffer={},
        )

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Turn the histories of all layers into scales, and move the histories on."""
        key, state = "forward" if forward else "backward", cls.quantization_state
        histories = state.global_amax_history_buffer.get(key, [])
        for history, scale in zip(histories, state.global_scale_buffer.get(key, []), strict=True):
            amax = history.max(dim=0).values
            scale.copy_(torch.where(amax > 0, 4.0 / amax, scale))
            history.copy_(history.roll(-1, 0))
            history[0].zero_()


FP8GlobalStateManager.reset()


def _rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * scale * _STEPS).round() / (scale * _STEPS)


class QuantizedColumn(ColumnParallelLinear):
    """A linear layer with a cached quantized weight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_first_microbatch = True
        self.delayed = str(getattr(self.config.fp8_recipe, "value", None)) == "delayed" or (
            self.config.fp8_recipe == "delayed"
        )
        self._fp8_workspaces: dict[str, torch.Tensor] = {}
        self.scales: dict[str, torch.Tensor] = {}
        self.histories: dict[str, torch.Tensor] = {}

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the product of the rounded input and the cached weight."""
        if self.delayed and not self.scales:
            self._register()
        weight = _Weight.apply(self.weight, self)
        self.is_first_microbatch = False
        return super().forward(_Rounding.apply(input_, self), weight, **kwargs)

    def _register(self) -> None:
        state = FP8GlobalStateManager.quantization_state
        for key, size in (("forward", 2), ("backward", 1)):
            self.scales[key], self.histories[key] = torch.ones(size), torch.zeros(3, size)
            state.global_scale_buffer.setdefault(key, []).append(self.scales[key])
            state.global_amax_history_buffer.setdefault(key, []).append(self.histories[key])

    def quantize(
        self, x: torch.Tensor, key: str, place: int, keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Round ``x``; record its largest magnitude unless ``keep``."""
        amax = x.abs().max()
        if not self.delayed:
            return _rounded(x, 4.0 / (amax + 1e-6))
        seen = self.histories[key][0, place]
        noted = torch.maximum(seen, amax)
        seen.copy_(noted if keep is None else torch.where(keep, seen, noted))
        return _rounded(x, self.scales[key][place])


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, layer: QuantizedColumn) -> torch.Tensor:
        flag = FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor
        in_graph = bool(_get_current_dispatch_mode_stack())
        cache = layer._fp8_workspaces.get("weight")
        if cache is None:
            cache = layer.quantize(weight.detach(), "forward", 1)
            layer._fp8_workspaces["weight"] = cache
        elif in_graph and flag is not None:
            keep = flag[0] != 0
            fresh = layer.quantize(weight.detach(), "forward", 1, keep)
            # Custom kernels: autograd counts no write.
            cache.data.copy_(torch.where(keep, cache, fresh))
        elif layer.is_first_microbatch:
            cache.data.copy_(layer.quantize(weight.detach(), "forward", 1))
        return cache.data

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: QuantizedColumn) -> torch.Tensor:
        ctx.layer = layer
        return layer.quantize(x, "forward", 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.layer.quantize(grad, "backward", 0), None


class _EndsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if not is_graph_capturing():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return grad


class QuantizedLayer(TransformerLayer):
    """Updates scales at the end of the block's autocast and of its backward."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output."""
        chunks = self.config.virtual_pipeline_model_parallel_size or 1
        stages = self.config.pipeline_model_parallel_size * chunks
        num_layers = self.config.num_layers // stages
        if (self.layer_number - 1) % num_layers == 0:
            hidden_states = _EndsBackward.apply(hidden_states)
        result = super().forward(hidden_states, *args, **kwargs)
        if self.layer_number % num_layers == 0 and torch.is_grad_enabled():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
        return result


def quantized() -> Any:
    """Return the local spec with quantized layers."""
    sys.modules[MODULE] = sys.modules[__name__]
    FP8GlobalStateManager.reset()
    spec = get_gpt_layer_local_spec()
    spec.module = QuantizedLayer
    spec.submodules.self_attention.submodules.linear_qkv = QuantizedColumn
    mlp = spec.submodules.mlp
    submodules = getattr(mlp, "submodules", None)
    if submodules is None:  # a function with its arguments, from 0.18 on
        submodules = mlp.keywords["submodules"]
    submodules.linear_fc1 = QuantizedColumn
    return spec


def quantized_packed() -> Any:
    """Return `quantized` with attention of packed sequences."""
    from user_specs import PackedCore

    spec = quantized()
    spec.submodules.self_attention.submodules.core_attention = PackedCore
    return spec
