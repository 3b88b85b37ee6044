"""``chunkgraph packing``: find packed shapes for a dataset's documents; needs no torch."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from chunkgraph._outputs import check_output, is_stdout, output_file, write_output
from chunkgraph._text import shown
from chunkgraph.cli.arguments import add_json, prints_json, whole_number
from chunkgraph.cli.packing_plot import check_picture
from chunkgraph.cli.packing_progress import PackingProgress
from chunkgraph.errors import ConfigError
from chunkgraph.packing import (
    DocumentLengths,
    LongDocuments,
    PackedShape,
    ReadOptions,
    ValueKind,
    fit_long_documents,
    pack_in_order,
    read_lengths,
    recommend,
    sizes_of,
)
from chunkgraph.packing.offsets import MAX_TOKENS
from chunkgraph.packing.study import PackingStudy

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Read the lengths of a dataset's documents and find how many sequences (N) and
tokens (T) the graphs of a packed microbatch should hold: the share of steps
that would not fit and run eagerly, and the share of rows that would be
padding. One microbatch that does not fit, on any data-parallel rank, makes its
whole step eager.

  chunkgraph packing --lengths sft.jsonl --max-packed-tokens 8192
  chunkgraph packing --lengths my_text_document --target-fallback 0.5%
"""
_EPILOG = """\
LENGTHS is a Megatron dataset (its .idx file, or the path before it), JSON
lines (a length, tokens, text or a conversation under a key), or whole numbers,
one document per line. Documents are shuffled and packed end to end. A
microbatch ends before the first document that does not fit, as in a data path
without graphs. If lines hold several lengths each, every line is one packed
microbatch and is used unchanged. Steps draw microbatches in random order.

N counts the dummy sequence that fills the tail: N - 1 documents fit. Misfits
are microbatches with more documents or tokens than that.
"""
_DEFAULT_CAPACITY = 4096
_DEFAULT_MICROBATCHES = 8
# Kernels process tiles of this many rows.
_ROUND_TOKENS = 128


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "packing",
        help="shapes for packed sequences, from a dataset's lengths; needs no torch",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lengths", metavar="LENGTHS", required=True, type=Path, help="see below")
    parser.add_argument(
        "--target-fallback",
        metavar="SHARE",
        default="1%",
        help="share of steps that may run eagerly: 1%% or 0.01 (default 1%%)",
    )
    parser.add_argument(
        "--max-packed-tokens",
        type=whole_number,
        metavar="T",
        help="tokens that a microbatch is packed with, over all context-parallel ranks; also the "
        "largest T to consider (default: the power of two above the longest document, at least "
        f"{_DEFAULT_CAPACITY}; for packed microbatches, room for the largest)",
    )
    parser.add_argument(
        "--max-document-tokens",
        type=whole_number,
        metavar="L",
        help="tokens that a document may have (default: T); --long-documents decides what happens "
        "to longer ones",
    )
    parser.add_argument(
        "--max-packed-seqs",
        type=whole_number,
        metavar="N",
        nargs="+",
        default=[],
        help="further values of N to consider",
    )
    parser.add_argument(
        "--num-microbatches",
        type=whole_number,
        metavar="M",
        help=f"microbatches of a step on each data-parallel rank (default {_DEFAULT_MICROBATCHES})",
    )
    parser.add_argument(
        "--data-parallel-size",
        type=whole_number,
        metavar="D",
        help="data-parallel ranks (default 1)",
    )
    parser.add_argument(
        "--global-batch-size",
        type=whole_number,
        metavar="G",
        help="packed microbatches of a step on all ranks, instead of M and D",
    )
    parser.add_argument(
        "--context-parallel-size",
        type=whole_number,
        metavar="C",
        default=1,
        help="pads each document to a multiple of 2 C rows (default 1: not at all)",
    )
    parser.add_argument(
        "--pad-seq-to-mult",
        type=whole_number,
        metavar="K",
        default=1,
        help="pads each document to a multiple of K rows (default 1; 128 keeps documents apart to "
        "the last bit in Mamba layers)",
    )
    _add_document_options(parser)
    add_json(parser)
    parser.add_argument(
        "--plot", type=output_file, metavar="FILE", help="draw the choice (.png, .svg or .pdf)"
    )


