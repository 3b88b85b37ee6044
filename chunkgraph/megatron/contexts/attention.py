"""Layers whose context-parallel group is that of each microbatch.

Where documents are cut over ranks, both halves of attention have to know the group. The core takes
it from ``packed_seq_params`` (Transformer Engine's does, in Megatron's wrapper). The rotary
embedding of packed sequences takes that of the model, ``pg_collection.cp``, whatever the
parameters say; so it is told here, before every call. So are routers, which count the tokens of
each expert over the ranks of a microbatch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron import compat
from chunkgraph.megatron.packed import ARGUMENT

__all__ = ["follow_groups", "refuse_without_groups"]

_GROUPS = "pg_collection"
_MARK = "_chunkgraph_follows_groups"


def follow_groups(model_chunks: Iterable[nn.Module]) -> Callable[[], None]:
    """Make rotary embeddings and routers use the group of each microbatch's ``packed_seq_params``.

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
            if _is_attention(module):
                _follow(module, undo)
            router = getattr(getattr(module, "mlp", None), "router", None)
            if router is not None:
                _follow_with_router(module, router, undo)
    return undo.close


def refuse_without_groups(model_chunks: Iterable[nn.Module]) -> None:
    """Stop if `follow_groups` was not called for all of a model.

    Raises:
        ConfigError: naming the first attention that would embed positions by another group.
    """
    for number, chunk in enumerate(model_chunks):
        for name, module in chunk.named_modules():
            if _is_attention(module) and not any(
                getattr(hook, _MARK, False) for hook in module._forward_pre_hooks.values()
            ):
                raise ConfigError(
                    f"attach(contexts=...): {name} of model chunk {number} would embed the "
                    "positions of every microbatch as with the model's own context-parallel group. "
                    "Call chunkgraph.megatron.contexts.follow_groups(model_chunks) before, and "
                    "after detach() what it returned."
                )


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, _GROUPS) and hasattr(module, "core_attention")


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

    setattr(hook, _MARK, True)
    if compat.is_latent_attention(attention):
        undo.callback(compat.let_latent_attention_turn(attention))
    undo.callback(setattr, attention, _GROUPS, own)
    undo.callback(attention.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _follow_with_router(layer: nn.Module, router: Any, undo: ExitStack) -> None:
    """A router is not given the parameters; its layer is."""
    turn, end = compat.follow_in_router(router)

    def hook(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        turn(getattr(kwargs.get(ARGUMENT), "cp_group", None))

    undo.callback(end)
    undo.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
