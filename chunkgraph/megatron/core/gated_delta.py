"""Give Megatron's deterministic gated delta rule its first state on the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from chunkgraph.megatron.core.access import patch_attributes

__all__ = ["states_on_device"]

_RULE = "torch_chunk_gated_delta_rule"
_LAYER_RULE = "gated_delta_rule"


@contextmanager
def states_on_device(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make the gated delta rule of ``modules`` copy nothing from the host.

    Without an initial state, the rule makes zeros on the host and copies them to the GPU, which a
    capture cannot hold. Here it gets the zeros as its initial state.
    """
    layers = [m for m in modules if hasattr(sys.modules[type(m).__module__], _RULE)]
    with ExitStack() as stack:
        for name in {type(layer).__module__ for layer in layers}:
            source = sys.modules[name]
            eager = getattr(source, _RULE)
            patched = _with_state(eager)
            # Later releases look the rule up once per layer, earlier ones in every call.
            stack.callback(patch_attributes(source, {_RULE: patched}))
            for layer in layers:
                if getattr(layer, _LAYER_RULE, None) is eager:
                    stack.callback(patch_attributes(layer, {_LAYER_RULE: patched}))
        yield


def _with_state(eager: Callable[..., Any]) -> Callable[..., Any]:
    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        initial_state: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the rule on tensors [batch, sequence, heads, width]."""
        if initial_state is None:
            batch, _, heads, width = key.shape
            shape = (batch, heads, width, value.shape[-1])
            initial_state = torch.zeros(shape, device=value.device)
        return eager(query, key, value, *args, initial_state=initial_state, **kwargs)

    return rule
