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

__all__ = ["expert_linears", "experts_on_device", "rebuilt_fused_operations"]

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
    with ExitStack() as stack:
        stack.callback(
            patch_attributes(sequential, {"forward": _sequential(sequential.forward, measure)})
        )
        stack.callback(patch_attributes(grouped, {"forward": _grouped(grouped.forward, measure)}))
        # From the class's dict: attribute access would unwrap the static method.
        original = vars(grouped)["_apply_bias"]
        grouped._apply_bias = staticmethod(_apply_bias(grouped._apply_bias))
        stack.callback(setattr, grouped, "_apply_bias", original)
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
    originals = [
        (module, name, vars(module)[name])
        for module in dict.fromkeys(modules)
        for name in ("_fused_ops", "_fused_impl")
        if isinstance(vars(module).get(name), (tuple, type(None))) and name in vars(module)
    ]
    for module, name, _ in originals:
        setattr(module, name, None)
    try:
        yield
    finally:
        for module, name, operations in originals:
            setattr(module, name, operations)


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


def _sequential(eager: Callable[..., Any], measure: Callable[[int], None]) -> Callable[..., Any]:
    """Return ``forward`` for experts that Megatron runs one by one: the first runs for all."""

    def forward(
        self: Any, hidden: torch.Tensor, tokens_per_expert: Any, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        if not isinstance(tokens_per_expert, DeviceSplits):
            result: tuple[torch.Tensor, None] = eager(self, hidden, tokens_per_expert, probs)
            return result
        measure(hidden.shape[0])
        splits, experts = tokens_per_expert, list(self.local_experts)
        gemm = _gemm(experts[0].linear_fc1.weight)
        if self.config.moe_apply_probs_on_input:
            hidden = (probs.unsqueeze(-1) * hidden).to(hidden.dtype)
            probs = torch.ones_like(probs)

        def linear(name: str) -> _Linear:
            layers = [getattr(expert, name) for expert in experts]
            weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
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

        first = experts[0]
        with ExitStack() as undo:
            for name in ("linear_fc1", "linear_fc2"):
                layer = getattr(first, name)
                undo.callback(patch_attributes(layer, {"forward": linear(name)}))
            output, _ = first(hidden, probs)
        return output, None

    return forward


def _grouped(eager: Callable[..., Any], measure: Callable[[int], None]) -> Callable[..., Any]:
    """Return ``forward`` for experts that Transformer Engine multiplies together."""

    def forward(self: Any, hidden: torch.Tensor, tokens_per_expert: Any, *args: Any) -> Any:
        if not isinstance(tokens_per_expert, DeviceSplits):
            return eager(self, hidden, tokens_per_expert, *args)
        measure(hidden.shape[0])

        def linear(layer: Any) -> _Linear:
            weights = _weights(layer, "weight")
            biases = _weights(layer, "bias") if layer.use_bias else None
            gemm = _gemm(weights[0])
            _returns_grads(layer.parameters(recurse=False))

            def multiply(rows: torch.Tensor, splits: DeviceSplits) -> tuple[torch.Tensor, Any]:
                if self.config.fp8:
                    out, has_bias = _multiply_quantized(layer, rows, splits)
                else:
                    out, has_bias = grouped_linear(gemm, rows, splits, weights), biases is not None
                if biases is None or not has_bias:
                    return out, None
                bias = add_biases(gemm, rows.shape[0], splits, biases)
                # The second product leaves its bias to `_apply_bias`.
                return (out, bias) if layer is self.linear_fc2 else (out + bias, None)

            return multiply

        with ExitStack() as undo:
            for layer in (self.linear_fc1, self.linear_fc2):
                undo.callback(patch_attributes(layer, {"forward": linear(layer)}))
            if hasattr(self, _FUSED):  # call the linear layers, which it would fuse
                undo.callback(patch_attributes(self, {_FUSED: False}))
            _pad_on_device(self, undo)
            return eager(self, hidden, tokens_per_expert, *args)

    return forward


def _multiply_quantized(
    layer: Any, rows: torch.Tensor, splits: DeviceSplits
) -> tuple[torch.Tensor, bool]:
    """Return the product of Transformer Engine's layer, and whether it leaves a bias to add."""
    undo = patch_attributes(layer, {"use_grouped_tensor": True})
    try:
        out, bias = type(layer).forward(layer, rows, splits.counts)
    finally:
        undo()
    return out, bias is not None


def _pad_on_device(experts: Any, undo: ExitStack) -> None:
    """Pad the rows of quantized experts on the device."""
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
