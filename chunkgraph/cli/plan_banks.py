"""The banks that ``chunkgraph plan`` shows: by context-parallel size and by length."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from fractions import Fraction

from chunkgraph._text import format_bytes
from chunkgraph.cli.arguments import whole_number
from chunkgraph.errors import ConfigError
from chunkgraph.packing import PackedShape, bucket_multiple
from chunkgraph.packing.seq_counts import default_seq_buckets
from chunkgraph.settings import Config, resolved
from chunkgraph.slots import BankEstimate, BankSizes

__all__ = ["BANK_HEADINGS", "add_bank_arguments", "bank_rows", "banks_of", "seq_counts_of"]

BANK_HEADINGS = ("Rank", "CP", "Tokens a rank", "Slots", "Graphs", "Alone", "Tables", "Adds")


def add_bank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose banks."""
    parser.add_argument(
        "--cuda-graph-cp-sizes",
        type=whole_number,
        nargs="+",
        default=[],
        metavar="C",
        help="with CONFIG, after it: context-parallel sizes of the banks, powers of two (default: "
        "the config's packing.captured_context_parallel_sizes, or context_parallel_sizes)",
    )
    parser.add_argument(
        "--cuda-graph-max-packed-tokens",
        type=whole_number,
        metavar="T",
        help="rows of a microbatch on each context-parallel rank (default: the config's tokens "
        "over its context_parallel_size)",
    )


def banks_of(args: argparse.Namespace, config: Config) -> tuple[BankSizes, ...]:
    """Return the banks to plan; empty without sizes or length buckets.

    Raises:
        ConfigError: Sizes or token counts are impossible, or no run would have the lengths.
    """
    static = config.pipeline.context_parallel_size
    sizes = _sizes_of(args, config)
    if args.cuda_graph_max_packed_tokens is not None and not sizes:
        raise ConfigError("plan: --cuda-graph-max-packed-tokens needs --cuda-graph-cp-sizes")
    whole = config.tokens_per_sequence
    if not sizes:
        return tuple(
            BankSizes(context_parallel_size=static, tokens_per_rank=shape.tokens_per_rank)
            for shape in _buckets_of(config)
        )
    most = args.cuda_graph_max_packed_tokens
    if most is None:
        most = -(-whole // static)
    elif most % 2 and max(sizes) > 1:
        raise ConfigError(
            f"plan: --cuda-graph-max-packed-tokens {most} is odd, and ranks that share a "
            "microbatch each hold two pieces of every document. Give an even number."
        )
    # A bucket is a fraction of the whole, or a number of tokens.
    parts = [b if b <= 1 else Fraction(int(b), whole) for b in config.packing.buckets]
    lengths = {most, *(max(1, math.ceil(most * part)) for part in parts)}
    return tuple(
        BankSizes(context_parallel_size=size, tokens_per_rank=length)
        for size in sorted(set(sizes), reverse=True)
        for length in sorted(lengths, reverse=True)
    )


def rows_of_a_rank(config: Config, banks: Sequence[BankSizes]) -> int:
    """Return the number of rows of the longest microbatch on one rank.

    Args:
        config: The run's configuration.
        banks: The run's banks, from `banks_of`.
    """
    tokens = -(-config.tokens_per_sequence // config.pipeline.context_parallel_size)
    return max((bank.tokens_per_rank for bank in banks), default=tokens)


def _sizes_of(args: argparse.Namespace, config: Config) -> Sequence[int]:
    """Return the context-parallel sizes that microbatches may have; empty if all have the same."""
    packing = config.packing
    sizes: Sequence[int] = args.cuda_graph_cp_sizes
    return sizes or packing.captured_context_parallel_sizes or packing.context_parallel_sizes


def _buckets_of(config: Config) -> tuple[PackedShape, ...]:
    """Return the shapes that a run captures, largest first; empty without shorter ones."""
    packing, pipeline = config.packing, config.pipeline
    if not packing.buckets:
        return ()
    shape = PackedShape(
        packing.max_packed_seqs,
        config.tokens_per_sequence,
        pipeline.context_parallel_size,
        counts_padding=True,  # the lengths do not depend on this
        pad_seq_to_mult=packing.pad_seq_to_mult,
    )
    tensor_ranks = pipeline.tensor_model_parallel_size if pipeline.sequence_parallel else 1
    multiple = bucket_multiple(
        pipeline.context_parallel_size,
        sequence_parallel_size=tensor_ranks,
        in_fp8=config.model.fp8 is not None,
    )
    return shape.buckets(packing.buckets, multiple_of=multiple)


def seq_counts_of(
    args: argparse.Namespace, config: Config, banks: Sequence[BankSizes]
) -> tuple[int, ...]:
    """Return the numbers of packed sequences that are captured; empty if there is only one.

    Args:
        args: Arguments of the command.
        config: The run's configuration.
        banks: The run's banks, from `banks_of`.
    """
    most, fewer = config.packing.max_packed_seqs, config.packing.seq_buckets
    if fewer is None and _sizes_of(args, config):
        fewer = default_seq_buckets(most, min(bank.tokens_per_rank for bank in banks))
    elif fewer is None:
        fewer = resolved(config).packing.seq_buckets
    return tuple(sorted({most, *fewer}, reverse=True)) if fewer else ()


def bank_rows(rank: int, banks: tuple[BankEstimate, ...]) -> list[list[str]]:
    """Return a row of the table for each bank of a rank."""
    return [
        [
            str(rank),
            str(bank.context_parallel_size),
            str(bank.tokens_per_rank),
            " ".join(map(str, bank.slots_per_chunk)),
            str(bank.num_graphs),
            format_bytes(bank.slot_bytes),
            format_bytes(bank.table_bytes),
            format_bytes(bank.added_bytes),
        ]
        for bank in banks
    ]
