"""Hybrid stacks without Transformer Engine, for a CPU."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from chunkgraph.megatron.core.model_kinds import HybridNames


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
