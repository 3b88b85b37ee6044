"""Packed sequences of a pretrain script: what its flags ask for, and what they cannot go with."""

from __future__ import annotations

import argparse
from dataclasses import replace

from chunkgraph.errors import PackingError
from chunkgraph.launch.context_rules import changing_refusals
from chunkgraph.launch.flags import GraphFlags, flag_of
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.options import PackingOptions
from chunkgraph.packing import PackedShape
from chunkgraph.packing.seq_counts import default_seq_buckets

__all__ = ["packed_shape", "packing_options", "packing_refusals", "resolved_flags"]

_SEQS, _TOKENS, _DOCUMENT, _BUCKETS, _SEQ_BUCKETS = (
    flag_of(f"packing.{name}")
    for name in (
        *("max_packed_seqs", "max_packed_tokens", "max_document_tokens"),
        *("buckets", "seq_buckets"),
    )
)
_SOURCES = ("sft", "dataloader_inter_document_masking")
"""Megatron's flags with which its data sets say where documents begin."""


def packing_refusals(flags: GraphFlags, args: argparse.Namespace) -> list[str]:
    """What of ``args`` keeps packed sequences out of chunk graphs, each with its flag.

    Args:
        flags: those of chunk graphs.
        args: Megatron's, parsed but not yet checked or filled in by it.
    """
    sources = [f"--{name.replace('_', '-')}" for name in _SOURCES if getattr(args, name, False)]
    if not flags.packing.max_packed_seqs:
        return [
            f"{source}: packed sequences change their offsets with every microbatch, and a graph "
            f"has fixed shapes; add {_SEQS} N, the most documents of a microbatch and 1"
            for source in sources
        ]
    asked = f"{_SEQS} {flags.packing.max_packed_seqs}"
    if not sources:
        alone = "without --sft (or --dataloader-inter-document-masking) a microbatch does not say"
        return [f"{asked}: {alone} where its documents begin; leave it out"]
    found = [*_refusals_of_contexts(asked, args), *_refusals_of_counts(flags)]
    if flags.contexts is not None:
        return [*found, *changing_refusals(flags, args)]
    if _of(args, "micro_batch_size", 1) > 1 and _of(args, "pipeline_model_parallel_size", 1) > 1:
        found.append(
            f"{asked} with --micro-batch-size {args.micro_batch_size} in a pipeline: Megatron lays "
            "the samples end to end, but its stages receive them side by side; use 1"
        )
    try:
        shape = packed_shape(flags, args)
        assert shape is not None
        shapes = PackedBanks.of_model(shape, flags.packing.buckets, (), args).shapes
    except PackingError as error:
        return [*found, f"{asked}: {error}"]
    rows = _rows(args)
    if shape.max_packed_tokens > rows:
        found.append(
            f"{_TOKENS} {shape.max_packed_tokens}: a microbatch has {rows} rows (--seq-length x "
            "--micro-batch-size), all of them in documents; give at most that, or leave it out"
        )
    elif len(shapes) > 1 or shape.max_packed_tokens < rows:
        found += _refusals_of_cuts(flags, args)
    table = shape.longest_rows + 1  # what models are told; see `packed.fixed_params`
    if table in {one.max_packed_tokens for one in shapes}:
        found.append(
            f"{_DOCUMENT} {flags.packing.max_document_tokens}: Megatron's unfused RoPE would take "
            f"a table of one row more ({table}) for that of a whole microbatch of so many rows; "
            "give one less"
        )
    return found


def packed_shape(flags: GraphFlags, args: argparse.Namespace) -> PackedShape | None:
    """The largest shape that is captured; None without packed sequences.

    Nor is there one where each microbatch has a context-parallel size of its own.

    Raises:
        PackingError: there is no such shape.
    """
    if not flags.packing.max_packed_seqs or flags.contexts is not None:
        return None
    size = _of(args, "context_parallel_size", 1)
    rows = flags.packing.max_packed_tokens or _rows(args)
    # Such data counts padding as tokens itself: the offsets are the same.
    return PackedShape(
        flags.packing.max_packed_seqs,
        rows,
        size,
        flags.packing.max_document_tokens,
        counts_padding=size > 1,
    )


