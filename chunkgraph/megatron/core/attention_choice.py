"""Check that Transformer Engine chooses the same attention for a capture as for eager steps."""

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
    "With cuDNN up to 9.15 it does not capture cuDNN's attention if the length of a sequence "
    "(under context parallelism: half of a rank's) is not a multiple of 128. To do: use a multiple "
    "of 128, or a newer cuDNN, or install flash-attn; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 shows other "
    "reasons."
)


@contextmanager
def same_attention() -> Iterator[None]:
    """Check, around captures, that they run the attention that eager steps ran.

    Another backend computes other bits than eager training, and is slower. Only choices for the
    same attention arguments are compared.

    Raises:
        CaptureError: Transformer Engine chose another backend for the capture.
        ValueError: Transformer Engine has no backend for the capture.
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
    eager, captured = (
        ", ".join(kinds).replace("use_", "").replace("_", " ") for kinds in (before[1], after[1])
    )
    raise CaptureError(
        f"Transformer Engine ran {eager} in eager steps and takes {captured} in captures, which "
        f"computes other bits. {_ADVICE}"
    )


def _last_choice() -> tuple[Any, tuple[str, ...]] | None:
    """Return the last attention's arguments, with ``cuda_graph`` set, and the backends it used."""
    choice = getattr(sys.modules.get(_MODULE), "_attention_backends", None) or {}
    arguments = choice.get("attention_params")
    if arguments is None or not hasattr(arguments, "cuda_graph"):
        return None
    arguments = copy.copy(arguments)
    arguments.cuda_graph = True
    return arguments, tuple(kind for kind in _KINDS if choice.get(kind))
