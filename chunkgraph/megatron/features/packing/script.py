"""Packed sequences whose documents come from a pretrain script's data set: rules and shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chunkgraph.megatron.features.packing.bank import PackingOptions
from chunkgraph.megatron.rules.features import BUCKETS_RULE
from chunkgraph.packing import PackedShape
from chunkgraph.settings import PackingConfig
from chunkgraph.settings.rule import Facts, Rule

_SOURCES = ("sft", "dataloader_inter_document_masking")
"""Megatron's flags with which data sets report where documents begin."""
_OTHER_RANKS = "the script's other tensor-parallel ranks receive rows of {seq_length}"


def _has_documents(f: Facts) -> bool:
    return bool(f.packed and any(getattr(f, name) for name in _SOURCES))


def _rule(text: str, when: Callable[[Facts], object]) -> Rule:
    """Return a rule for microbatches of documents."""
    return Rule(text, lambda f: _has_documents(f) and when(f))


def _fixed(text: str, when: Callable[[Facts], object]) -> Rule:
    """Return a rule for documents with a fixed context-parallel size."""
    return _rule(text, lambda f: not f.context_parallel_sizes and when(f))


def _changing(text: str, when: Callable[[Facts], object]) -> Rule:
    """Return a rule for documents with changing context-parallel sizes."""
    return _rule(f"context_parallel_sizes {text}", lambda f: f.context_parallel_sizes and when(f))


def _script_rows(f: Facts) -> int:
    """Return the rows of a microbatch of the script's data set."""
    return int((f.seq_length or 1) * (f.micro_batch_size or 1))


def _cut(text: str, when: Callable[[Facts], object]) -> Rule:
    """Return a rule for microbatches that are cut shorter than the data set's."""

    def cuts(f: Facts) -> bool:
        rows = _script_rows(f)
        most = f.max_packed_tokens or rows
        return most <= rows and (most < rows or any(size not in (1, most) for size in f.buckets))

    return _fixed(
        f"max_packed_seqs {text}leave {{max_packed_tokens=}} and {{buckets=}} out",
        lambda f: cuts(f) and when(f),
    )


def _changing_rows(f: Facts) -> int:
    return int(f.max_packed_tokens or f.seq_length or 1)


def _held_rows(f: Facts) -> object:
    largest, rows = max(f.context_parallel_sizes), _changing_rows(f)
    is_less = largest * rows < (f.seq_length or 1)
    return is_less and {"largest": largest, "rows": largest * rows}


def _unpacked(source: str) -> Rule:
    return Rule(
        f"{source}: packed sequences change their offsets with every microbatch, and a graph "
        "has fixed shapes; add {max_packed_seqs=} N, the most documents of a microbatch and 1",
        lambda f: getattr(f, source) and not f.packed,
    )


SCRIPT_RULES = (
    *map(_unpacked, _SOURCES),
    Rule(
        "max_packed_seqs: without {sft=true} (or {dataloader_inter_document_masking=true}) "
        "microbatches have no offsets of documents; leave it out",
        lambda f: f.packed and not _has_documents(f),
    ),
    _rule(
        "max_packed_seqs context_parallel_size dataloader_inter_document_masking: its documents "
        "are not padded for the ranks that share them, so Megatron splits the whole sample; use "
        "{sft=true}, or {context_parallel_size=1}",
        lambda f: (f.context_parallel_size or 1) > 1 and not f.sft,
    ),
    _fixed(
        "max_packed_seqs micro_batch_size pipeline_model_parallel_size: Megatron lays the samples "
        "end to end, but its stages receive them side by side; use {micro_batch_size=1}",
        lambda f: (f.micro_batch_size or 1) > 1 and (f.pipeline_model_parallel_size or 1) > 1,
    ),
    _fixed(
        "max_packed_tokens: a microbatch has {rows} rows ({seq_length=} x {micro_batch_size=}), "
        "all of them in documents; use at most that, or leave it out",
        lambda f: (f.max_packed_tokens or 0) > _script_rows(f) and {"rows": _script_rows(f)},
    ),
    _cut(
        "micro_batch_size: the rows to remove lie between its samples; use "
        "{micro_batch_size=1}, or ",
        lambda f: (f.micro_batch_size or 1) > 1,
    ),
    _cut(
        f"tensor_model_parallel_size: {_OTHER_RANKS}; ",
        lambda f: (f.tensor_model_parallel_size or 1) > 1,
    ),
    _cut(
        "num_moe_experts: routers count every row, so removed rows would change their losses; ",
        lambda f: f.num_moe_experts,
    ),
    _cut(
        "context_parallel_size: each rank divides by the number of its labels, which changes if "
        "rows are removed; add {calculate_per_token_loss=true}, or ",
        lambda f: (f.context_parallel_size or 1) > 1 and not f.calculate_per_token_loss,
    ),
    _changing("sft: other data sets do not give whole documents; use it", lambda f: not f.sft),
    _changing(
        "calculate_per_token_loss: a mean over each rank's microbatch would weigh a document by "
        "the number of ranks that share it; add it",
        lambda f: not f.calculate_per_token_loss,
    ),
    _changing(
        "micro_batch_size: a microbatch is one row of documents; use {micro_batch_size=1}, and "
        "{max_packed_tokens=} for its length",
        lambda f: (f.micro_batch_size or 1) > 1,
    ),
    _changing(
        "max_packed_tokens: {largest} ranks hold {rows} rows, and documents may have "
        "{seq_length}; allow more ranks or rows",
        _held_rows,
    ),
    _changing(
        f"max_packed_tokens tensor_model_parallel_size: {_OTHER_RANKS}; leave "
        "{max_packed_tokens=} out",
        lambda f: (
            (f.tensor_model_parallel_size or 1) > 1 and _changing_rows(f) != (f.seq_length or 1)
        ),
    ),
    BUCKETS_RULE,
)
"""Rules for packed sequences whose documents come from a script's data set."""


def packing_options(packing: PackingConfig, args: Any) -> PackingOptions | None:
    """Return the options for the captured shapes, which a script's documents fill.

    Return None without packed sequences, or if context-parallel sizes change.

    Raises:
        PackingError: There is no such shape.
    """
    if not packing.max_packed_seqs or packing.context_parallel_sizes:
        return None
    size = args.context_parallel_size or 1
    # The data set already counts padding as tokens: the offsets are the same.
    shape = PackedShape(
        packing.max_packed_seqs,
        packing.max_packed_tokens or _script_rows(args),
        size,
        counts_padding=size > 1,
    )
    return PackingOptions(shape, packing.buckets, fills_rows=True)
