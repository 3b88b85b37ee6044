"""Hybrid models: what a chunk graph cannot hold, and what Mamba layers want of packed sequences."""

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
        "sparse attention (D): the scale of its indexer's loss is set anew for every microbatch, "
        "as another tensor"
    )
}


class Hybrid(Feature):
    """Mamba layers in captured parts.

    Args:
        modules: of the captured parts.
        has_padding: whether rows of packed sequences may hold no token.
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
        """Apply where a captured part has a Mamba layer."""
        modules = [module for part in site.parts for module in part.modules]
        return cls(modules, has_padding=site.has_padding) if mamba_mixers_of(modules) else None

    def install(self, undo: ExitStack) -> None:
        """Clear rows after the last document, in eager passes too."""
        if self._has_padding:
            undo.callback(clear_mamba_padding(self._modules))

    def call(self, part: CapturedPart, call: Call) -> Call:
        """Refuse packed sequences that Mamba layers do not see the beginnings of."""
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
        """Number the documents' rows without the host."""
        with packed_mamba_rows():
            yield

    def beside(self) -> AbstractContextManager[None]:
        """Number rows as in a capture."""
        return self.capturing()


def hybrid_refusals(
    config: Any, chunks: Iterable[nn.Module], packing: PackedShape | None
) -> list[str]:
    """The settings of a hybrid model that a chunk graph cannot honour, each with its reason.

    Args:
        config: Megatron's TransformerConfig.
        chunks: model chunks, wrappers included.
        packing: the fixed shape of packed sequences, if there are any.
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    stacks: list[Any] = [module for module in modules if is_stack(module)]
    if not stacks:
        return []
    # Those of all stages, where the model says them: every rank is to refuse, or none.
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
    """The same of a hybrid model whose kinds of layers are known.

    Args:
        config: anything that has TransformerConfig's fields as attributes, or some of them.
        layers: the symbols in its pattern.
        packing: as for `hybrid_refusals`.
        predicts_several_tokens: whether it has multi-token prediction.
    """
    found = [f"hybrid model with {why}" for s, why in _REFUSED_LAYERS.items() if s in layers]
    if predicts_several_tokens:
        found.append(
            "hybrid model with multi-token prediction: its stage has a second stack, which was not "
            "tried"
        )
    if fp8_recipe(config) is not None:
        found.append(
            f"hybrid model with fp8={config.fp8!r}: the quantized weights of its Mamba layers were "
            "not tried in chunk graphs"
        )
    size = getattr(config, "context_parallel_size", 1) or 1
    if size == 1 and packing is not None and packing.context_parallel_size > 1:
        found.append(
            "hybrid model with context-parallel sizes that change: the heads of a mixer are shared "
            "by the ranks that it was built for; use one context_parallel_size"
        )
    if packing is not None:
        found += _packed_refusals(config, layers)
    return found


def _packed_refusals(config: Any, layers: set[str]) -> list[str]:
    found = []
    if "G" in layers:
        found.append("packed sequences with gated delta nets (G): they were not tried")
    if "M" not in layers:
        return found
    if not getattr(config, "use_mamba_mem_eff_path", True):
        found.append(
            "packed sequences with use_mamba_mem_eff_path=False: only the other path of Megatron's "
            "mixer knows documents"
        )
    return found


def check_seq_idx(params: Any, label: str) -> None:
    """Refuse packed parameters that do not tell Mamba layers where documents begin.

    Args:
        params: Megatron's ``PackedSeqParams``; of a release that numbers rows in the mixer, any.
        label: names the chunk in errors.

    Raises:
        ConfigError: they have no ``seq_idx``.
    """
    if hasattr(params, "seq_idx") and params.seq_idx is None:
        raise ConfigError(
            f"{label} has Mamba layers and was called with packed_seq_params without seq_idx: all "
            "documents of a microbatch would share one state. Give the document of each row, int32 "
            "of shape (1, rows); chunkgraph.packing.pack() computes it on the host, and Megatron "
            "itself does where total_tokens is given."
        )
