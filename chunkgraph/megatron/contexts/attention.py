"""Attention whose context-parallel group is that of each microbatch.

Where documents are cut over ranks, both halves of attention have to know the group. The core takes
it from ``packed_seq_params`` (Transformer Engine's does, in Megatron's wrapper). The rotary
embedding of packed sequences takes that of the model, ``pg_collection.cp``, whatever the
parameters say; so it is told here, before every call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

from chunkgraph.megatron import compat
from chunkgraph.megatron.packed import ARGUMENT

__all__ = ["follow_groups"]

_GROUPS = "pg_collection"


def follow_groups(model_chunks: Iterable[nn.Module]) -> Callable[[], None]:
    """Make rotary embeddings use the group of each microbatch's ``packed_seq_params``.

    For eager steps and captures alike; what a call is given decides, so that a recomputation in the
    backward has the group of its own microbatch. Where the parameters name no group, the model's
    is used.

    Args:
        model_chunks: as the schedule gets them.

    Returns:
        What puts everything back.
    """
    undo = ExitStack()
    for chunk in model_chunks:
        if any(parameter.is_cuda for parameter in chunk.parameters()):
            compat.make_attention_stream()
        for module in chunk.modules():
            if hasattr(module, _GROUPS) and hasattr(module, "core_attention"):
                _follow(module, undo)
    return undo.close


def _follow(attention: Any, undo: ExitStack) -> None:
    own = attention.pg_collection
    made: dict[int, Any] = {}  # by the group's identity, which they hold

    def hook(module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        group = getattr(kwargs.get(ARGUMENT), "cp_group", None)
        if group is None:
            module.pg_collection = own
            return
        if id(group) not in made:
            made[id(group)] = copy.copy(own)
            made[id(group)].cp = group
        module.pg_collection = made[id(group)]

    undo.callback(setattr, attention, _GROUPS, own)
    undo.callback(attention.register_forward_pre_hook(hook, with_kwargs=True).remove)
