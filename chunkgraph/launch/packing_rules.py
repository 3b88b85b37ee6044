"""Packed sequences of a pretrain script: the rules of its flags, and its shapes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace

from chunkgraph.errors import PackingError
from chunkgraph.launch.flags import GraphFlags
from chunkgraph.megatron.features.packing.attention_limits import shares_keys
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.options import PackingOptions
from chunkgraph.packing import ContextLimits, PackedShape
from chunkgraph.settings.contexts import RANK_RULES
from chunkgraph.settings.packing import PACKING_RULES
from chunkgraph.settings.rule import Facts, Rule

__all__ = [
    "SCRIPT_PACKING_RULES",
    "changing_limits",
    "packing_options",
    "shape_refusals",
]

_SOURCES = ("sft", "dataloader_inter_document_masking")
"""Megatron's flags with which data sets report where documents begin."""
_SIZES = re.compile(r"\b(max_packed_seqs|max_packed_tokens|max_document_tokens)\b")
_OTHER_RANKS = "the script's other tensor-parallel ranks receive rows of {seq_length}"


def _has_documents(f: Facts) -> bool:
    return bool(f.max_packed_seqs and any(getattr(f, name) for name in _SOURCES))


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


def _cut(text: str, when: Callable[[Facts], object]) -> list[Rule]:
    """Return rules for microbatches that are cut shorter than the data set's."""

    def cuts(f: Facts) -> bool:
        rows = _script_rows(f)
        most = f.max_packed_tokens or rows
        return most <= rows and (most < rows or any(size not in (1, most) for size in f.buckets))

    def rule(name: str, *, has_buckets: bool) -> Rule:
        return _fixed(
            f"{name}= {text}leave {{{name}=}} out",
            lambda f: bool(f.buckets) is has_buckets and cuts(f) and when(f),
        )

    return [rule("buckets", has_buckets=True), rule("max_packed_tokens", has_buckets=False)]


def _changing_rows(f: Facts) -> int:
    return int(f.max_packed_tokens or f.seq_length or 1)


def _held_rows(f: Facts) -> object:
    largest, rows = max(f.context_parallel_sizes), _changing_rows(f)
    is_less = largest * rows < (f.seq_length or 1)
    return is_less and {"largest": largest, "rows": largest * rows}


def _is_unpacked(source: str) -> Callable[[Facts], object]:
    return lambda f: getattr(f, source) and not f.max_packed_seqs


SCRIPT_PACKING_RULES = (
    *(
        Rule(
            f"{source}: packed sequences change their offsets with every microbatch, and a graph "
            "has fixed shapes; add {max_packed_seqs=} N, the most documents of a microbatch and 1",
            _is_unpacked(source),
        )
        for source in _SOURCES
    ),
    Rule(
        "max_packed_seqs: without {sft=true} (or {dataloader_inter_document_masking=true}) "
        "microbatches have no offsets of documents; leave it out",
        lambda f: f.max_packed_seqs and not _has_documents(f),
    ),
    _rule(
        "max_packed_seqs context_parallel_size dataloader_inter_document_masking: its documents "
        "are not padded for the ranks that share them, so Megatron splits the whole sample; use "
        "{sft=true}, or {context_parallel_size=1}",
        lambda f: (f.context_parallel_size or 1) > 1 and not f.sft,
    ),
    *PACKING_RULES,
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
    *_cut(
        "micro_batch_size: the rows to remove lie between its samples; use "
        "{micro_batch_size=1}, or ",
        lambda f: (f.micro_batch_size or 1) > 1,
    ),
    *_cut(
        f"tensor_model_parallel_size: {_OTHER_RANKS}; ",
        lambda f: (f.tensor_model_parallel_size or 1) > 1,
    ),
    *_cut(
        "num_moe_experts: routers count every row, so removed rows would change their losses; ",
        lambda f: f.num_moe_experts,
    ),
    *_cut(
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
        "max_document_tokens: a document may have as many tokens as the most ranks hold; leave "
        "one of them out",
        lambda f: f.max_document_tokens,
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
    *RANK_RULES,
)
"""Rules for packed sequences whose documents come from a script's data set."""


def shape_refusals(flags: GraphFlags, args: argparse.Namespace, facts: Facts) -> list[str]:
    """List errors in the shapes that the flags select.

    Args:
        flags: Flags of chunk graphs.
        args: Megatron's arguments, parsed but not yet validated or completed by it.
        facts: The facts that both state.
    """
    if not _has_documents(facts) or facts.context_parallel_sizes:
        return []
    try:
        options = packing_options(flags, args)
        assert options is not None
        shapes = PackedBanks.of_model(replace(options, seq_buckets=()), args).shapes
    except PackingError as error:
        text = _SIZES.sub(lambda match: facts.name(match[1]), str(error))
        text = text.replace("context_parallel_size", facts.name("context_parallel_size"))
        return [f"{facts.spell('max_packed_seqs')}: {text}"]
    table = options.shape.longest_rows + 1  # as in `params.fixed_params`
    if table not in {one.max_packed_tokens for one in shapes}:
        return []
    why = (
        f"{{max_document_tokens}}: its RoPE table has {table} rows, one more, and Megatron's "
        "unfused RoPE would take it for the table of a whole microbatch; use one less"
    )
    return [facts.text(why)]


def packing_options(flags: GraphFlags, args: argparse.Namespace) -> PackingOptions | None:
    """Return the options for the captured shapes, which a script's documents fill.

    Return None without packed sequences, or if context-parallel sizes change.

    Raises:
        PackingError: There is no such shape.
    """
    packing = flags.packing
    if not packing.max_packed_seqs or flags.contexts is not None:
        return None
    size = _number(args, "context_parallel_size", 1)
    # The data set already counts padding as tokens: the offsets are the same.
    shape = PackedShape(
        packing.max_packed_seqs,
        packing.max_packed_tokens or _rows(args),
        size,
        packing.max_document_tokens,
        counts_padding=size > 1,
    )
    return PackingOptions(shape, packing.buckets, packing.seq_buckets, fills_rows=True)


def changing_limits(
    flags: GraphFlags, args: argparse.Namespace, world_size: int, group_size: int
) -> ContextLimits:
    """Return the limits of every step's schedule.

    Args:
        flags: Flags of chunk graphs, with context-parallel sizes.
        args: Megatron's arguments.
        world_size: Number of data-parallel ranks.
        group_size: Divisor of the number of microbatches.

    Raises:
        PackingError: There are no such groups.
    """
    assert flags.contexts is not None
    return ContextLimits(
        world_size=world_size,
        max_tokens_per_rank=flags.packing.max_packed_tokens or args.seq_length,
        max_packed_seqs=flags.packing.max_packed_seqs,
        sizes=flags.contexts.every,
        multiple_of=group_size,
        counts_padding=shares_keys(args),
    )


def _rows(args: argparse.Namespace) -> int:
    return _number(args, "seq_length", 1) * _number(args, "micro_batch_size", 1)


def _number(args: argparse.Namespace, name: str, default: int) -> int:
    """Return an optional number; Megatron later refuses a missing one that it requires."""
    return getattr(args, name, None) or default
