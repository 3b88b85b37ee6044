"""Support hybrid models: refusals, and Mamba layers on packed sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Self

from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.model_kinds import is_stack
from chunkgraph.megatron.feature import Feature, Work
from chunkgraph.megatron.features.hybrid.layers import (
    clear_mamba_padding,
    mamba_mixers_of,
    packed_mamba_rows,
)
from chunkgraph.megatron.features.packing.params import ARGUMENT
from chunkgraph.megatron.model_part import Call, ModelPart
from chunkgraph.megatron.rules.features import HYBRID_RULES
from chunkgraph.megatron.site import Site
from chunkgraph.settings.rule import Facts, Rule

__all__ = ["Hybrid", "check_seq_idx"]


def _has(f: Facts, symbol: str) -> bool:
    return symbol in (f.hybrid_layer_pattern or "")


_RULES = (
    *HYBRID_RULES,
    Rule("hybrid_layer_pattern: sparse attention (D) is untested", lambda f: _has(f, "D")),
    Rule(
        "hybrid_layer_pattern: with multi-token prediction its stage has a second stack, which "
        "is untested",
        lambda f: f.hybrid_layer_pattern and (_has(f, "/") or f.mtp_num_layers),
    ),
    Rule(
        "hybrid_layer_pattern packed: gated delta nets (G) are untested",
        lambda f: f.packed and _has(f, "G"),
    ),
    Rule(
        "use_mamba_mem_eff_path packed: only the memory-efficient path of Megatron's mixer "
        "separates documents",
        lambda f: f.packed and _has(f, "M") and f.use_mamba_mem_eff_path is False,
    ),
)


class Hybrid(Feature):
    """Support Mamba layers in captured parts."""

    rules = _RULES

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return the kinds of layers in the model."""
        return {"hybrid_layer_pattern": _pattern_of(site.chunks)}

    @classmethod
    def of(cls, site: Site, undo: ExitStack) -> Self | None:
        """Apply to models with a Mamba layer in a captured part.

        Rows after the last document are cleared, also in eager passes.
        """
        modules = [module for part in site.parts for module in part.modules]
        if not mamba_mixers_of(modules):
            return None
        facts = site.facts()
        if facts.pads_rows or not facts.packed:
            undo.callback(clear_mamba_padding(modules))
        return cls()

    def call(self, part: ModelPart, call: Call) -> Call:
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

    def around(self, work: Work) -> AbstractContextManager[None]:
        """Number the documents' rows on the device, also in the passes of ``verify``."""
        return nullcontext() if work == "session" else packed_mamba_rows()


def _pattern_of(chunks: Iterable[nn.Module]) -> str | None:
    """Return the symbols of all layers of a hybrid model; None of another model."""
    modules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
    stacks = [module for module in modules if is_stack(module)]
    if not stacks:
        return None
    # The model's pattern covers all stages, so that either all ranks refuse or none.
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    symbols = {s for module in modules for name in names for s in getattr(module, name, None) or ""}
    symbols.update(s for stack in stacks for s in getattr(stack, "layer_type_list", ()))
    if any(getattr(module, "mtp_num_depths", 0) for module in modules):
        symbols.add("/")
    return "".join(sorted(symbols))


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
