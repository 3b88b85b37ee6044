"""Support hybrid models: refusals, and Mamba layers on packed sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Self

from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.captured_part import Call, CapturedPart
from chunkgraph.megatron.core.fp8_recipe import fp8_recipe
from chunkgraph.megatron.core.model_kinds import is_stack
from chunkgraph.megatron.feature import Feature
from chunkgraph.megatron.features.hybrid.layers import mamba_mixers_of, packed_mamba_rows
from chunkgraph.megatron.features.hybrid.padding import clear_mamba_padding
from chunkgraph.megatron.features.packing.params import ARGUMENT
from chunkgraph.megatron.site import Site
from chunkgraph.packing import PackedShape

__all__ = ["Hybrid", "check_seq_idx", "hybrid_refusals", "layer_refusals"]

_REFUSED_LAYERS = {
    "D": (
        "sparse attention (D): every microbatch sets the scale of its indexer's loss to another "
        "tensor"
    )
}


class Hybrid(Feature):
    """Support Mamba layers in captured parts.

    Args:
        modules: All modules of the captured parts.
        has_padding: Whether microbatches may contain rows without a token.
    """

    def __init__(self, modules: Sequence[nn.Module], *, has_padding: bool) -> None:
        self._modules = tuple(modules)
        self._has_padding = has_padding

    @classmethod
    def refusals(cls, site: Site) -> list[str]:
        """List the settings of a hybrid model that a graph cannot hold."""
        return hybrid_refusals(site.config, site.chunks, site.largest_shape)

    @classmethod
    def of(cls, site: Site) -> Self | None:
        """Apply to models with a Mamba layer in a captured part."""
        modules = [module for part in site.parts for module in part.modules]
        return cls(modules, has_padding=site.has_padding) if mamba_mixers_of(modules) else None

    def install(self, undo: ExitStack) -> None:
        """Clear rows after the last document, also in eager passes."""
        if self._has_padding:
            undo.callback(clear_mamba_padding(self._modules))

    def call(self, part: CapturedPart, call: Call) -> Call:
        """Refuse packed sequences whose beginnings are unknown to Mamba layers."""
        if not mamba_mixers_of(part.modules):
            return call
        label = part.label

        def checked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            packed = kwargs.get(ARGUMENT)
            if packed is not None:
                check_seq_idx(packed, label)
            return call(args, kwargs)

        return checked

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Number the documents' rows on the device."""
        with packed_mamba_rows():
            yield

    def verifying(self) -> AbstractContextManager[None]:
        """Number the documents' rows as in a capture."""
        return self.capturing()


def hybrid_refusals(
    config: Any, chunks: Iterable[nn.Module], packing: PackedShape | None
) -> list[str]:
    """List the settings of a hybrid model that a graph cannot hold, each with its reason.

    Args:
        config: Megatron's TransformerConfig.
        chunks: Model chunks with their wrappers.
        packing: The largest packed shape; None without packed sequences.
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    stacks: list[Any] = [module for module in modules if is_stack(module)]
    if not stacks:
        return []
    # The model's pattern covers all stages, so that either all ranks refuse or none.
    patterns = [
        getattr(module, name, None) or ""
        for module in modules
        for name in ("hybrid_layer_pattern", "hybrid_override_pattern")
    ]
    layers = {symbol for pattern in patterns for symbol in pattern}
    layers.update(symbol for stack in stacks for symbol in getattr(stack, "layer_type_list", ()))
    predicts = any(getattr(module, "mtp_num_depths", 0) for module in modules)
    return layer_refusals(config, layers, packing, predicts_several_tokens=predicts)


def layer_refusals(
    config: Any,
    layers: set[str],
    packing: PackedShape | None,
    *,
    predicts_several_tokens: bool,
) -> list[str]:
    """List the settings that a graph cannot hold in a hybrid model with these kinds of layers.

    Args:
        config: An object that has all or some fields of TransformerConfig as attributes.
        layers: Symbols in the model's layer pattern.
        packing: See `hybrid_refusals`.
        predicts_several_tokens: Whether the model has multi-token prediction.
    """
    refusals = [f"hybrid model with {why}" for s, why in _REFUSED_LAYERS.items() if s in layers]
    if predicts_several_tokens:
        refusals.append(
            "hybrid model with multi-token prediction: its stage has a second stack, which is "
            "untested"
        )
    if fp8_recipe(config) is not None:
        refusals.append(
            f"hybrid model with fp8={config.fp8!r}: the quantized weights of its Mamba layers are "
            "untested in chunk graphs"
        )
    size = getattr(config, "context_parallel_size", 1) or 1
    if size == 1 and packing is not None and packing.context_parallel_size > 1:
        refusals.append(
            "hybrid model with context-parallel sizes that change: a mixer divides its heads among "
            "the ranks that it was built for; use one context_parallel_size"
        )
    if packing is not None:
        refusals += _packed_refusals(config, layers)
    return refusals


def _packed_refusals(config: Any, layers: set[str]) -> list[str]:
    refusals = []
    if "G" in layers:
        refusals.append("packed sequences with gated delta nets (G): they are untested")
    if "M" not in layers:
        return refusals
    if not getattr(config, "use_mamba_mem_eff_path", True):
        refusals.append(
            "packed sequences with use_mamba_mem_eff_path=False: only the memory-efficient path of "
            "Megatron's mixer separates documents"
        )
    return refusals


def check_seq_idx(params: Any, label: str) -> None:
    """Refuse packed parameters without the beginnings of documents for Mamba layers.

    Args:
        params: Megatron's ``PackedSeqParams``. A release that numbers rows in the mixer has no
            ``seq_idx``; its parameters pass.
        label: Name of the chunk in errors.

    Raises:
        ConfigError: ``seq_idx`` is None.
    """
    if hasattr(params, "seq_idx") and params.seq_idx is None:
        raise ConfigError(
            f"{label} has Mamba layers and was called with packed_seq_params without seq_idx: all "
            "documents of a microbatch would share one state. Pass the document of each row, int32 "
            "of shape (1, rows); chunkgraph.packing.pack() computes it on the host, and Megatron "
            "computes it if total_tokens is set."
        )
