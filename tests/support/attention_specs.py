"""Layer specs of other attention, named in configurations as ``attention_specs:function``."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm import gated_delta_net
from megatron.core.transformer.spec_utils import ModuleSpec


def normalized() -> Any:
    """Return the local spec with norms of queries and keys."""
    return get_gpt_layer_local_spec(qk_layernorm=True)


def gated_delta() -> Any:
    """Return the local spec with Megatron's gated delta net and a stand-in for its package."""
    source: Any = gated_delta_net
    if not hasattr(source, "torch_chunk_gated_delta_rule") or hasattr(source, "__path__"):
        source = importlib.import_module("megatron.core.ssm.gated_delta_net.common")
    source.HAVE_FLA, source.l2norm = True, _l2norm
    backend = LocalSpecProvider()
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention = ModuleSpec(
        module=gated_delta_net.GatedDeltaNet,
        submodules=gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_linear(),
            out_norm=backend.layer_norm(rms_norm=True),
            out_proj=backend.row_parallel_linear(),
        ),
    )
    return spec


def _l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim, keepdim=True) + eps)
