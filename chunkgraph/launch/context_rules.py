"""Changing context-parallel sizes in a pretrain script: limits, and what they do not go with."""

from __future__ import annotations

import argparse
import os
from typing import Any

from chunkgraph.launch.flags import GraphFlags, flag_of
from chunkgraph.megatron.features.experts.refusals import packed_moe_refusals
from chunkgraph.megatron.features.packing.attention_limits import shares_keys
from chunkgraph.packing import ContextLimits

__all__ = ["changing_limits", "changing_refusals"]

_SIZES, _TOKENS, _DOCUMENT, _BUCKETS = (
    flag_of(f"packing.{name}")
    for name in ("context_parallel_sizes", "max_packed_tokens", "max_document_tokens", "buckets")
)


def changing_refusals(flags: GraphFlags, args: argparse.Namespace) -> list[str]:
    """What of ``args`` keeps context-parallel sizes from changing, each with its flag.

    Args:
        flags: those of chunk graphs, with sizes.
        args: Megatron's, parsed but not yet checked or filled in by it.
    """
    assert flags.contexts is not None
    every = flags.contexts.every
    asked = f"{_SIZES} {' '.join(map(str, every))}"
    refused = {
        f"{asked} without --sft: other data sets do not give whole documents": not _of(args, "sft"),
        (
            f"{asked} without --calculate-per-token-loss: a mean over each rank's microbatch would "
            "weigh a document by how many share it; add it"
        ): not _of(args, "calculate_per_token_loss"),
        (
            f"{asked} with --context-parallel-size {_of(args, 'context_parallel_size')}: the "
            "groups are cut from the data-parallel ranks; use 1"
        ): (_of(args, "context_parallel_size") or 1) > 1,
        (
            f"{asked} with --micro-batch-size {_of(args, 'micro_batch_size')}: a microbatch is one "
            f"row of documents; use 1, and {_TOKENS} for its length"
        ): (_of(args, "micro_batch_size") or 1) > 1,
        (
            f"{asked} with {_DOCUMENT}: a document may have as many tokens as the most ranks hold; "
            "leave one of them out"
        ): flags.packing.max_document_tokens is not None,
        (
            f"{asked} with {_BUCKETS}: banks of several lengths were not joined to a pretrain "
            "script; leave one of them out"
        ): bool(flags.packing.buckets),
        (
            f"{asked} with --fp8-format: scales of ranks whose microbatches have several sizes "
            "were not tried; leave one of them out"
        ): bool(_of(args, "fp8")),
        (
            f"{asked} with --mtp-num-layers: several tokens are predicted over the rows of one "
            "rank alone; leave one of them out"
        ): bool(_of(args, "mtp_num_layers")),
        (
            f"{asked} with --hybrid-layer-pattern: the heads of a mixer are shared by the ranks "
            "that it was built for; leave one of them out"
        ): bool(_of(args, "hybrid_layer_pattern")),
        **{
            (
                f"{asked} with --recompute-modules {name}: it would be computed anew with the "
                "context-parallel group of another microbatch; leave it out"
            ): _of(args, "recompute_granularity") == "selective"
            and name in (_of(args, "recompute_modules") or ())
            for name in ("moe", "mla_up_proj")
        },
    }
    found = [text for text, is_refused in refused.items() if is_refused]
    if _of(args, "num_experts"):
        found += [f"{asked} with {refusal}" for refusal in packed_moe_refusals(args)]
    return [*found, *_refusals_of_ranks(asked, max(every), args), *_of_rows(flags, args, asked)]


def changing_limits(
    flags: GraphFlags, args: argparse.Namespace, world_size: int, group_size: int
) -> ContextLimits:
    """What the schedules of all steps keep to.

    Args:
        flags: those of chunk graphs, with sizes.
        args: Megatron's.
        world_size: data-parallel ranks.
        group_size: what the number of microbatches is a multiple of.

    Raises:
        PackingError: there are no such groups.
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


def _refusals_of_ranks(asked: str, largest: int, args: argparse.Namespace) -> list[str]:
    """What the number of processes is too small for, where it is known already."""
    num_processes = int(os.environ.get("WORLD_SIZE", "0"))
    ranks = (_of(args, "tensor_model_parallel_size") or 1) * (
        _of(args, "pipeline_model_parallel_size") or 1
    )
    if not num_processes or num_processes % ranks:
        return []  # Megatron refuses the latter
    num_copies = num_processes // ranks
    if num_copies.bit_count() > 1:
        why = (
            f"with {num_copies} data-parallel ranks: groups of 1, 2, 4, ... neighbours divide a "
            "power of two alone; change the number of processes"
        )
    elif largest > num_copies:
        why = (
            f"with {num_copies} data-parallel ranks: they are too few for a microbatch of "
            f"{largest}; leave that size out, or start more processes"
        )
    else:
        return []
    return [f"{asked} {why}"]


def _of_rows(flags: GraphFlags, args: argparse.Namespace, asked: str) -> list[str]:
    """What the rows of a rank do not fit together with."""
    assert flags.contexts is not None
    length = _of(args, "seq_length") or 1
    rows, largest = flags.packing.max_packed_tokens or length, max(flags.contexts.every)
    tensor_ranks = _of(args, "tensor_model_parallel_size") or 1
    parts = tensor_ranks if _of(args, "sequence_parallel") else 1
    parts *= 2 if largest > 1 and parts % 2 else 1
    name = f"{_TOKENS} {rows}" if flags.packing.max_packed_tokens else f"--seq-length {length}"
    found = []
    if rows % parts:
        found.append(
            f"{asked} with {name}: the rows of a rank do not divide in {parts} parts; use a "
            f"multiple of {parts}"
        )
    if rows * largest < length:
        found.append(
            f"{asked} with {name}: {largest} ranks hold {rows * largest} rows, and documents may "
            f"have --seq-length {length}; allow more ranks or rows"
        )
    if rows != length and tensor_ranks > 1:
        found.append(
            f"{asked} with {name} and --tensor-model-parallel-size {tensor_ranks}: the script's "
            f"other ranks receive rows of --seq-length {length}; leave {_TOKENS} out"
        )
    return found


def _of(args: argparse.Namespace, name: str) -> Any:
    return getattr(args, name, None)
