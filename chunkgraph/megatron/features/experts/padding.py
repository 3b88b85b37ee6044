"""Experts on padded rows: rows without a token are not routed and have no effect.

Megatron's routers take a ``padding_mask`` and exclude such rows from their losses. But they route
them like tokens, so padding takes the room of tokens, and a NaN in it reaches every loss through a
factor 0. Here padding rows enter as zeros and choose no expert, and the capacity depends on the
actual tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import (
    import_megatron,
    patch_attributes,
    private_names,
    versions,
)
from chunkgraph.megatron.features.experts.capacity import gather_fixed_rows
from chunkgraph.megatron.features.experts.dropless import Dropless
from chunkgraph.megatron.features.experts.room import Room
from chunkgraph.megatron.features.experts.rows_in_use import moe_layers_of
from chunkgraph.megatron.refusals import facts_of_model
from chunkgraph.megatron.rules.experts import PADDED_ROWS_RULES, uses_dropless
from chunkgraph.settings.rule import check

_MASK = "padding_mask"
_LAYER = "megatron.core.transformer.moe.moe_layer"
_ROUTER = "megatron.core.transformer.moe.router"
_UTILS = "megatron.core.transformer.moe.moe_utils"


def keep_padding_from_experts(
    model_chunks: nn.Module | Sequence[nn.Module], config: Any
) -> Callable[[], None]:
    """Make routers ignore padding rows, as if there were only rows with tokens.

    ``attach(packing=...)`` does this itself, for its eager steps too. Call this function to train a
    model on the same padded rows without chunk graphs; to use both, call it before `attach`. The
    model then takes ``padding_mask``, bool, shape [1, rows], True for rows without a token, on
    every pipeline stage. A padding row goes to no expert and counts in no loss or count of a
    router, and the capacity of experts depends on the tokens alone.

    Args:
        model_chunks: The schedule's argument ``model``.
        config: Megatron's TransformerConfig.

    Returns:
        A function that undoes the change.

    Raises:
        ConfigError: A setting or this release of Megatron does not support it.
    """
    check(
        PADDED_ROWS_RULES,
        facts_of_model(config, {"pads_rows": True}),
        "Experts with these settings cannot be trained on packed sequences:",
    )
    _refuse_without_mask()
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else model_chunks
    layers = moe_layers_of([m for chunk in chunks for m in chunk.modules()])
    # HybridEP itself takes tokens without an expert.
    is_dropless = uses_dropless(config) and config.moe_token_dispatcher_type != "flex"
    dropless = Dropless(layers, Room(config), has_padding=True) if layers and is_dropless else None
    routing = _Routing()
    undo = ExitStack()
    undo.callback(routing.install())
    if dropless is not None:
        undo.enter_context(dropless.on_device())
    else:
        undo.callback(gather_fixed_rows())
    for layer in layers:
        for handle in (
            layer.register_forward_pre_hook(_clear_input, with_kwargs=True),
            layer.register_forward_hook(_clear_output, with_kwargs=True),
            layer.router.register_forward_pre_hook(routing.enter, with_kwargs=True),
            layer.router.register_forward_hook(routing.leave, always_call=True),
        ):
            undo.callback(handle.remove)
    return undo.close


def _refuse_without_mask() -> None:
    (layer,) = private_names(_LAYER, "MoELayer")
    (router,) = private_names(_ROUTER, "TopKRouter")
    block = import_megatron("megatron.core.transformer.transformer_block").TransformerBlock
    unsupported = [
        kind.__name__
        for kind in (block, layer, router)
        if _MASK not in inspect.signature(kind.forward).parameters
    ]
    if unsupported:
        raise ConfigError(
            f"megatron-core {versions()['megatron_core']} cannot train experts on packed "
            f"sequences: {', '.join(unsupported)} take no {_MASK}, so the rows after "
            "packed documents would count in the losses of the routers. Use a release "
            "that has it, such as 0.16 or 0.19, or leave packing out."
        )


class _Routing:
    """Patches of routers that choose no expert for padding rows, and count on the device only."""

    def __init__(self) -> None:
        self._padding: torch.Tensor | None = None

    def install(self) -> Callable[[], None]:
        """Install the patches; return the undo function."""
        names = (
            "topk_routing_with_score_function",
            "apply_router_token_dropping",
            "get_tokens_per_expert_and_token_count",
        )
        top_k, drop, count_tokens, kind = private_names(_ROUTER, *names, "TopKRouter")
        count = kind._apply_expert_bias

        def choose(*args: Any, **kwargs: Any) -> Any:
            probs, chosen, *more = top_k(*args, **kwargs)
            if self._padding is not None:
                probs = probs.masked_fill(self._padding[:, None], 0.0)
                chosen = chosen.masked_fill(self._padding[:, None], False)
            return (probs, chosen, *more)

        def drop_to_capacity(
            routing_probs: torch.Tensor,
            routing_map: torch.Tensor,
            router_topk: int,
            capacity_factor: float,
            drop_policy: str = "probs",
            pad_to_capacity: bool = False,
        ) -> Any:
            options = router_topk, capacity_factor, drop_policy
            if self._padding is None:
                return drop(routing_probs, routing_map, *options, pad_to_capacity)
            selected = rows_within_capacity(routing_probs, routing_map, self._padding, *options)
            return routing_probs * selected, selected

        def at_least_one(*args: Any, **kwargs: Any) -> Any:
            # Losses divide by the count, and all rows of a microbatch may be padding.
            of_experts, local, total = count_tokens(*args, **kwargs)
            is_counted = isinstance(total, torch.Tensor)
            return of_experts, local, total.clamp(min=1) if is_counted else total

        def count_chosen(
            router: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
        ) -> Any:
            # The map contains no padding, and the shapes in Megatron's masking do not match.
            return count(router, routing_map, None if self._padding is not None else padding_mask)

        undo = ExitStack()
        undo.callback(patch_attributes(kind, {"_apply_expert_bias": count_chosen}))
        patched = dict(zip(names, (choose, drop_to_capacity, at_least_one), strict=True))
        undo.callback(patch_attributes(import_megatron(_ROUTER), patched))
        return undo.close

    def enter(self, _router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        padding = kwargs.get(_MASK, args[1] if len(args) > 1 else None)
        self._padding = None if padding is None else padding.reshape(-1)

    def leave(self, *_: Any) -> None:
        self._padding = None


def rows_within_capacity(
    routing_probs: torch.Tensor,
    routing_map: torch.Tensor,
    padding: torch.Tensor,
    top_k: int,
    capacity_factor: float,
    drop_policy: str,
) -> torch.Tensor:
    """Select the rows of every expert, bool [rows, experts], with the capacity of the tokens alone.

    As in Megatron with an input of only these tokens, every expert gets as many rows as its
    capacity; rows that did not choose it have probability 0. Padding is never selected: the
    dispatcher fills the rest of the fixed room.

    Args:
        routing_probs: Probabilities, [rows, experts], 0 for experts that were not chosen.
        routing_map: Chosen experts, bool [rows, experts].
        padding: True for rows without a token, bool [rows].
        top_k: Number of experts of a token.
        capacity_factor: Capacity factor of an expert.
        drop_policy: ``position`` to select the first tokens instead of those with the largest
            probability.
    """
    order = routing_probs.detach()
    if drop_policy == "position":
        places = torch.arange(routing_map.shape[0], 0, -1, device=routing_map.device)
        order = routing_map * places[:, None]
    order = order.masked_fill(padding[:, None], -1)
    num_rows, num_experts = routing_map.shape
    (get_capacity,) = private_names(_UTILS, "get_capacity")
    most = min(get_capacity(num_rows * top_k, num_experts, capacity_factor), num_rows)
    # The same arithmetic as Megatron's, in the same precision, on the device.
    num_chosen = (num_rows - padding.sum()).double() * top_k
    capacity = torch.ceil(num_chosen / num_experts * capacity_factor)
    has_room = torch.arange(most, device=padding.device) < capacity
    best = order.topk(most, dim=0).indices
    selected = torch.zeros_like(routing_map).scatter(0, best, has_room[:, None].expand_as(best))
    return selected.masked_fill(padding[:, None], False)


def _clear_input(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the layer's arguments with zeros in padding rows."""
    named = dict(zip(("hidden_states", "intermediate_tensors", _MASK), args, strict=False))
    keywords = {**named, **kwargs}
    padding, hidden = keywords.get(_MASK), keywords["hidden_states"]
    if padding is None:
        if not layer.training:
            return None
        raise ConfigError(
            f"Layer {getattr(layer, 'layer_number', None)} with experts was called without "
            f"{_MASK}, though its sequences are packed: the rows after the documents would be "
            f"routed like tokens. Pass {_MASK}=..., bool [1, rows], True for rows without a "
            "token, to the model on every pipeline stage."
        )
    padding = _of_this_rank(padding, hidden.size(0))
    rows = padding.transpose(0, 1)[..., None]
    return (), {**keywords, "hidden_states": hidden.masked_fill(rows, 0.0), _MASK: padding}


def _clear_output(
    _layer: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Any:
    """Return the layer's result with zeros, and thus no gradients, in padding rows."""
    padding = kwargs.get(_MASK)
    if padding is None:
        return None
    output, *more = result
    rows = padding.transpose(0, 1)[..., None]
    return (output.masked_fill(rows, 0.0), *more)


def _of_this_rank(padding: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the mask of this rank's rows: Megatron splits it on the first stage only."""
    if padding.size(1) == num_rows:
        return padding
    state = import_megatron("megatron.core.parallel_state")
    size = state.get_tensor_model_parallel_world_size()
    return padding.chunk(size, dim=1)[state.get_tensor_model_parallel_rank()]
