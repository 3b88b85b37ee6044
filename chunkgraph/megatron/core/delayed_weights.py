"""Transformer Engine's layers that leave weight gradients to ``backward_dw`` (the action W).

Layers read ``delay_wgrad_compute`` from Megatron's TransformerConfig when they are built; DDP reads
it from its own config. TransformerConfig refuses the field without expert-parallel overlap, so it
is set on the config after that check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

from chunkgraph.megatron.core.access import patch_attributes, private_names
from chunkgraph.megatron.core.data_parallel import unwrap_ddp

__all__ = ["delay_in_new_configs", "delays", "facts_of_delays"]

_FIELD = "delay_wgrad_compute"


def delay_in_new_configs() -> Callable[[], None]:
    """Delay weight gradients in every config that is created from now on; return the undo function.

    Raises:
        ConfigError: The installed release has no such configs.
    """
    (of_model,) = private_names("megatron.core.transformer.transformer_config", "TransformerConfig")
    (of_ddp,) = private_names("megatron.core.distributed", "DistributedDataParallelConfig")
    undo = ExitStack()
    for kind in (of_model, of_ddp):
        undo.callback(patch_attributes(kind, {"__post_init__": _delaying(kind.__post_init__)}))
    return undo.close


def _delaying(check: Callable[[Any], None]) -> Callable[[Any], None]:
    def post_init(config: Any) -> None:
        setattr(config, _FIELD, False)  # a copy of a config has it already
        check(config)
        setattr(config, _FIELD, True)

    return post_init


def delays(module: nn.Module) -> bool:
    """Return whether a layer of Transformer Engine was built to delay its weight gradients."""
    store: Any = getattr(module, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def facts_of_delays(chunks: Iterable[nn.Module]) -> dict[str, object]:
    """Return the facts about delayed weight gradients of model chunks that rules check."""
    at_once = ddp_at_once = False
    for chunk in chunks:
        stores = [m for m in chunk.modules() if getattr(m, "wgrad_store", None) is not None]
        delaying = [m for m in stores if delays(m)]
        at_once |= len(delaying) < len(stores)
        ddp = unwrap_ddp(chunk)
        if delaying and ddp is not None:
            ddp_at_once |= not getattr(getattr(ddp, "ddp_config", None), _FIELD, False)
    return {"layers_at_once": at_once, "ddp_at_once": ddp_at_once}
