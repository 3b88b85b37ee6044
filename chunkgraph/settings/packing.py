"""The section ``packing`` and its rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from chunkgraph._text import shorten, shown
from chunkgraph.data.counts import check_counts
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.packing.offsets import MAX_TOKENS
from chunkgraph.settings.setting import NOT_NEGATIVE, POSITIVE, setting

if TYPE_CHECKING:
    from chunkgraph.settings.config import Config

__all__ = ["PackingConfig", "check_packing"]


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """Documents of any length, packed into microbatches of one shape without mixing."""

    max_packed_seqs: int = setting(
        0,
        help="Sequences per packed microbatch: its documents, and one for the remaining tokens. A "
        "step with more documents in a microbatch runs eagerly. 0: no packing.",
        bounds=NOT_NEGATIVE,
        flag="--cuda-graph-max-packed-seqs",
    )
    max_packed_tokens: int | None = setting(
        None,
        help="Rows per packed microbatch; with context_parallel_sizes, rows per rank. Null: "
        "model.seq_length.",
        bounds=POSITIVE,
        flag="--cuda-graph-max-packed-tokens",
        needs="packing.max_packed_seqs",
    )
    max_document_tokens: int | None = setting(
        None,
        help="Tokens of the longest document. A step with a longer one runs eagerly. Kernels "
        "receive the limit, which does not make cuDNN's attention faster; the remaining tokens "
        "then take more sequences, in addition to max_packed_seqs. Null: all rows.",
        bounds=POSITIVE,
        flag="--cuda-graph-max-document-tokens",
        needs="packing.max_packed_seqs",
    )
    pad_seq_to_mult: int = setting(
        1,
        help="Pad each document to a multiple of this many rows. With the block size of Mamba's "
        "kernels (Megatron: 128), documents do not affect each other's last bits, at the cost of "
        "half a block of padding per document on average.",
        bounds=POSITIVE,
    )
    buckets: tuple[float, ...] = setting(
        (),
        help="Shorter microbatches to capture as well, as fractions of the rows or as numbers of "
        "rows above 1. Each microbatch uses the smallest that holds it.",
        bounds=POSITIVE,
        flag="--cuda-graph-packed-buckets",
        needs="packing.max_packed_seqs",
    )
    seq_buckets: tuple[int, ...] | None = setting(
        None,
        help="Smaller sequence counts to capture as well. Each microbatch uses the smallest that "
        "holds its documents, because attention takes time for empty sequences too. Null: powers "
        "of two from 64 to half of max_packed_seqs, and 32 where the shortest microbatch has at "
        "most 1024 rows per rank. Empty: none.",
        flag="--cuda-graph-packed-seq-buckets",
        needs="packing.max_packed_seqs",
    )
    context_parallel_sizes: tuple[int, ...] = setting(
        (),
        help="Numbers of data-parallel ranks that may share a microbatch, powers of two. Each "
        "microbatch uses one of them. A step takes the documents that num_microbatches full "
        "microbatches hold, and its schedule decides how many microbatches they become. Empty: no "
        "sharing.",
        flag="--cuda-graph-cp-sizes",
        needs="packing.max_packed_seqs",
    )
    context_parallel_schedule: Literal["smallest", "random"] = setting(
        "smallest",
        help="How to choose a microbatch's size: the smallest that holds its documents (smallest), "
        "or one at random by train.seed, to exercise all graphs (random).",
        flag="--cuda-graph-cp-schedule",
        needs="packing.context_parallel_sizes",
    )
    captured_context_parallel_sizes: tuple[int, ...] = setting(
        (),
        help="The context_parallel_sizes to capture; steps with any other size run eagerly. "
        "Empty: all.",
        flag="--cuda-graph-cp-captured-sizes",
        needs="packing.context_parallel_sizes",
    )


def check_packing(config: Config) -> None:
    """Check the packing of documents, and what it cannot go together with.

    Raises:
        ConfigError: A value is out of range, or two settings cannot go together.
        TopologyError: The ranks cannot share the rows.
    """
    packing, model, train = config.packing, config.model, config.train
    if not packing.max_packed_seqs:
        _refuse_without_packing(config)
        return
    if packing.max_packed_seqs < 2:
        msg = (
            f"packing.max_packed_seqs is {packing.max_packed_seqs}; one sequence is for the rest "
            "of the tokens, so that at least 2 are needed. 0 turns packing off."
        )
        raise ConfigError(msg)
    for name, value in (
        ("packing.max_packed_seqs", packing.max_packed_seqs),
        ("packing.max_packed_tokens (else model.seq_length)", config.tokens_per_sequence),
    ):
        if value > MAX_TOKENS:
            msg = (
                f"{name} is {value}; offsets of packed documents count up to {MAX_TOKENS}. "
                "Lower it."
            )
            raise ConfigError(msg)
    _check_padding(config)
    _check_context(config)
    _check_longest(config)
    if counts := config.data.document_counts:
        check_counts(counts, "data.document_counts")
        num_ranks = config.pipeline.context_parallel_size
        least = math.lcm(1 if num_ranks == 1 else 2 * num_ranks, packing.pad_seq_to_mult)
        if counts[-1] * least > config.tokens_per_sequence:
            msg = (
                f"data.document_counts: {shown(list(counts))}; {counts[-1]} documents do not fit "
                f"in the {config.tokens_per_sequence} tokens of a microbatch, in which each takes "
                f"{least} or more. Lower the last number."
            )
            raise ConfigError(msg)
    for size in packing.buckets:
        if not 0 < size <= config.tokens_per_sequence or (size > 1 and size != int(size)):
            msg = (
                f"packing.buckets has {size:g}; a bucket is a part of the tokens above 0 and up to "
                f"1, or a whole number of tokens up to {config.tokens_per_sequence}."
            )
            raise ConfigError(msg)
    for count in packing.seq_buckets or ():
        if not 2 <= count < packing.max_packed_seqs:
            msg = (
                f"packing.seq_buckets has {count}; fewer sequences that are captured too are at "
                f"least 2 and below packing.max_packed_seqs ({packing.max_packed_seqs})."
            )
            raise ConfigError(msg)
    if train.micro_batch_size != 1:
        msg = (
            f"train.micro_batch_size is {train.micro_batch_size}, but a packed microbatch is one "
            "row of documents. Set it to 1, and packing.max_packed_tokens to what all of them had."
        )
        raise ConfigError(msg)
    if model.layer_spec == "local" or (model.layer_spec == "auto" and config.device == "cpu"):
        msg = (
            f"model.layer_spec is {shorten(model.layer_spec)} (device {config.device}): "
            "Megatron's local attention takes no packed sequences. Use transformer_engine on a "
            "GPU, or a layer spec of your own (package.module:function) whose attention takes them."
        )
        raise ConfigError(msg)
    if (
        model.position_embedding_type == "learned_absolute"
        and config.tokens_per_sequence > model.seq_length
    ):
        msg = (
            f"packing.max_packed_tokens is {config.tokens_per_sequence}, and learned positions end "
            f"at model.seq_length ({model.seq_length}). Lower the former or raise the latter."
        )
        raise ConfigError(msg)


def _refuse_without_packing(config: Config) -> None:
    """Refuse settings of packed documents while packing is off."""
    packing = config.packing
    values = {
        "data.document_counts": list(config.data.document_counts),
        "packing.buckets": list(packing.buckets),
        "packing.seq_buckets": list(packing.seq_buckets or ()),
        "packing.max_packed_tokens": packing.max_packed_tokens,
        "packing.max_document_tokens": packing.max_document_tokens,
        "packing.pad_seq_to_mult": packing.pad_seq_to_mult if packing.pad_seq_to_mult > 1 else None,
    }
    for name, value in values.items():
        if value is not None and value != []:
            raise ConfigError(
                f"{name} is {shown(value)}, but packing is off: packing.max_packed_seqs is 0. Set "
                "it to the most documents of a microbatch and 1."
            )


def _check_longest(config: Config) -> None:
    """The limit on documents."""
    packing, limit = config.packing, config.packing.max_document_tokens
    if limit is None:
        return
    if packing.context_parallel_sizes:
        msg = (
            f"packing.max_document_tokens is {limit} with packing.context_parallel_sizes "
            f"{shown(list(packing.context_parallel_sizes))}: a document may there have as many "
            "tokens as the most ranks hold. Set the former to null."
        )
        raise ConfigError(msg)
    if limit > config.tokens_per_sequence:
        msg = (
            f"packing.max_document_tokens is {limit}, more than the {config.tokens_per_sequence} "
            "tokens of a microbatch (packing.max_packed_tokens, else model.seq_length). Set it to "
            "null, or lower it."
        )
        raise ConfigError(msg)


def _check_padding(config: Config) -> None:
    """Padding of documents where their ranks change."""
    packing, multiple = config.packing, config.packing.pad_seq_to_mult
    if multiple > 1 and packing.context_parallel_sizes:
        msg = (
            f"packing.pad_seq_to_mult is {multiple} with packing.context_parallel_sizes "
            f"{shown(list(packing.context_parallel_sizes))}: documents are there padded for the "
            "ranks that share them. Set the former to 1."
        )
        raise ConfigError(msg)


def _check_context(config: Config) -> None:
    """Rows that ranks share, and what documents are padded to."""
    pipeline, size = config.pipeline, config.pipeline.context_parallel_size
    pieces = 1 if size == 1 else 2 * size
    parts = pieces
    if pipeline.sequence_parallel:
        parts = math.lcm(parts, size * pipeline.tensor_model_parallel_size)
    shared, multiple = parts, config.packing.pad_seq_to_mult
    parts = math.lcm(parts, multiple)
    rows = config.tokens_per_sequence
    if rows % parts:
        below = rows // parts * parts
        why = f"{size} context-parallel ranks hold two pieces of every document each"
        if shared > pieces:
            why += ", split once more for sequence parallelism"
        if size == 1:
            why = f"{shared} tensor-parallel ranks share them for sequence parallelism"
        if multiple > 1:
            padded = f"documents are padded to multiples of {multiple} (packing.pad_seq_to_mult)"
            why = padded if shared == 1 else f"{padded}, and {why}"
        msg = (
            f"packing.max_packed_tokens (else model.seq_length) is {rows}, which is not divisible "
            f"by {parts}: {why}. Set it to {f'{below} or ' if below else ''}{below + parts}."
        )
        raise TopologyError(msg)
