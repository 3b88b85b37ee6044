"""The section ``capture``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chunkgraph.settings.setting import NOT_NEGATIVE, setting

__all__ = ["CaptureConfig"]


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """How chunks are captured."""

    enabled: bool = setting(
        True,
        help="Capture chunks as graphs. False trains eagerly through the same code.",
    )
    scope: Literal["auto", "block", "chunk"] = setting(
        "auto",
        help="What a graph holds: the transformer block (block), or the whole forward of a chunk, "
        "including embedding, output layer and loss (chunk). auto takes chunk where it can be "
        "captured, and block otherwise; the run's first line names the choice and the reason.",
        flag="--cuda-graph-chunk-scope",
    )
    num_warmup_steps: int = setting(
        1,
        help="Eager training steps before the capture.",
        bounds=NOT_NEGATIVE,
        megatron="--cuda-graph-warmup-steps",
    )
    shared_slots: bool = setting(
        False,
        help="Share slots between the model chunks of a rank. Interleaved schedules then use less "
        "memory, but capture every chunk in every slot.",
        flag="--cuda-graph-shared-slots",
    )
    verify: Literal["none", "poison", "shadow"] = setting(
        "none",
        help="How to check replays. poison fills freed slots and scratch memory with NaN around "
        "every replay, which exposes reads of stale memory; shadow compares every replay with an "
        "eager pass on the same inputs. Both are slow.",
        flag="--cuda-graph-verify",
    )
    num_verify_steps: int | None = setting(
        None,
        help="Number of replayed steps after a capture to verify. Null: all.",
        bounds=NOT_NEGATIVE,
        flag="--cuda-graph-num-verify-steps",
        needs="capture.verify",
    )
    on_failure: Literal["raise", "eager"] = setting(
        "raise",
        help="After a capture that failed on any rank: raise the error, or continue training "
        "eagerly.",
        flag="--cuda-graph-on-failure",
    )
