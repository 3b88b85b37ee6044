"""What attention of a microbatch's own context-parallel group wants besides the group."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch

from chunkgraph.megatron.core.access import import_megatron

__all__ = ["is_latent_attention", "let_latent_attention_turn", "make_attention_stream"]


def make_attention_stream() -> None:
    """Make what Megatron makes for models with a static context-parallel size alone.

    Its attention gives the stream to Transformer Engine together with a microbatch's group. Once
    made it stays, as Megatron's own does.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    extension = import_megatron("megatron.core.extensions.transformer_engine")
    attention: Any = getattr(extension, "TEDotProductAttention", None)
    if attention is not None and getattr(attention, "cp_stream", None) is None:
        attention.cp_stream = torch.cuda.Stream()


def is_latent_attention(module: Any) -> bool:
    """Whether it compresses keys and values, and embeds positions by itself."""
    return hasattr(module, "get_query_key_value_tensors") and hasattr(module, "kv_layernorm")


def let_latent_attention_turn(attention: Any) -> Callable[[], None]:
    """Let multi-latent attention take microbatches with a context-parallel group of their own.

    Megatron's refuses them by an assertion, and without a static context-parallel size it takes the
    first rows of the table of positions for all that its rank may hold. The group is that of
    ``attention.pg_collection``.

    Returns:
        What ends it.
    """
    get = attention.get_query_key_value_tensors
    signature = inspect.signature(get)
    config = attention.config
    with_size: dict[int, Any] = {}

    def get_tensors(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        params = given.arguments.get("packed_seq_params")
        if params is None or params.local_cp_size is None:
            return get(*args, **kwargs)
        given.arguments["packed_seq_params"] = made = copy.copy(params)
        made.local_cp_size = None
        size = attention.pg_collection.cp.size()
        if size not in with_size:
            with_size[size] = copy.copy(config)
            with_size[size].context_parallel_size = size
        attention.config = with_size[size]
        try:
            return get(*given.args, **given.kwargs)
        finally:
            attention.config = config

    attention.get_query_key_value_tensors = get_tensors

    def undo() -> None:
        del attention.get_query_key_value_tensors

    return undo
