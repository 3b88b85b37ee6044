"""A captured forward's outputs: what its backward needs, and whose gradients it would lose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from chunkgraph.engine.autograd_graph import edges_to_leaves
from chunkgraph.errors import CaptureError

__all__ = ["check_outputs"]


def check_outputs(
    label: str, outputs: Sequence[torch.Tensor], declared: Iterable[torch.Tensor]
) -> None:
    """Refuse a forward without a backward, or one whose backward would lose gradients.

    Args:
        label: names the chunk in errors.
        outputs: those that require grad.
        declared: inputs and parameters, whose gradients are taken care of.

    Raises:
        CaptureError: saying which.
    """
    if not outputs:
        raise CaptureError(
            f"{label}: no output of its forward requires grad, so there is no backward to "
            "capture. Capture only chunks that train; run the others eagerly."
        )
    lost = _undeclared_leaves(outputs, declared)
    if lost:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in lost)
        raise CaptureError(
            f"{label}: its forward uses tensors that require grad and are neither arguments nor "
            f"among its parameters ({shapes}); a replay would lose their gradients. List them in "
            "Chunk.parameters, pass them as arguments, or detach them."
        )


def _undeclared_leaves(
    outputs: Sequence[torch.Tensor], declared: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Leaves below ``outputs`` that take a gradient and are not among ``declared``.

    What is reached only through recomputation does not show before its backward.
    """
    known = set(map(id, declared))
    return [leaf for leaf in edges_to_leaves(outputs) if id(leaf) not in known]
