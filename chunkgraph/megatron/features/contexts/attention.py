"""Layers that use the context-parallel group of each microbatch.

Where documents are split over ranks, both halves of attention need the group. Core attention takes
it from ``packed_seq_params`` (Transformer Engine does, through Megatron's wrapper). The rotary
embedding of packed sequences always takes the model's, ``pg_collection.cp``, so a hook replaces it
before every call. Routers get a hook too: they count the tokens of each expert over the ranks of a
microbatch, and with tensor parallelism also over the ranks that share its rows.
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
    make_attention_stream,
    use_groups_in_latent_attention,
)
from chunkgraph.megatron.features.contexts.routing import follow_in_router
from chunkgraph.megatron.features.packing.params import ARGUMENT

__all__ = ["follow_groups", "refuse_without_groups"]

_GROUPS = "pg_collection"
_HOOK_MARK = "_chunkgraph_follows_groups"
_ROUTER_GROUPS = "_chunkgraph_router_groups"


def follow_groups(
    model_chunks: Iterable[nn.Module], groups: ContextGroups | None = None
) -> Callable[[], None]:
    """Make rotary embeddings and routers use the group of each microbatch's ``packed_seq_params``.

    Holds for eager steps and captures. Each call's arguments decide, so a recomputation in the
    backward uses the group of its own microbatch. Where the parameters name no group, the model's
    is used.

    Args:
        model_chunks: the modules passed to the schedule.
        groups: the groups of the microbatches, made with ``has_experts=True``. Only models with
            experts on several tensor-parallel ranks need them.

    Returns:
        A function that undoes it.

    Raises:
        ConfigError: a router needs ``groups``.
    """
    model_chunks = list(model_chunks)
    has_groups = groups is not None and groups.for_routers is not None
    layers = _layers_with_routers(model_chunks)
    names = [f"{name} of model chunk {n}" for n, name, layer in layers if _shares_rows(layer)]
    # The config is the same on all ranks; a pipeline stage may have no experts.
    if not has_groups and (names or any(_config_shares_rows(chunk) for chunk in model_chunks)):
        raise ConfigError(
            f"{names[0] if names else 'The model'} has experts on several tensor-parallel ranks, "
            "and its routers count tokens over these ranks too. Pass the groups of the "
            "microbatches: follow_groups(model_chunks, groups) with groups = "
            "ContextGroups.of_data_parallel(sizes, has_experts=True)."
        )
    undo = ExitStack()
    for chunk in model_chunks:
        if any(parameter.is_cuda for parameter in chunk.parameters()):
            make_attention_stream()
        for module in chunk.modules():
            if _is_attention(module):
                _follow(module, undo)
    for _, _, layer in _layers_with_routers(model_chunks):
        _follow_with_router(layer, groups if _shares_rows(layer) else None, undo)
    return undo.close


def refuse_without_groups(model_chunks: Iterable[nn.Module], groups: ContextGroups) -> None:
    """Check that `follow_groups` was called for every layer of a model.

    Args:
        model_chunks: the modules passed to `follow_groups`.
        groups: the groups of the banks.

    Raises:
        ConfigError: an attention would embed positions with the model's group, or a router would
            count tokens over groups other than the banks'. The message names the first.
    """
    model_chunks = list(model_chunks)
    for number, chunk in enumerate(model_chunks):
        for name, module in chunk.named_modules():
            if _is_attention(module) and not any(
                getattr(hook, _HOOK_MARK, False) for hook in module._forward_pre_hooks.values()
            ):
                raise ConfigError(
                    "attach(packing=PackedBanks.of_limits(...)): "
                    f"{name} of model chunk {number} would embed the positions of every "
                    "microbatch with the model's own context-parallel group. Call "
                    "undo = chunkgraph.megatron.features.contexts.follow_groups(model_chunks) "
                    "before attach(), and undo() after detach()."
                )
    for number, name, layer in _layers_with_routers(model_chunks):
        if _shares_rows(layer) and not any(
            getattr(hook, _ROUTER_GROUPS, None) is groups
            for hook in layer._forward_pre_hooks.values()
        ):
            raise ConfigError(
                "attach(packing=PackedBanks.of_limits(...)): "
                f"the router of {name} of model chunk {number} would count tokens over groups "
                "other than those of the banks. Call follow_groups(model_chunks, groups) with the "
                "groups of these banks."
            )


def _layers_with_routers(model_chunks: Iterable[nn.Module]) -> Iterator[tuple[int, str, Any]]:
    """Yield each layer with a router as (number of its chunk, name in the chunk, layer)."""
    for number, chunk in enumerate(model_chunks):
        for name, module in chunk.named_modules():
            if getattr(getattr(module, "mlp", None), "router", None) is not None:
                yield number, name, module


def _config_shares_rows(chunk: nn.Module) -> bool:
    """Return whether the model's config, alike on all ranks, splits routers' rows over ranks."""
    configs = (getattr(module, "config", None) for module in chunk.modules())
    config = next((config for config in configs if hasattr(config, "num_moe_experts")), None)
    return bool(
        config is not None
        and config.num_moe_experts
        and (getattr(config, "tensor_model_parallel_size", 1) or 1) > 1
    )


def _shares_rows(layer: Any) -> bool:
    """Return whether a layer's rows are split over tensor-parallel ranks, which count together."""
    return bool(layer.mlp.router.tp_group.size() > 1)


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, _GROUPS) and hasattr(module, "core_attention")


def _follow(attention: Any, undo: ExitStack) -> None:
    model_groups = attention.pg_collection
    # Keyed by id(group); each value keeps its group alive.
    collections: dict[int, Any] = {}

    def hook(module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        group = getattr(kwargs.get(ARGUMENT), "cp_group", None)
        if group is None:
            module.pg_collection = model_groups
            return
        if id(group) not in collections:
            collections[id(group)] = copy.copy(model_groups)
            collections[id(group)].cp = group
        module.pg_collection = collections[id(group)]

    setattr(hook, _HOOK_MARK, True)
    if is_latent_attention(attention):
        undo.callback(use_groups_in_latent_attention(attention))
    undo.callback(setattr, attention, _GROUPS, model_groups)
    undo.callback(attention.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _follow_with_router(layer: Any, groups: ContextGroups | None, undo: ExitStack) -> None:
    """Hook a layer with experts, whose router does not get the ``packed_seq_params`` itself.

    Args:
        layer: the layer.
        groups: maps a microbatch's group to the one that routers count over; None: they count over
            the microbatch's group.
        undo: collects the callbacks that undo it.
    """
    set_group, undo_router = follow_in_router(layer.mlp.router)

    def hook(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        group = getattr(kwargs.get(ARGUMENT), "cp_group", None)
        set_group(group if groups is None else groups.of_routers(group))

    setattr(hook, _ROUTER_GROUPS, groups)
    undo.callback(undo_router)
    undo.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
