"""Transformer Engine chooses the attention of a capture apart from that of eager steps."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chunkgraph.errors import CaptureError

__all__ = ["same_attention"]

_MODULE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
_KINDS = ("use_flash_attention", "use_fused_attention", "use_unfused_attention")
_NONE_LEFT = "No dot product attention backend"
# The rule is in `nvte_get_fused_attn_backend` of Transformer Engine 2.x.
_ADVICE = (
    "With cuDNN up to 9.15 it does not capture cuDNN's attention where the length of a sequence "
    "(under context parallelism: half of a rank's) is no multiple of 128. To do: take a length "
    "that is, or a newer cuDNN, or install flash-attn; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 shows other "
    "reasons."
)


@contextmanager
def same_attention() -> Iterator[None]:
    """Around captures: their attention is the one that eager steps ran for the same arguments.

    Another one would compute other bits than eager training, and slower.

    Raises:
        CaptureError: Transformer Engine chose another one, or has none for a capture.
    """
    before = _last_choice()
    try:
        yield
    except ValueError as error:
        if _NONE_LEFT in str(error) and before is not None:
            error.args = (f"{error} {_ADVICE}",)
        raise
    after = _last_choice()
    if before is None or after is None or before[0] != after[0] or before[1] == after[1]:
        return
    told = [
        ", ".join(kinds).replace("use_", "").replace("_", " ") for kinds in (before[1], after[1])
    ]
    raise CaptureError(
        f"Transformer Engine ran {told[0]} in eager steps and takes {told[1]} in captures, which "
        f"computes other bits. {_ADVICE}"
    )


def _last_choice() -> tuple[Any, tuple[str, ...]] | None:
    """Arguments of the attention that ran last, as if it had been captured, and what it ran."""
    found = getattr(sys.modules.get(_MODULE), "_attention_backends", None) or {}
    arguments = found.get("attention_params")
    if arguments is None or not hasattr(arguments, "cuda_graph"):
        return None
    arguments = copy.copy(arguments)
    arguments.cuda_graph = True
    return arguments, tuple(kind for kind in _KINDS if found.get(kind))
