"""Run Megatron's experts on rows whose numbers only the device knows.

The forward is Megatron's, with its activations, probabilities and recomputation; its two products
run on all rows at once (`grouped_gemm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from chunkgraph.megatron.core.access import patch_attributes, private_names
from chunkgraph.megatron.core.model_kinds import fp8_recipe
from chunkgraph.megatron.features.experts.dropless_rows import DeviceSplits, Shuffle, padded_rows
from chunkgraph.megatron.features.experts.grouped_gemm import (
    FP8_MULTIPLES,
    GroupedGemm,
    add_biases,
    choose_gemm,
    grouped_linear,
)

_EXPERTS = "megatron.core.transformer.moe.experts"
_FUSED = "_with_fused_impl"
_Linear = Callable[..., tuple[torch.Tensor, Any]]


@contextmanager
def experts_on_device(measure: Callable[[int], None] = lambda _: None) -> Iterator[None]:
    """Let experts accept `DeviceSplits`; calls with other splits are unchanged.

    Args:
        measure: Callback with the number of rows, used or not, of each call with `DeviceSplits`.
    """
    sequential, grouped = private_names(_EXPERTS, "SequentialMLP", "TEGroupedMLP")
    apply_bias = staticmethod(_apply_bias(grouped._apply_bias))
    with ExitStack() as stack:
        for kind, replace_products in ((sequential, _sequential), (grouped, _grouped)):
            forward = _forward(kind.forward, replace_products, measure)
            stack.callback(patch_attributes(kind, {"forward": forward}))
        stack.callback(patch_attributes(grouped, {"_apply_bias": apply_bias}))
        yield


@contextmanager
def rebuilt_fused_operations(modules: Iterable[Any]) -> Iterator[None]:
    """Make layers rebuild Transformer Engine's fused operations for a capture; restore them later.

    Megatron's layers build them in their first forward. The operations keep separate lists of
    parameters, outside of the layer's modules. A capture, which replaces parameters by stand-ins,
    would otherwise still reach the parameters themselves.

    Args:
        modules: Modules, including the layers.
    """
    with ExitStack() as undo:
        for module in modules:
            for name in ("_fused_ops", "_fused_impl"):
                if isinstance(vars(module).get(name, ""), (tuple, type(None))):
                    undo.callback(patch_attributes(module, {name: None}))
        yield


def expert_linears(experts: Any) -> list[list[torch.nn.Parameter]]:
    """Return the weights of both products of Megatron's ``experts``, by local expert."""
    if hasattr(experts, "local_experts"):
        return [
            [getattr(expert, name).weight for expert in experts.local_experts]
            for name in ("linear_fc1", "linear_fc2")
        ]
    return [_weights(linear, "weight") for linear in (experts.linear_fc1, experts.linear_fc2)]


def _gemm(weight: torch.Tensor) -> GroupedGemm:
    gemm, _ = choose_gemm(weight.device, weight.dtype)
    assert gemm is not None  # the feature checked it
    return gemm


def _forward(
    eager: Callable[..., Any],
    replace_products: Callable[..., None],
    measure: Callable[[int], None],
) -> Callable[..., Any]:
    """Return Megatron's ``forward`` of experts, with other products for `DeviceSplits`."""

    def forward(self: Any, hidden: torch.Tensor, tokens_per_expert: Any, *args: Any) -> Any:
        if not isinstance(tokens_per_expert, DeviceSplits):
            return eager(self, hidden, tokens_per_expert, *args)
        measure(hidden.shape[0])
        with ExitStack() as undo:
            replace_products(self, tokens_per_expert, *args, undo=undo)
            return eager(self, hidden, tokens_per_expert, *args)

    return forward


