"""Support hybrid models: refusals, row numbers and padding of Mamba layers on packed sequences.

A mixer skips no rows: the gradients of its weights sum products over all rows, and 0 times NaN is
NaN. So the rows after the last document are replaced by zeros before and after a layer, by
selection. The selection after the layer also zeroes the gradient that flows back into these rows.

Padding between documents (context parallelism, ``pad_seq_to_mult``) stays as it is. With zeros
there, graphs and eager training differ in the last bits, probably because a kernel accumulates its
decay within a block of rows across documents.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron, patch_attributes
from chunkgraph.megatron.core.model_kinds import is_stack
from chunkgraph.megatron.feature import Feature, Work
from chunkgraph.megatron.features.packing.params import ARGUMENT, with_extra_rows
from chunkgraph.megatron.model_part import Call, ModelPart
from chunkgraph.megatron.rules.features import HYBRID_RULES
from chunkgraph.megatron.site import Site
from chunkgraph.settings.rule import Facts, Rule


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
        """Refuse packed sequences whose beginnings are unknown to Mamba layers.

        A release that numbers rows in the mixer has no ``seq_idx``; its parameters pass.
        """
        if not mamba_mixers_of(part.modules):
            return call
        label = part.label

        def checked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            params = kwargs.get(ARGUMENT)
            if params is not None and hasattr(params, "seq_idx") and params.seq_idx is None:
                raise ConfigError(
                    f"{label} has Mamba layers and was called with packed_seq_params without "
                    "seq_idx: all documents of a microbatch would share one state. Pass the "
                    "document of each row, int32 of shape (1, rows); chunkgraph.packing.pack() "
                    "computes it on the host, and Megatron computes it if total_tokens is set."
                )
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


_MIXER = "megatron.core.ssm.mamba_mixer"


def can_recompute_hybrid_layers() -> bool:
    """Return whether the stack supports full recomputation; earlier releases ignore it."""
    return importlib.util.find_spec("megatron.core.recompute") is not None


def mamba_mixers_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the Mamba mixers among ``modules``."""
    mixer = getattr(sys.modules.get(_MIXER), "MambaMixer", None)
    return [] if mixer is None else [m for m in modules if isinstance(m, mixer)]


@contextmanager
def packed_mamba_rows() -> Iterator[None]:
    """Make mixers number the documents' rows on the device.

    In earlier releases each mixer computes the numbers from a count that it reads on the host; in
    later ones they come with the offsets. The numbers are the same.
    """
    mixer = getattr(sys.modules.get(_MIXER), "MambaMixer", None)
    if not hasattr(mixer, "_create_packed_seq_idx"):
        yield
        return

    def create(_self: Any, params: Any, total_tokens: int) -> torch.Tensor:
        padded = params.cu_seqlens_q_padded
        offsets = params.cu_seqlens_q if padded is None else padded
        rows = torch.arange(total_tokens, device=offsets.device)
        documents = torch.searchsorted(offsets[1:].long(), rows, right=True)
        return with_extra_rows(documents.to(torch.int32).unsqueeze(0))

    with ExitStack() as undo:
        undo.callback(patch_attributes(mixer, {"_create_packed_seq_idx": create}))
        yield


_LAYER = "megatron.core.ssm.mamba_layer"
_HIDDEN = "hidden_states"


def clear_mamba_padding(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Zero the rows after the documents for all Mamba layers in ``modules``, eager or captured.

    Rows of documents keep their bits, and so do all gradients if the other rows are finite. A call
    without packed sequences does not change.

    Returns:
        A function that undoes this.
    """
    kind = getattr(sys.modules.get(_LAYER), "MambaLayer", None)
    undo = ExitStack()
    for module in modules:
        if kind is not None and isinstance(module, kind):
            cleared = _Cleared()
            for handle in (
                module.register_forward_pre_hook(cleared.enter, with_kwargs=True),
                module.register_forward_hook(cleared.leave, with_kwargs=True),
            ):
                undo.callback(handle.remove)
    return undo.close


def rows_after_documents(
    offsets: torch.Tensor, padded: torch.Tensor | None, first: int, num_rows: int, size: int = 1
) -> torch.Tensor:
    """Mark the rows after the last document that has a token.

    Each of C context-parallel ranks has one C-th of every document's rows, in the documents' order
    (the rule of Transformer Engine's ``thd_get_partitioned_indices``).

    Args:
        offsets: Offsets of the documents in tokens, [documents + 1].
        padded: Offsets of the documents in rows; None if documents have no padding.
        first: Index of the first row, among the rows of the rank.
        num_rows: Number of rows.
        size: Number of context-parallel ranks.

    Returns:
        Bool tensor [num_rows] on the device of ``offsets``.
    """
    ends = (offsets if padded is None else padded)[1:]
    end = (ends * (offsets.diff() > 0)).amax() // size
    rows = torch.arange(first, first + num_rows, device=offsets.device, dtype=offsets.dtype)
    return rows >= end


class _Cleared:
    """Hooks of one layer; `enter` computes the padding mask that `leave` uses."""

    def __init__(self) -> None:
        self._padding: torch.Tensor | None = None

    def enter(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the layer's arguments with zeros in padding rows; None if there are none."""
        hidden = args[0] if args else kwargs[_HIDDEN]
        self._padding = _padding_of(layer, kwargs, hidden.size(0))
        if self._padding is None:
            return None
        cleared = hidden.masked_fill(self._padding, 0.0)
        return ((cleared, *args[1:]), kwargs) if args else ((), {**kwargs, _HIDDEN: cleared})

    def leave(
        self, _layer: nn.Module, _args: Any, _kwargs: Any, result: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the layer's result with zeros in padding rows, which pass no gradient back."""
        padding, self._padding = self._padding, None
        return None if padding is None else result.masked_fill(padding, 0.0)


def _padding_of(layer: Any, kwargs: dict[str, Any], num_rows: int) -> torch.Tensor | None:
    """Return the mask of this rank's padding rows, [rows, 1, 1]; None without documents."""
    params = kwargs.get(ARGUMENT)
    if params is None or params.qkv_format != "thd" or params.cu_seqlens_q is None:
        return None
    first = 0
    if layer.config.sequence_parallel:
        state = import_megatron("megatron.core.parallel_state")
        first = state.get_tensor_model_parallel_rank() * num_rows
    padding = rows_after_documents(
        params.cu_seqlens_q, params.cu_seqlens_q_padded, first, num_rows, layer.mixer.cp.cp_size
    )
    return padding[:, None, None]
