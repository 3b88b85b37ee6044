"""Memory of the banks of a plan: variants of its slots for context-parallel sizes and lengths.

A slot holds one microbatch, whatever its bank, so its variants lie in the same memory, and all of
them together take what the largest takes. What a bank adds are the tables that it alone reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chunkgraph.errors import ConfigError

from .estimate import ModelSizes, estimate_memory
from .plan import SlotPlan

__all__ = ["BankEstimate", "BankSizes", "estimate_banks"]

_TABLE_ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BankSizes:
    """What a bank is captured for.

    Attributes:
        context_parallel_size: Ranks that share one microbatch, a power of two.
        tokens_per_rank: Rows of it on one of them.
    """

    context_parallel_size: int
    tokens_per_rank: int

    def __post_init__(self) -> None:
        size = self.context_parallel_size
        if size < 1 or size.bit_count() != 1:
            raise ConfigError(f"banks: a context-parallel size of {size} is no power of two")
        if self.tokens_per_rank < 1:
            raise ConfigError(f"banks: {self.tokens_per_rank} tokens on a rank; at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class BankEstimate:
    """Estimated bytes of one bank on one rank.

    Attributes:
        context_parallel_size: Ranks that share one microbatch.
        tokens_per_rank: Rows of it on one of them.
        slots_per_chunk: Slots of each chunk; no more microbatches of the bank are ever in flight.
        num_graphs: Of this bank.
        slot_bytes: What all slots would take if it was the only bank.
        table_bytes: Rotary tables over all rows of a microbatch; one for each size.
        added_bytes: What it adds to the banks before it, which are larger: tables, and what its
            slots take beyond theirs.
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
    """Estimate the memory that each bank needs, in the order in which they are captured.

    What attention gathers from the other ranks of a group is scratch and not in it, as is what a
    graph itself takes.

    Args:
        plan: Of the rank.
        model: Its sequence length and microbatch size are replaced by each bank's.
        banks: In any order, without doubles.

    Raises:
        ConfigError: There is no bank, or one is there twice.
        TopologyError: See `estimate_memory`.
    """
    if not banks or len(set(banks)) != len(banks):
        raise ConfigError(f"banks: give different ones, and at least one, not {list(banks)}")
    order = sorted(banks, key=lambda b: (-b.context_parallel_size, -b.tokens_per_rank))
    head_size = model.hidden_size // model.num_attention_heads
    found: list[BankEstimate] = []
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
        found.append(
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
    return tuple(found)