def packing_options(flags: GraphFlags, args: argparse.Namespace) -> PackingOptions | None:
    """Return all shapes that are captured, which a script's documents fill; None without any."""
    shape = packed_shape(flags, args)
    if shape is None:
        return None
    return PackingOptions(
        shape, flags.packing.buckets, flags.packing.seq_buckets or (), fills_rows=True
    )


def resolved_flags(flags: GraphFlags, args: argparse.Namespace) -> GraphFlags:
    """The same with every value written out that packed sequences take from elsewhere.

    Args:
        flags: those of chunk graphs, as given.
        args: Megatron's.
    """
    if not flags.packing.max_packed_seqs:
        return flags
    rows = flags.packing.max_packed_tokens or _rows(args)
    counts = flags.packing.seq_buckets
    if counts is None:
        # With sizes that change, rows are those of a rank, and this size is 1.
        size = _of(args, "context_parallel_size", 1)
        packing = flags.packing
        counts = default_seq_buckets(packing.max_packed_seqs, rows, size, packing.buckets)
    packing = replace(flags.packing, max_packed_tokens=rows, seq_buckets=counts)
    return replace(flags, packing=packing)


def _refusals_of_contexts(asked: str, args: argparse.Namespace) -> list[str]:
    """What keeps documents from being shared by context-parallel ranks."""
    size = _of(args, "context_parallel_size", 1)
    if getattr(args, "hybrid_context_parallel", False):
        why = (
            "with --hybrid-context-parallel: Megatron chooses the ranks of a document in a "
            "schedule of its own, without pipelines; leave that out"
        )
    elif size > 1 and not getattr(args, "sft", False):
        why = (
            f"with --context-parallel-size {size} and --dataloader-inter-document-masking: its "
            "documents are not padded to what the ranks can share, so that Megatron cuts the whole "
            "sample over them; use --sft, or --context-parallel-size 1"
        )
    else:
        return []
    return [f"{asked} {why}"]


def _refusals_of_counts(flags: GraphFlags) -> list[str]:
    """What is wrong with graphs for fewer sequences."""
    counts, most = flags.packing.seq_buckets or (), flags.packing.max_packed_seqs
    return [
        f"{_SEQ_BUCKETS} {count}: give 2 or more, and less than {_SEQS} ({most})"
        for count in counts
        if not 2 <= count < most
    ]


def _refusals_of_cuts(flags: GraphFlags, args: argparse.Namespace) -> list[str]:
    """What keeps microbatches from being shorter than their data set made them."""
    name = _BUCKETS if flags.packing.buckets else _TOKENS
    whole = f"leave {name} out"
    found = []
    if _of(args, "micro_batch_size", 1) > 1:
        found.append(
            f"{name} with --micro-batch-size {args.micro_batch_size}: rows that no loss needs lie "
            f"between its samples; use 1, or {whole}"
        )
    if _of(args, "tensor_model_parallel_size", 1) > 1:
        found.append(
            f"{name} with --tensor-model-parallel-size {args.tensor_model_parallel_size}: the "
            f"script's other ranks receive rows of --seq-length; {whole}"
        )
    if getattr(args, "num_experts", None):
        found.append(
            f"{name} with --num-experts: routers count every row, and their losses would be others "
            f"where rows are left out; {whole}"
        )
    size = _of(args, "context_parallel_size", 1)
    if size > 1 and not getattr(args, "calculate_per_token_loss", False):
        found.append(
            f"{name} with --context-parallel-size {size}: each rank divides by the labels of its "
            "own rows, which are others where rows are left out; add --calculate-per-token-loss, "
            f"or {whole}"
        )
    return found


def _rows(args: argparse.Namespace) -> int:
    return _of(args, "seq_length", 1) * _of(args, "micro_batch_size", 1)


def _of(args: argparse.Namespace, name: str, default: int) -> int:
    """A number that may not be given; Megatron itself refuses that later, where it must be."""
    return getattr(args, name, None) or default
