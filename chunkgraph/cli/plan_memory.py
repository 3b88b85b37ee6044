"""Report memory in ``chunkgraph plan``: a table, and whether it fits on a GPU."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from chunkgraph._text import format_bytes, shown
from chunkgraph.slots import MemoryEstimate, ModelSizes, SlotPlan, estimate_memory

__all__ = ["MEMORY_HEADINGS", "add_gpu_memory", "fit_lines", "fits", "kept_line", "memory_cells"]

MEMORY_HEADINGS = ("Rank", "Weights", "Gradients", "Optimizer", "Slots", "Scratch", "Sum")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)", re.IGNORECASE)
_UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}
_Estimates = Sequence[tuple[SlotPlan, MemoryEstimate]]


def add_gpu_memory(parser: argparse.ArgumentParser) -> None:
    """Add the option that sets the memory of a GPU."""
    parser.add_argument(
        "--gpu-memory",
        type=_byte_count,
        metavar="SIZE",
        help="compare the memory of each rank with that of a GPU, such as 80GiB",
    )


def _byte_count(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a size; write it as 80GiB or 80GB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def memory_cells(plan: SlotPlan, memory: MemoryEstimate) -> list[str]:
    """Return a rank's row of the table."""
    sizes = (
        memory.parameter_bytes,
        memory.gradient_bytes,
        memory.optimizer_bytes,
        memory.slot_bytes,
        memory.scratch_bytes + memory.logit_bytes,
        memory.total_bytes,
    )
    return [str(plan.rank), *map(format_bytes, sizes)]


def fits(estimates: _Estimates, gpu_bytes: int) -> bool:
    """Return whether every rank's sum fits in the memory of a GPU."""
    return all(memory.total_bytes <= gpu_bytes for _, memory in estimates)


def kept_line(estimates: _Estimates) -> str:
    """Compare what graphs keep between steps with the activations of eager training."""
    plan, memory = max(estimates, key=lambda one: one[1].slot_bytes)
    one_slot = memory.slot_bytes_per_chunk[0]
    kept = format_bytes(memory.slot_bytes + memory.scratch_bytes)
    eager = format_bytes(plan.peak_in_flight * one_slot)
    return (
        f"One slot: {format_bytes(one_slot)}. Graphs keep {kept} of slots and scratch between "
        f"steps (rank {plan.rank}); eager training has {eager} of activations at its peak."
    )


def fit_lines(
    estimates: _Estimates, model: ModelSizes, gpu_bytes: int, *, shared_slots: bool
) -> Iterator[str]:
    """Yield whether the largest rank fits and, if it does not, what lowers its memory."""
    plan, memory = max(estimates, key=lambda one: one[1].total_bytes)
    size, total = format_bytes(gpu_bytes), format_bytes(memory.total_bytes)
    if fits(estimates, gpu_bytes):
        left = format_bytes(gpu_bytes - memory.total_bytes)
        yield (
            f"Fits in {size}: rank {plan.rank} needs {total}. {left} are left for CUDA, NCCL, "
            "workspaces and fragmentation, which are not estimated."
        )
        return
    yield f"Does not fit in {size}: rank {plan.rank} needs {total}. With one change:"
    for name, other in _alternatives(plan, model, shared_slots=shared_slots):
        if other.total_bytes < memory.total_bytes:
            mark = ", fits" if other.total_bytes <= gpu_bytes else ""
            yield f"  {name}: {format_bytes(other.total_bytes)}{mark}"


def _alternatives(
    plan: SlotPlan, model: ModelSizes, *, shared_slots: bool
) -> Iterator[tuple[str, MemoryEstimate]]:
    if not shared_slots:
        yield "shared_slots=true", estimate_memory(plan, model, shared_slots=True)
    half = model.micro_batch_size // 2
    changes = {
        "recompute_granularity=full": replace(
            model, recompute_group_size=1, num_recomputed_layers=None
        ),
        "use_distributed_optimizer, 8 copies": replace(model, num_optimizer_shards=8),
        f"micro_batch_size={half}": replace(model, micro_batch_size=max(half, 1)),
        f"tensor_model_parallel_size={2 * model.tensor_parallel_size}": replace(
            model, tensor_parallel_size=2 * model.tensor_parallel_size
        ),
    }
    if model.num_optimizer_shards > 1:
        del changes["use_distributed_optimizer, 8 copies"]
    for name, changed in changes.items():
        yield name, estimate_memory(plan, changed, shared_slots=shared_slots)
