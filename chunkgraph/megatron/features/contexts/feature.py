"""The feature of models whose context-parallel size changes from microbatch to microbatch.

Where documents are split over ranks, both halves of attention need the microbatch's group. Core
attention takes it from ``packed_seq_params`` (Transformer Engine does, through Megatron's wrapper).
The rotary embedding of packed sequences always takes the model's, ``pg_collection.cp``, so a hook
replaces it before every call. Routers get a hook too: they count the tokens of each expert over the
ranks of a microbatch, and with tensor parallelism also over the ranks that share its rows.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from chunkgraph.megatron.core.access import import_megatron, patch_attributes
from chunkgraph.megatron.feature import Feature, Step, Work
from chunkgraph.megatron.features.contexts.groups import ContextGroups, groups_put_back
from chunkgraph.megatron.features.packing.params import ARGUMENT
from chunkgraph.megatron.rules.features import CONTEXT_RULES
from chunkgraph.megatron.site import Site

if TYPE_CHECKING:
    from chunkgraph.megatron.attachment import MegatronChunkGraphs


class Contexts(Feature):
    """Context parallelism with a size for each microbatch.

    Args:
        site: the model's site.
        groups: this rank's groups, one of each size.
    """

    replays_forwards = False
    rules = CONTEXT_RULES

    def __init__(self, site: Site, groups: ContextGroups) -> None:
        self._groups = groups
        self._modules = [part.module for part in site.parts]

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return the sizes."""
        banks = site.feature_options["packing"]
        if banks is None or banks.limits is None:
            return {}
        return {"context_parallel_sizes": tuple(banks.limits.group_sizes)}

    @classmethod
    def prepare(cls, site: Site, undo: ExitStack) -> None:
        """Let the model use the groups of microbatches, unless `follow_groups` did it already."""
        banks = site.feature_options["packing"]
        if banks is None or banks.groups is None or _follows(site.chunks, banks.groups):
            return
        undo.callback(follow_groups(site.chunks, banks.groups))

    @classmethod
    def of(cls, site: Site, _undo: ExitStack) -> Self | None:
        """Return the feature if the banks have context-parallel groups, else None."""
        banks = site.feature_options["packing"]
        groups = None if banks is None else banks.groups
        return None if groups is None else cls(site, groups)

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Keep the groups open as long as graphs hold collectives of them."""
        self._groups.hold(graphs.engine)

    def around(self, work: Work) -> AbstractContextManager[None]:
        """Restore the modules' groups after captures and passes of ``verify``."""
        return nullcontext() if work == "session" else groups_put_back(self._modules)

    def step(self, step: Step) -> AbstractContextManager[None]:
        """Restore the modules' groups after an eager step; a replay calls no module."""
        return nullcontext() if step.is_replayed else groups_put_back(self._modules)


_GROUPS = "pg_collection"
_HOOK_MARK = "_chunkgraph_follows_groups"
_ROUTER_GROUPS = "_chunkgraph_router_groups"


def follow_groups(model_chunks: Iterable[nn.Module], groups: ContextGroups) -> Callable[[], None]:
    """Make rotary embeddings and routers use the group of each microbatch's ``packed_seq_params``.

    Holds for eager steps and captures. Each call's arguments decide, so a recomputation in the
    backward uses the group of its own microbatch. Where the parameters name no group, the model's
    is used.

    Args:
        model_chunks: the modules passed to the schedule.
        groups: the groups of the microbatches, made with ``has_experts=True`` for experts.

    Returns:
        A function that undoes it.
    """
    model_chunks = list(model_chunks)
    undo = ExitStack()
    for chunk in model_chunks:
        if any(parameter.is_cuda for parameter in chunk.parameters()):
            make_attention_stream()
        for module in chunk.modules():
            if _is_attention(module):
                _follow(module, undo)
    for layer in _layers_with_routers(model_chunks):
        _follow_with_router(layer, groups if _shares_rows(layer) else None, undo)
    return undo.close


def _follows(model_chunks: Sequence[nn.Module], groups: ContextGroups) -> bool:
    """Return whether `follow_groups` was called for every layer of a model, with these groups."""
    modules = [module for chunk in model_chunks for module in chunk.modules()]
    routers = [layer for layer in _layers_with_routers(model_chunks) if _shares_rows(layer)]
    marks: list[tuple[nn.Module, str, Any]]
    marks = [(module, _HOOK_MARK, True) for module in modules if _is_attention(module)]
    marks += [(layer, _ROUTER_GROUPS, groups) for layer in routers]
    return all(
        any(getattr(hook, mark, None) is value for hook in module._forward_pre_hooks.values())
        for module, mark, value in marks
    )


def _layers_with_routers(model_chunks: Iterable[nn.Module]) -> list[Any]:
    """Return the layers with a router."""
    modules = [module for chunk in model_chunks for module in chunk.modules()]
    return [m for m in modules if getattr(getattr(m, "mlp", None), "router", None) is not None]


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
    # Multi-latent attention embeds positions by itself.
    if hasattr(attention, "get_query_key_value_tensors") and hasattr(attention, "kv_layernorm"):
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
    set_group = follow_in_router(layer.mlp.router, undo)

    def hook(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        group = getattr(kwargs.get(ARGUMENT), "cp_group", None)
        set_group(group if groups is None else groups.of_routers(group))

    setattr(hook, _ROUTER_GROUPS, groups)
    undo.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)


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

    return patch_attributes(attention, {"get_query_key_value_tensors": get_tensors})


def follow_in_router(router: Any, undo: ExitStack) -> Callable[[Any], None]:
    """Make a router balance the tokens of a microbatch over all ranks that share it.

    Megatron's routers count the tokens of an expert over the model's tensor- and context-parallel
    ranks. This one counts over the microbatch's ranks, for the microbatch's losses. A microbatch of
    context-parallel size C weighs C times as much as one of size 1 in gradients and metrics, since
    it has C times the rows; Megatron does the same with a static size. The z-loss stays a mean over
    the rank's tokens, and the global loss is over all ranks anyway.

    Args:
        router: a ``TopKRouter`` of a model without static context parallelism, so that its own
            group consists of its tensor-parallel ranks.
        undo: collects the callbacks that undo it.

    Returns:
        A function that sets the group of the next call (tensor-parallel ranks included; None: the
        router's own).
    """
    own = router.tp_cp_group
    attach, z_loss = router.attach_and_log_load_balancing_loss, router.apply_z_loss

    def set_group(group: Any) -> None:
        router.tp_cp_group = own if group is None else group

    def attach_share(
        activation: Any, coefficient: Any, loss: Any, name: str, group: Any, *args: Any, **more: Any
    ) -> Any:
        current = router.tp_cp_group
        if group is current and current is not own:
            # Metrics are reduced after the step, when this microbatch's group is unknown.
            loss, group = loss * (current.size() // own.size()), own
        router.tp_cp_group = own
        try:
            return attach(activation, coefficient, loss, name, group, *args, **more)
        finally:
            router.tp_cp_group = current

    def apply_z_loss(*args: Any, **kwargs: Any) -> Any:
        current, router.tp_cp_group = router.tp_cp_group, own
        try:
            return z_loss(*args, **kwargs)
        finally:
            router.tp_cp_group = current

    methods = {"attach_and_log_load_balancing_loss": attach_share, "apply_z_loss": apply_z_loss}
    undo.callback(patch_attributes(router, methods))
    undo.callback(set_group, None)
    return set_group
