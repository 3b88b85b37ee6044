"""The feature of models whose context-parallel size changes from microbatch to microbatch.

Where documents are split over ranks, both halves of attention need the microbatch's group. Core
attention takes it from ``packed_seq_params`` (Transformer Engine does, through Megatron's wrapper).
The rotary embedding of packed sequences always takes the model's, ``pg_collection.cp``, so a hook
replaces it before every call. Routers get a hook too: they count the tokens of each expert over the
ranks of a microbatch.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.feature import Feature, Step, Work
from chunkgraph.megatron.features.contexts.groups import ContextGroups, HeldGroups
from chunkgraph.megatron.features.packing.params import ARGUMENT
from chunkgraph.megatron.rules.contexts import CONTEXT_RULES
from chunkgraph.megatron.site import Site
from chunkgraph.settings.rule import Rule

if TYPE_CHECKING:
    from chunkgraph.megatron.attached import MegatronChunkGraphs

__all__ = ["Contexts", "follow_groups"]


class Contexts(Feature):
    """Context parallelism with a size for each microbatch.

    Args:
        site: the model's site.
        groups: this rank's groups, one of each size.
    """

    rules = (
        *CONTEXT_RULES,
        Rule(
            "context_parallel_sizes lengths_in_pipeline: Megatron's schedule receives "
            "microbatches of one length; leave the lengths out"
        ),
        Rule(
            "context_parallel_sizes lengths_of_experts: ranks that share experts exchange buffers "
            "of one size; leave the lengths out"
        ),
    )

    def __init__(self, site: Site, groups: ContextGroups) -> None:
        self._groups = groups
        self._held = HeldGroups([part.module for part in site.parts])

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return the sizes, and whether a pipeline or experts would get several lengths."""
        banks = site.feature_options["packing"]
        if banks is None or banks.limits is None:
            return {}
        has_lengths = len({bank.num_tokens for bank in banks.keys}) > 1
        return {
            "context_parallel_sizes": tuple(banks.limits.group_sizes),
            "lengths_in_pipeline": has_lengths and site.place.pipeline_size > 1,
            "lengths_of_experts": has_lengths and site.shares_experts,
        }

    @classmethod
    def prepare(cls, site: Site, _undo: ExitStack) -> None:
        """Refuse a model that `follow_groups` has not prepared.

        Raises:
            ConfigError: an attention would embed positions with the model's group.
        """
        banks = site.feature_options["packing"]
        if banks is not None and banks.groups is not None:
            _refuse_without_groups(site.chunks)

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
        """Restore the modules' groups after a capture."""
        return self._held.capturing() if work == "capture" else nullcontext()

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Restore, after a step, the groups that modules had before it."""
        with self._held.put_back(is_replayed=step.is_replayed):
            yield


_GROUPS = "pg_collection"
_HOOK_MARK = "_chunkgraph_follows_groups"


def follow_groups(model_chunks: Iterable[nn.Module]) -> Callable[[], None]:
    """Make rotary embeddings and routers use the group of each microbatch's ``packed_seq_params``.

    Holds for eager steps and captures. Each call's arguments decide, so a recomputation in the
    backward uses the group of its own microbatch. Where the parameters name no group, the model's
    is used.

    Args:
        model_chunks: the modules passed to the schedule.

    Returns:
        A function that undoes it.

    Raises:
        ConfigError: experts are on several tensor-parallel ranks.
    """
    modules: list[Any] = [module for chunk in model_chunks for module in chunk.modules()]
    layers = [m for m in modules if getattr(getattr(m, "mlp", None), "router", None) is not None]
    if any(layer.mlp.router.tp_group.size() > 1 for layer in layers):
        raise ConfigError(
            "The routers of experts on several tensor-parallel ranks count tokens over these ranks "
            "too, which context-parallel sizes that change do not support. Use "
            "tensor_model_parallel_size=1."
        )
    undo = ExitStack()
    if any(parameter.is_cuda for module in modules for parameter in module.parameters(False)):
        make_attention_stream()
    for module in filter(_is_attention, modules):
        _follow(module, undo)
    for layer in layers:
        _follow_with_router(layer, undo)
    return undo.close


def _refuse_without_groups(model_chunks: Iterable[nn.Module]) -> None:
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


def _follow_with_router(layer: Any, undo: ExitStack) -> None:
    """Hook a layer with experts, whose router does not get the ``packed_seq_params`` itself."""
    set_group, undo_router = follow_in_router(layer.mlp.router)

    def hook(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        set_group(getattr(kwargs.get(ARGUMENT), "cp_group", None))

    undo.callback(undo_router)
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


def follow_in_router(router: Any) -> tuple[Callable[[Any], None], Callable[[], None]]:
    """Make a router balance the tokens of a microbatch over all ranks that share it.

    Megatron's routers count the tokens of an expert over the model's context-parallel ranks. This
    one counts over the microbatch's ranks, for the microbatch's losses. A microbatch of
    context-parallel size C weighs C times as much as one of size 1 in gradients and metrics, since
    it has C times the rows; Megatron does the same with a static size. The z-loss stays a mean over
    the rank's tokens, and the global loss is over all ranks anyway.

    Args:
        router: a ``TopKRouter`` of a model without static context or tensor parallelism, so that
            its own group is this rank.

    Returns:
        A function that sets the group of the next call (None: the router's own), and a function
        that undoes it all.
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
            loss, group = loss * current.size(), own
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

    router.attach_and_log_load_balancing_loss = attach_share
    router.apply_z_loss = apply_z_loss

    def undo() -> None:
        del router.attach_and_log_load_balancing_loss, router.apply_z_loss
        router.tp_cp_group = own

    return set_group, undo
