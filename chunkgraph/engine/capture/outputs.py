"""A captured forward's outputs: what its backward needs, and whose gradients it would lose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from chunkgraph.engine.autograd_graph import edges_to_leaves
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.module_tree import containers
from chunkgraph.errors import CaptureError

__all__ = ["check_outputs"]


def check_outputs(
    chunk: Chunk, outputs: Sequence[torch.Tensor], declared: Iterable[torch.Tensor]
) -> None:
    """Refuse a forward without a backward, or one whose backward would lose gradients.

    Args:
        chunk: whose forward.
        outputs: those that require grad.
        declared: inputs and parameters, whose gradients are taken care of.

    Raises:
        CaptureError: saying which.
    """
    if not outputs:
        raise CaptureError(
            f"{chunk.label}: no output of its forward requires grad, so there is no backward to "
            "capture. Capture only chunks that train; run the others eagerly."
        )
    lost = _undeclared_leaves(outputs, declared)
    if lost:
        names = ", ".join(_described(chunk, lost))
        raise CaptureError(
            f"{chunk.label}: its forward uses tensors that require grad and are neither arguments "
            f"nor among its parameters ({names}); a replay would lose their gradients. List them "
            "in Chunk.parameters, pass them as arguments, or detach them."
        )


def _undeclared_leaves(
    outputs: Sequence[torch.Tensor], declared: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Leaves below ``outputs`` that take a gradient and are not among ``declared``.

    What is reached only through recomputation does not show before its backward.
    """
    known = set(map(id, declared))
    return [leaf for leaf in edges_to_leaves(outputs) if id(leaf) not in known]


def _described(chunk: Chunk, tensors: Sequence[torch.Tensor]) -> list[str]:
    """What the chunk's module calls them, with their shapes."""
    wanted = set(map(id, tensors))
    names: dict[int, str] = {}
    for container in containers(chunk.module, chunk.module_name) if chunk.module else ():
        for key, value in container.entries():
            if id(value) in wanted:
                names.setdefault(id(value), f"{container.name(key)}: ")
    return [f"{names.get(id(t), '')}{tuple(t.shape)} {t.dtype}" for t in tensors]