def _add_document_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--long-documents",
        choices=[policy.value for policy in LongDocuments],
        default=LongDocuments.TRUNCATE.value,
        help="what to do with documents longer than L (default: T): truncate or split them, or "
        "keep them, so that their steps fall back (default truncate)",
    )
    parser.add_argument("--key", metavar="KEY", help="JSON lines: the key that holds the document")
    parser.add_argument(
        "--value",
        choices=[kind.value for kind in ValueKind],
        default=ValueKind.AUTO.value,
        help="JSON lines: what the value is; lengths are of one packed microbatch (default auto)",
    )
    parser.add_argument(
        "--bytes-per-token",
        type=float,
        metavar="B",
        default=4.0,
        help="JSON lines of text: bytes per token for the estimate (default 4)",
    )
    parser.add_argument(
        "--seed",
        type=whole_number,
        default=0,
        help="seed for the order of the documents (default 0)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the subcommand.

    Returns:
        The exit code: 0, or 1 when no shape meets the target.

    Raises:
        ConfigError: The arguments or the file are wrong, or the picture cannot be written.
        MissingDependencyError: The picture needs matplotlib.
        OutputError: Writing the picture failed.
    """
    from chunkgraph.cli import packing_plot, packing_report

    # Check before reading a long file.
    check_output("packing: --json", args.json)
    check_picture(args.plot)
    if prints_json(args) and args.plot and is_stdout(args.plot):
        msg = "packing: --json and --plot cannot both be written to standard output"
        raise ConfigError(msg)
    study = _study(args)
    if args.plot is not None:
        packing_plot.draw(study, args.plot)
    if args.json is not None:
        content = json.dumps(packing_report.as_json(study), indent=2)
        write_output("packing: --json", args.json, f"{content}\n")
    if not prints_json(args):
        packing_report.print_study(study, args.plot)
    return 0 if study.result.best is not None else 1


def _study(args: argparse.Namespace) -> PackingStudy:
    target = _share(args.target_fallback)
    per_step = _microbatches_per_step(args)
    for num_seqs in args.max_packed_seqs:
        _at_least(2, "--max-packed-seqs", num_seqs)
    _at_least(0, "--seed", args.seed)
    if not args.bytes_per_token > 0:
        msg = f"packing: --bytes-per-token {args.bytes_per_token:g} is not above 0"
        raise ConfigError(msg)
    wanted_tokens: int | None = args.max_packed_tokens
    if args.max_document_tokens is not None:
        _at_least(1, "--max-document-tokens", args.max_document_tokens)
    _at_least(1, "--pad-seq-to-mult", args.pad_seq_to_mult)
    # Report a wrong size before reading a long file.
    if wanted_tokens is not None or args.context_parallel_size < 1:
        _capacity(args.max_document_tokens or 1 if wanted_tokens is None else wanted_tokens, args)
    elif _multiple(args) > MAX_TOKENS:
        msg = (
            f"packing: --context-parallel-size {args.context_parallel_size} with --pad-seq-to-mult "
            f"{args.pad_seq_to_mult} pads documents to multiples of {_multiple(args)} rows; "
            f"offsets end at {MAX_TOKENS}"
        )
        raise ConfigError(msg)
    options = ReadOptions(
        key=args.key, kind=ValueKind(args.value), bytes_per_token=args.bytes_per_token
    )
    policy = LongDocuments(args.long_documents)
    with PackingProgress() as progress:
        lengths = read_lengths(args.lengths, options, progress.phase("reading"))
        tokens = lengths.tokens
        capacity = _capacity(
            _default_capacity(lengths, args) if wanted_tokens is None else wanted_tokens, args
        )
        num_long = int((tokens > capacity.document_limit).sum())
        ends = lengths.microbatch_ends
        if ends is None:
            tokens = fit_long_documents(tokens, capacity.document_limit, policy)
            tokens = np.random.default_rng(args.seed).permutation(tokens)
            ends = pack_in_order(tokens, capacity, progress.phase("packing"))
        sizes = sizes_of(tokens, ends, capacity)
    return PackingStudy(
        path=str(args.lengths),
        lengths=lengths,
        num_long=num_long,
        long_documents=policy if lengths.microbatch_ends is None else LongDocuments.KEEP,
        sizes=sizes,
        capacity=capacity,
        is_default_capacity=wanted_tokens is None,
        microbatches_per_step=per_step,
        target=target,
        extra_seqs=tuple(args.max_packed_seqs),
        result=recommend(
            sizes,
            capacity,
            microbatches_per_step=per_step,
            target=target,
            extra_seqs=args.max_packed_seqs,
        ),
    )


def _share(text: str) -> float:
    """Parse ``1%`` or ``0.01`` as a number below 1."""
    is_percent = text.rstrip().endswith("%")
    try:
        value = float(text.rstrip().removesuffix("%")) / (100 if is_percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        msg = (
            f"packing: --target-fallback {shown(text)} is not a share below 1. Write a percentage, "
            "such as 1%, or a fraction, such as 0.01"
        )
        raise ConfigError(msg)
    return value


def _at_least(least: int, flag: str, value: int) -> int:
    if value < least:
        msg = f"packing: {flag} {value} is below {least}"
        raise ConfigError(msg)
    return value


def _microbatches_per_step(args: argparse.Namespace) -> int:
    if args.global_batch_size is not None:
        if args.num_microbatches is not None or args.data_parallel_size is not None:
            msg = (
                "packing: --global-batch-size counts the microbatches of all ranks; leave out "
                "--num-microbatches and --data-parallel-size"
            )
            raise ConfigError(msg)
        return _at_least(1, "--global-batch-size", args.global_batch_size)
    num = _DEFAULT_MICROBATCHES if args.num_microbatches is None else args.num_microbatches
    ranks = 1 if args.data_parallel_size is None else args.data_parallel_size
    return _at_least(1, "--num-microbatches", num) * _at_least(1, "--data-parallel-size", ranks)


def _capacity(tokens: int, args: argparse.Namespace) -> PackedShape:
    return PackedShape(
        max_packed_seqs=2,
        max_packed_tokens=tokens,
        context_parallel_size=args.context_parallel_size,
        max_document_tokens=args.max_document_tokens,
        counts_padding=args.pad_seq_to_mult > 1,
        pad_seq_to_mult=args.pad_seq_to_mult,
    )


def _multiple(args: argparse.Namespace) -> int:
    """Return the multiple of rows that documents are padded to, from unchecked arguments."""
    pieces = 1 if args.context_parallel_size == 1 else 2 * args.context_parallel_size
    return math.lcm(pieces, args.pad_seq_to_mult)


def _default_capacity(lengths: DocumentLengths, args: argparse.Namespace) -> int:
    multiple = _multiple(args)
    # The user set no size, so limit the default to what offsets can count.
    most = MAX_TOKENS // multiple * multiple
    if lengths.microbatch_ends is not None:
        padded = -(-lengths.tokens // multiple) * multiple
        totals = np.concatenate([[0], np.cumsum(padded)])[lengths.microbatch_ends]
        unit = math.lcm(_ROUND_TOKENS, multiple)
        return min(most, -(-int(np.diff(totals, prepend=0).max()) // unit) * unit)
    longest = int(lengths.tokens.max())
    if args.max_document_tokens is not None:
        longest = args.max_document_tokens
    longest = max(_DEFAULT_CAPACITY, longest)
    power = 1 << (longest - 1).bit_length()
    return min(most, -(-power // multiple) * multiple)
