"""Pin packed microbatches of any length at the boundary of a chunk, where a graph needs one shape.

Models with ``variable_seq_lengths=True`` take microbatches of any number of rows and documents, and
their stages exchange shapes before each tensor. If the documents of a step fit, every call gets the
rows, offsets and longest sequence of its bank instead, and hands its result back with the caller's
rows. Stages then know each other's shapes. The rows after the caller's are one more document of
token 0, which is cut off behind the last stage; sequences after it are empty.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import patch_attributes
from chunkgraph.megatron.feature import Feature, Step
from chunkgraph.megatron.features.packing.bank import ROWS_AT, PackedBank
from chunkgraph.megatron.features.packing.params import ARGUMENT, OFFSETS, PADDING_MASK
from chunkgraph.megatron.model_part import Call, ModelPart
from chunkgraph.megatron.site import Site, config_of
from chunkgraph.settings.rule import Rule


class PinnedRows(Feature):
    """Calls of models with ``variable_seq_lengths``, in steps whose documents fit."""

    rules = (
        Rule(
            "variable_seq_lengths: a graph has fixed shapes; pass attach() the shapes to which "
            "rows are padded (packing=PackingOptions(...))",
            lambda f: f.variable_seq_lengths and not f.packed,
        ),
        Rule(
            "variable_seq_lengths context_parallel_sizes: rows are padded for one size only",
            lambda f: f.variable_seq_lengths and f.changes_size,
        ),
        Rule(
            "variable_seq_lengths hybrid_layer_pattern=: the documents of added rows are unknown",
            lambda f: f.variable_seq_lengths and f.hybrid_layer_pattern,
        ),
        Rule(
            "variable_seq_lengths num_moe_experts=: added rows go to experts; accept it with "
            "PackingOptions(fills_rows=True)",
            lambda f: f.variable_seq_lengths and f.num_moe_experts and f.pads_rows,
        ),
    )

    def __init__(self, site: Site) -> None:
        self._configs = list({id(c): c for c in map(config_of, site.chunks)}.values())
        self._pinned: Sequence[tuple[int, PackedBank]] = ()
        self._parts = site.parts
        self._num_calls = [0] * len(site.parts)
        self._is_training = False

    @classmethod
    def of(cls, site: Site, _undo: ExitStack) -> Self | None:
        """Apply to models whose stages exchange shapes.

        Raises:
            ConfigError: Only the block can be captured, around which the caller's rows are used.
        """
        if not getattr(site.config, "variable_seq_lengths", False):
            return None
        if site.scope.scope != "chunk":
            raise ConfigError(
                "variable_seq_lengths needs graphs of whole chunks, but only the block is captured"
                f"{f' ({site.scope.why_block})' if site.scope.why_block else ''}. Set "
                "variable_seq_lengths=False and pad all microbatches to one length."
            )
        return cls(site)

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Let stages exchange tensors of known shapes, if this step's documents fit."""
        self._pinned, self._is_training = step.plan.pinned, step.is_training
        self._num_calls = [0] * len(self._num_calls)
        with ExitStack() as undo:
            for config in self._configs if self._pinned else ():
                undo.callback(patch_attributes(config, {"variable_seq_lengths": False}))
            for part in self._parts if self._pinned else ():
                undo.callback(patch_attributes(part, {"takes_all_calls": True}))
            yield

    def call(self, part: ModelPart, call: Call) -> Call:
        """Pad the arguments of a call, and cut its result."""
        index, label = part.index, part.label

        def pinned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._is_training and not torch.is_grad_enabled():
                return call(args, kwargs)  # a pass besides those of the schedule
            number = self._num_calls[index]
            self._num_calls[index] += 1
            if number >= len(self._pinned):
                return call(args, kwargs)
            num_rows, bank = self._pinned[number]
            where = f"{label}, microbatch {number}"
            result = call(args, _padded(kwargs, num_rows, bank, where))
            is_cut = part.module.post_process and num_rows < bank.num_tokens
            return result.narrow(1, 0, num_rows) if is_cut else result

        return pinned


def _padded(
    kwargs: Mapping[str, Any], num_rows: int, bank: PackedBank, where: str
) -> dict[str, Any]:
    """Return a call's arguments with the shapes of a bank.

    Args:
        kwargs: Keyword arguments of the model.
        num_rows: Rows of the caller on this rank, as the step's inputs state them.
        bank: The bank of the microbatch.
        where: Name of the microbatch in errors.

    Raises:
        ConfigError: The call differs from the step's inputs.
    """
    padded = dict(kwargs)
    for name, dim in ROWS_AT.items():
        value = kwargs.get(name)
        if not isinstance(value, torch.Tensor) or value.is_nested:
            continue
        if value.size(dim) != num_rows:
            raise ConfigError(
                f"{where}: {name} has {value.size(dim)} rows on this rank, but the documents of "
                f"the step's packings have {num_rows}. Pass the lengths of documents as they lie "
                "in the rows, with their padding."
            )
        more = [*value.shape]
        more[dim] = bank.num_tokens - num_rows
        fill = value.new_full(more, name == PADDING_MASK)
        padded[name] = torch.cat([value, fill], dim)
    padded[ARGUMENT] = _pinned_params(kwargs.get(ARGUMENT), bank, where)
    return padded


def _pinned_params(params: Any, bank: PackedBank, where: str) -> Any:
    """Return a copy of ``params`` with the offsets of a bank. Nothing is read from the device."""
    if params is None or params.cu_seqlens_q is None:
        raise ConfigError(
            f"{where}: the step has packings, but the call has no {ARGUMENT} with offsets. Pass "
            "them on every pipeline stage."
        )
    num_rows, num_seqs = bank.shape.max_packed_tokens, bank.shape.max_packed_seqs
    pinned = copy.copy(params)  # the constructor may read from the device
    by_object: dict[int, torch.Tensor] = {}
    for plain, of_rows in zip(OFFSETS[:2], OFFSETS[2:], strict=True):
        rows = getattr(params, of_rows)
        rows = getattr(params, plain) if rows is None else rows
        for name in (plain, of_rows):
            offsets = getattr(params, name)
            if offsets is None:
                continue
            if (num_more := num_seqs + 1 - offsets.numel()) < 0:
                raise ConfigError(
                    f"{where}: {name} has {offsets.numel() - 1} sequences, but the documents of "
                    f"the step's packings fit {num_seqs}, one of them for rows without a document. "
                    "Pass the length of every document, or attach with seq_buckets=()."
                )
            if id(offsets) not in by_object:
                end = offsets[-1:] + (num_rows - rows[-1:])
                more = end.to(offsets.dtype).expand(num_more)
                by_object[id(offsets)] = torch.cat([offsets, more])
            setattr(pinned, name, by_object[id(offsets)])
    # Unfused RoPE mistakes a table as long as all rows for one that does not restart.
    pinned.max_seqlen_q = pinned.max_seqlen_kv = num_rows + 1
    if (documents := getattr(params, "seq_idx", None)) is not None:
        last = params.cu_seqlens_q.numel() - 1
        added = (0, num_rows - documents.size(-1))
        pinned.seq_idx = torch.nn.functional.pad(documents, added, value=last)
    for name in ("tokens_per_sample", "total_tokens"):
        if getattr(params, name, None) is not None:
            setattr(pinned, name, num_rows)
    return pinned