def _sequential(experts: Any, splits: DeviceSplits, probs: torch.Tensor, undo: ExitStack) -> None:
    """Let the first of the experts that Megatron runs one by one run for all."""
    if experts.config.moe_apply_probs_on_input:
        probs = torch.ones_like(probs)

    def linear(name: str) -> _Linear:
        layers = [getattr(expert, name) for expert in experts.local_experts]
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        gemm = _gemm(weights[0])
        _returns_grads(weights)

        def multiply(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            out = grouped_linear(gemm, rows, splits, weights)
            if biases[0] is None:
                return out, None
            bias = add_biases(gemm, rows.shape[0], splits, biases)
            if name == "linear_fc1":
                return out, bias
            out += bias * probs.unsqueeze(-1)
            return out, None

        return multiply

    for name in ("linear_fc1", "linear_fc2"):
        layer = getattr(experts.local_experts[0], name)
        undo.callback(patch_attributes(layer, {"forward": linear(name)}))
    undo.callback(patch_attributes(experts, {"num_local_experts": 1}))


def _grouped(experts: Any, _splits: DeviceSplits, *_: Any, undo: ExitStack) -> None:
    """Replace the products that Transformer Engine computes for all experts together."""

    def linear(layer: Any) -> _Linear:
        weights = _weights(layer, "weight")
        biases = _weights(layer, "bias") if layer.use_bias else None
        gemm = _gemm(weights[0])
        _returns_grads(layer.parameters(recurse=False))

        def multiply(rows: torch.Tensor, splits: DeviceSplits) -> tuple[torch.Tensor, Any]:
            if experts.config.fp8:
                out, bias = type(layer).forward(layer, rows, splits.counts)
                if bias is None:
                    return out, None
            else:
                out = grouped_linear(gemm, rows, splits, weights)
            if biases is None:
                return out, None
            bias = add_biases(gemm, rows.shape[0], splits, biases)
            # The second product leaves its bias to `_apply_bias`.
            return (out, bias) if layer is experts.linear_fc2 else (out + bias, None)

        return multiply

    for layer in (experts.linear_fc1, experts.linear_fc2):
        undo.callback(patch_attributes(layer, {"forward": linear(layer)}))
    if hasattr(experts, _FUSED):  # call the linear layers, which it would fuse
        undo.callback(patch_attributes(experts, {_FUSED: False}))
    _quantize_on_device(experts, undo)


def _quantize_on_device(experts: Any, undo: ExitStack) -> None:
    """Let quantized experts pad rows, and Transformer Engine multiply, by counts on the device."""
    recipe = fp8_recipe(experts.config)
    padding: tuple[Shuffle, DeviceSplits] | None = None
    if recipe is None:
        return

    def pad(rows: torch.Tensor, splits: DeviceSplits) -> tuple[torch.Tensor, DeviceSplits]:
        nonlocal padding
        if padding is None:  # the probabilities come after the rows
            padding = padded_rows(splits, rows.shape[0], FP8_MULTIPLES[recipe])
        shuffle, padded = padding
        return shuffle.move(rows), padded

    def unpad(rows: torch.Tensor, _splits: DeviceSplits) -> torch.Tensor:
        assert padding is not None
        return padding[0].move_back(rows)

    for layer in (experts.linear_fc1, experts.linear_fc2):
        undo.callback(patch_attributes(layer, {"use_grouped_tensor": True}))
    undo.callback(patch_attributes(experts.quantization_padding, {"forward": pad}))
    undo.callback(patch_attributes(experts.quantization_unpadding, {"forward": unpad}))


def _apply_bias(eager: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def apply(rows: torch.Tensor, bias: Any, splits: Any, probs: torch.Tensor) -> torch.Tensor:
        if bias is None or not isinstance(splits, DeviceSplits):
            return eager(rows, bias, splits, probs)
        return (rows + bias * probs).to(rows.dtype)

    return apply


def _returns_grads(parameters: Iterable[Any]) -> None:
    """Mark parameters as having gradients from autograd.

    Megatron's layers set a mark on a parameter if they add its gradient to ``main_grad`` directly.
    """
    for parameter in parameters:
        if getattr(parameter, "grad_added_to_main_grad", False):
            parameter.grad_added_to_main_grad = False


def _weights(layer: Any, name: str) -> list[Any]:
    """Return the parameters of a grouped layer by expert, split from one tensor if necessary."""
    whole = getattr(layer, name, None)
    if isinstance(whole, torch.Tensor):
        return list(whole.unbind(0))
    return [getattr(layer, f"{name}{index}") for index in range(layer.num_gemms)]
