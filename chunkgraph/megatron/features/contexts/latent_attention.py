"""Adapters of attention for a context-parallel group that changes with the microbatch."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch

from chunkgraph.megatron.core.access import import_megatron

__all__ = ["is_latent_attention", "make_attention_stream", "use_groups_in_latent_attention"]


def make_attention_stream() -> None:
    """Create the stream of context-parallel attention, if there is none.

    Megatron creates it only for a static context-parallel size above 1, and passes it to
    Transformer Engine together with a microbatch's group. It stays for the life of the process, as
    Megatron's does.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    extension = import_megatron("megatron.core.extensions.transformer_engine")
    attention: Any = getattr(extension, "TEDotProductAttention", None)
    if attention is not None and getattr(attention, "cp_stream", None) is None:
        attention.cp_stream = torch.cuda.Stream()


def is_latent_attention(module: Any) -> bool:
    """Return whether a module is multi-latent attention, which embeds positions by itself."""
    return hasattr(module, "get_query_key_value_tensors") and hasattr(module, "kv_layernorm")


def use_groups_in_latent_attention(attention: Any) -> Callable[[], None]:
    """Make multi-latent attention accept microbatches with their own context-parallel group.

    Megatron refuses them by an assertion, and without a static context-parallel size it takes the
    first rows of the table of positions, whichever rows the rank holds. The group is
    ``attention.pg_collection.cp`` at each call.

    Returns:
        A function that undoes it.
    """
    get = attention.get_query_key_value_tensors
    signature = inspect.signature(get)
    config = attention.config
    configs: dict[int, Any] = {}  # by context-parallel size

    def get_tensors(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        params = call.arguments.get("packed_seq_params")
        if params is None or params.local_cp_size is None:
            return get(*args, **kwargs)
        call.arguments["packed_seq_params"] = params_without_size = copy.copy(params)
        params_without_size.local_cp_size = None
        size = attention.pg_collection.cp.size()
        if size not in configs:
            configs[size] = copy.copy(config)
            configs[size].context_parallel_size = size
        attention.config = configs[size]
        try:
            return get(*call.args, **call.kwargs)
        finally:
            attention.config = config

    attention.get_query_key_value_tensors = get_tensors

    def undo() -> None:
        del attention.get_query_key_value_tensors

    return undo
