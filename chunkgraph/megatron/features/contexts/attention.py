"""Layers whose context-parallel group is that of each microbatch.

Where documents are cut over ranks, both halves of attention have to know the group. The core takes
it from ``packed_seq_params`` (Transformer Engine's does, in Megatron's wrapper). The rotary
embedding of packed sequences takes that of the model, ``pg_collection.cp``, whatever the
parameters say; so it is told here, before every call. So are routers, which count the tokens of
each expert over the ranks of a microbatch, and with tensor parallelism over those that share its
rows besides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.features.contexts.groups import ContextGroups
from chunkgraph.megatron.features.contexts.latent_attention import (
    is_latent_attention,
    let_latent_attention_turn,
    make_attention_stream,
)
from chunkgraph.megatron.features.contexts.routing import follow_in_router
from chunkgraph.megatron.features.packing.params import ARGUMENT

__all__ = ["follow_groups", "refuse_without_groups"]

_GROUPS = "pg_collection"
_MARK = "_chunkgraph_follows_groups"
_OF_ROUTERS = "_chunkgraph_groups_of_routers"


def follow_groups(
    model_chunks: Iterable[nn.Module], groups: ContextGroups | None = None
) -> Callable[[], None]:
    """Make rotary embeddings and routers use the group of each microbatch's ``packed_seq_params``.

    For eager steps and captures alike; what a call is given decides, so that a recomputation in the
    backward has the group of its own microbatch. Where the parameters name no group, the model's
    is used.

    Args:
        model_chunks: as the schedule gets them.
        groups: of the microbatches, made with ``has_experts=True``. Only models with experts on
            several tensor-parallel ranks need them.

    Returns:
        What puts everything back.

    Raises:
        ConfigError: a router needs ``groups``.
    """
    model_chunks = list(model_chunks)
    has_groups = groups is not None and groups.for_routers is not None
    layers = _layers_of_routers(model_chunks)
    named = [f"{name} of model chunk {n}" for n, name, layer in layers if _shares_rows(layer)]
    # Also by what all ranks know: a pipeline stage may have no experts.
    if not has_groups and (named or any(_wants_groups(chunk) for chunk in model_chunks)):
        raise ConfigError(
            f"{named[0] if named else 'The model'} has experts on several tensor-parallel ranks, "
            "over which routers have to count tokens too. Give follow_groups(model_chunks, groups) "
            "the groups of the microbatches, made with "
            "ContextGroups.of_data_parallel(sizes, has_experts=True)."
        )
    undo = ExitStack()
    for chunk in model_chunks:
        if any(parameter.is_cuda for parameter in chunk.parameters()):
            make_attention_stream()
        for module in chunk.modules():
            if _is_attention(module):
                _follow(module, undo)
    for _, _, layer in _layers_of_routers(model_chunks):
        _follow_with_router(layer, groups if _shares_rows(layer) else None, undo)
    return undo.close


def refuse_without_groups(model_chunks: Iterable[nn.Module], groups: ContextGroups) -> None:
    """Stop if `follow_groups` was not called for all of a model.

    Args:
        model_chunks: as `follow_groups` got them.
        groups: of the banks.

    Raises:
        ConfigError: naming the first attention that would embed positions by another group, or the
            first layer whose router would count tokens over others than the banks'.
    """
    model_chunks = list(model_chunks)
    for number, chunk in enumerate(model_chunks):
        for name, module in chunk.named_modules():
            if _is_attention(module) and not any(
                getattr(hook, _MARK, False) for hook in module._forward_pre_hooks.values()
            ):
                raise ConfigError(
                    "attach(packing=PackedBanks.of_limits(...)): "
                    f"{name} of model chunk {number} would embed the "
                    "positions of every microbatch as with the model's own context-parallel group. "
                    "Call chunkgraph.megatron.features.contexts.follow_groups(model_chunks) "
                    "before, and after detach() what it returned."
                )
    for number, name, layer in _layers_of_routers(model_chunks):
        if _shares_rows(layer) and not any(
            getattr(hook, _OF_ROUTERS, None) is groups for hook in layer._forward_pre_hooks.values()
        ):
            raise ConfigError(
                "attach(packing=PackedBanks.of_limits(...)): "
                f"the router of {name} of model chunk {number} would count "
                "tokens over other groups than those of the banks. Call "
                "follow_groups(model_chunks, groups) with the groups of these banks."
            )


def _layers_of_routers(model_chunks: Iterable[nn.Module]) -> Iterator[tuple[int, str, Any]]:
    """Layers with experts: the chunk's number, the name in it, the layer."""
    for number, chunk in enumerate(model_chunks):
        for name, module in chunk.named_modules():
            if getattr(getattr(module, "mlp", None), "router", None) is not None:
                yield number, name, module


def _wants_groups(chunk: nn.Module) -> bool:
    """Whether routers of the whole model, whichever rank has them, share out their rows."""
    configs = (getattr(module, "config", None) for module in chunk.modules())
    config = next((found for found in configs if hasattr(found, "num_moe_experts")), None)
    return bool(
        config is not None
        and config.num_moe_experts
        and (getattr(config, "tensor_model_parallel_size", 1) or 1) > 1
    )


def _shares_rows(layer: Any) -> bool:
    """Whether a layer's rows are shared out to tensor-parallel ranks, which count them together."""
    return bool(layer.mlp.router.tp_group.size() > 1)


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
    if is_latent_attention(attention):
        undo.callback(let_latent_attention_turn(attention))
    undo.callback(setattr, attention, _GROUPS, own)
    undo.callback(attention.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _follow_with_router(layer: Any, groups: ContextGroups | None, undo: ExitStack) -> None:
    """A router is not given the parameters; its layer is.

    Args:
        layer: with experts.
        groups: that know what routers count over; None: over the microbatch's group.
        undo: gets what ends it.
    """
    turn, end = follow_in_router(layer.mlp.router)

    def hook(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        group = getattr(kwargs.get(ARGUMENT), "cp_group", None)
        turn(group if groups is None else groups.of_routers(group))

    setattr(hook, _OF_ROUTERS, groups)
    undo.callback(end)
    undo.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
