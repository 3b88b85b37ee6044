"""The sections ``train``, ``data`` and ``run``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chunkgraph.settings.setting import NOT_NEGATIVE, POSITIVE, Bounds, setting

__all__ = ["DataConfig", "RunConfig", "TrainConfig"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training steps."""

    num_microbatches: tuple[int, ...] = setting(
        help="Microbatches of each step, per data-parallel rank. The length of the list is the "
        "number of steps.",
        bounds=POSITIVE,
        example=(4, 6, 8),
    )
    micro_batch_size: int = setting(1, help="Sequences per microbatch.", bounds=POSITIVE)
    seed: int = setting(
        1234,
        help="Seed for the initial weights, dropout and the order of the data.",
        bounds=NOT_NEGATIVE,
    )
    lr: float = setting(1e-3, help="Learning rate of Adam.", bounds=POSITIVE)
    clip_grad: float = setting(
        1.0,
        help="Maximum gradient norm; larger gradients are scaled down to it. 0 turns clipping off.",
        bounds=NOT_NEGATIVE,
    )
    compare: Literal["eager", "none"] = setting(
        "eager",
        help="Also train the same steps eagerly and compare every bit (eager), or do not (none).",
    )
    use_ddp: bool = setting(True, help="Wrap model chunks in Megatron's DistributedDataParallel.")
    overlap_grad_reduce: bool = setting(
        False, help="Reduce gradients while the backward pass runs."
    )
    gradient_accumulation_fusion: bool = setting(
        False,
        help="Accumulate weight gradients into main_grad in the GEMM. Needs Transformer Engine's "
        "layers.",
    )
    use_distributed_optimizer: bool = setting(
        False, help="Shard the optimizer state over the data-parallel ranks."
    )
    overlap_param_gather: bool = setting(
        False, help="Gather parameters of a sharded optimizer while the next forward runs."
    )
    deterministic: bool = setting(
        True, help="Use only kernels whose results repeat to the last bit."
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training text."""

    path: str | None = setting(
        None,
        help="Text file, read as bytes; blank lines separate documents. Null: the text that ships "
        "with the package.",
    )
    document_counts: tuple[int, ...] = setting(
        (),
        help="Draw the number of documents per microbatch from a distribution, given by its 50%, "
        "90%, 99% and 100% quantiles; documents are then stretches of the text of random lengths. "
        "Empty: whole documents of the text, as many as fit.",
        needs="packing.max_packed_seqs",
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The processes of the run."""

    timeout_s: float = setting(
        120.0,
        help="Longest time in seconds for a collective.",
        bounds=Bounds(above=0, maximum=10**9),
    )
    debug: bool = setting(
        False, help="Show tracebacks, warnings and the output of worker processes."
    )
