"""Walk over autograd's graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["leaves_below", "nodes_below"]


def nodes_below(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield every node of the graph below ``outputs``, each once."""
    waiting: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                waiting.append(parent)


def leaves_below(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves below ``outputs``, each once.

    Leaves that are reached only through recomputation are not seen before the backward.
    """
    leaves = [getattr(node, "variable", None) for node in nodes_below(outputs)]
    own = [t for t in outputs if t.grad_fn is None and t.requires_grad]
    return list({id(t): t for t in (*leaves, *own) if t is not None}.values())
