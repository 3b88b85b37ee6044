"""Weight gradients of Megatron's own linear layers, added to ``main_grad`` in their GEMM.

Megatron does so by default (``gradient_accumulation_fusion``), with an extension of APEX that no
package registry has. Transformer Engine's GEMM does the same work, as in its own layers.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from chunkgraph.megatron.core.access import import_megatron, patch_attributes


def fuse_gradients() -> Callable[[], None]:
    """Give Megatron's own linear layers Transformer Engine's GEMM; return the undo function.

    Call it before the model is built. With APEX's extension, or without Transformer Engine, nothing
    changes.
    """
    layers = import_megatron("megatron.core.tensor_parallel.layers")
    if layers._grad_accum_fusion_available or (add := _gemm()) is None:
        return lambda: None
    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    replacements = {"fused_weight_gradient_mlp_cuda": kernels, "_grad_accum_fusion_available": True}
    return patch_attributes(layers, replacements)


def _gemm() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any] | None:
    """Return a function that adds a product to its last argument; None if there is none.

    It takes inputs (tokens, in), gradients of outputs (tokens, out) and the sum (out, in).
    """
    try:
        general_gemm: Any = importlib.import_module(
            "transformer_engine.pytorch.cpp_extensions"
        ).general_gemm
    except (ImportError, AttributeError):
        return None
    needs_workspace = "workspace" in inspect.signature(general_gemm).parameters

    def gemm(inputs: torch.Tensor, grad_outputs: torch.Tensor, total: torch.Tensor) -> None:
        base = importlib.import_module("transformer_engine.pytorch.module.base")
        more = {"workspace": base.get_workspace()} if needs_workspace else {}
        general_gemm(
            inputs,
            grad_outputs,
            out_dtype=total.dtype,
            accumulate=True,
            layout="NT",
            out=total,
            grad=True,
            **more,
        )

    return gemm
