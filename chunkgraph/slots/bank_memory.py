"""Estimate the memory of banks: variants of a plan's slots for context-parallel sizes and lengths.

A slot holds one microbatch of any bank. So its variants share memory, and together need as much as
the largest. In addition, each bank has tables that only its graphs read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chunkgraph.errors import ConfigError

from .estimate import estimate_memory
from .model_sizes import ModelSizes
from .plan import SlotPlan

__all__ = ["BankEstimate", "BankSizes", "estimate_banks"]

_TABLE_ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BankSizes:
    """The sizes that a bank is captured for.

    Attributes:
        context_parallel_size: Number of ranks that share one microbatch, a power of two.
        tokens_per_rank: Number of the microbatch's rows on each of them.
    """

    context_parallel_size: int
    tokens_per_rank: int

    def __post_init__(self) -> None:
        size = self.context_parallel_size
        if size < 1 or size.bit_count() != 1:
            raise ConfigError(f"banks: a context-parallel size of {size} is not a power of two")
        if self.tokens_per_rank < 1:
            raise ConfigError(
                f"banks: {self.tokens_per_rank} tokens per rank, but must be at least 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BankEstimate:
    """Estimated bytes of one bank on one rank.

    Attributes:
        context_parallel_size: Number of ranks that share one microbatch.
        tokens_per_rank: Number of the microbatch's rows on each of them.
        slots_per_chunk: Number of slots of each chunk, the most microbatches in flight.
        num_graphs: Number of graphs of this bank.
        slot_bytes: Bytes of all slots if this were the only bank.
        table_bytes: Bytes of the rotary tables over all rows of a microbatch, one for each size.
        added_bytes: Bytes that this bank adds to the larger banks before it: its tables, and the
            excess of its slots over theirs.
    """

    context_parallel_size: int
    tokens_per_rank: int
    slots_per_chunk: tuple[int, ...]
    num_graphs: int
    slot_bytes: int
    table_bytes: int
    added_bytes: int


def estimate_banks(
    plan: SlotPlan, model: ModelSizes, banks: Sequence[BankSizes]
) -> tuple[BankEstimate, ...]:
    """Estimate the memory of each bank, in the order of capture.

    The estimate omits the memory of graphs themselves, and the scratch that attention uses to
    gather from the other ranks of a group.

    Args:
        plan: Plan of the rank.
        model: Sizes of the model; each bank replaces the sequence length and microbatch size.
        banks: The banks in any order, without duplicates.

    Raises:
        ConfigError: There are no banks, or there are duplicates.
        TopologyError: See `estimate_memory`.
    """
    if not banks or len(set(banks)) != len(banks):
        raise ConfigError(f"banks: got {list(banks)}; pass at least one bank and no bank twice")
    order = sorted(banks, key=lambda b: (-b.context_parallel_size, -b.tokens_per_rank))
    head_size = model.hidden_size // model.num_attention_heads
    estimates: list[BankEstimate] = []
    most_bytes = 0
    tables: dict[int, int] = {}
    for bank in order:
        size, tokens = bank.context_parallel_size, bank.tokens_per_rank
        sized = replace(model, seq_length=tokens, micro_batch_size=1)
        slot_bytes = estimate_memory(plan, sized).slot_bytes
        table_bytes = size * tokens * head_size * _TABLE_ELEMENT_BYTES
        added = max(0, slot_bytes - most_bytes) + max(0, table_bytes - tables.get(size, 0))
        most_bytes = max(most_bytes, slot_bytes)
        tables[size] = max(table_bytes, tables.get(size, 0))
        estimates.append(
            BankEstimate(
                context_parallel_size=size,
                tokens_per_rank=tokens,
                slots_per_chunk=plan.slots_per_chunk,
                num_graphs=plan.num_graphs,
                slot_bytes=slot_bytes,
                table_bytes=table_bytes,
                added_bytes=added,
            )
        )
    return tuple(estimates)
