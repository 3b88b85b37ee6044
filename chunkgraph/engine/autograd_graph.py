"""Walk over autograd's graph: its nodes, and the tensors that they keep."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import storage_address

__all__ = [
    "edges_to_leaves",
    "guarded_outputs",
    "kept_by",
    "nested_among",
    "nodes_below",
    "refuse_changed_outputs",
    "refuse_hooks_on_nested",
    "sharing_outputs",
]


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


def nested_among(outputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the positions of outputs from which other outputs are computed."""
    return tuple(
        i
        for i, output in enumerate(outputs)
        if output.grad_fn in set(nodes_below(other for other in outputs if other is not output))
    )


def refuse_hooks_on_nested(label: str, outputs: Iterable[torch.Tensor | None]) -> None:
    """Refuse hooks on outputs from which other outputs are computed inside the chunk.

    Args:
        label: label of the chunk or slot, for errors.
        outputs: the nested outputs, as the caller has them; None for one that was dropped.

    Raises:
        ReplayMismatchError: a hook or ``retain_grad`` waits for a gradient.
    """
    if any(o is not None and (o._backward_hooks or o.retains_grad) for o in outputs):
        raise ReplayMismatchError(
            f"{label}: a hook or retain_grad() waits for the gradient of an output from which "
            "another output is computed. It would miss the other output's contribution, which is "
            "added inside the graph.\n  To do: ask for an eager step (`step(eager=True)`), or "
            "compute the other output outside the chunk."
        )


def refuse_changed_outputs(label: str, ctx: Any) -> None:
    """Refuse a change in place of the outputs and arguments that a node saved for its backward.

    Raises:
        ReplayMismatchError: one was changed in place after the forward.
    """
    try:
        _ = ctx.saved_tensors
    except RuntimeError as error:
        if "inplace" not in str(error):  # a second backward, which is refused later
            return
        raise ReplayMismatchError(
            f"{label}: an output or an argument that the chunk returns was changed in place. "
            "The chunk's backward needs the old values, or the output shares memory with an "
            "argument, a parameter or another output, which a replay does not change with it.\n"
            "  To do: clone the tensor first, or use an operator that is not in place."
        ) from error


def edges_to_leaves(outputs: Sequence[torch.Tensor]) -> dict[torch.Tensor, int]:
    """Return the leaves below ``outputs`` and the number of edges to each.

    Leaves that are reached only through recomputation are not seen before the backward.
    """
    counts: dict[torch.Tensor, int] = {}
    for node in nodes_below(outputs):
        for parent, _ in node.next_functions:
            leaf = getattr(parent, "variable", None)
            if isinstance(leaf, torch.Tensor):
                counts[leaf] = counts.get(leaf, 0) + 1
    for tensor in outputs:
        if tensor.grad_fn is None and tensor.requires_grad:
            counts[tensor] = counts.get(tensor, 0) + 1
    return counts


def kept_by(node: Any) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of the tensors that a node keeps for its backward.

    Tensors that a custom function keeps in its own attributes are not seen.
    """
    kept: list[tuple[str, torch.Tensor]] = []
    kind: type = type(node)
    for name in _names_of_saved(kind):
        # Tensors that were written later, and freed graphs, cannot be read.
        with contextlib.suppress(RuntimeError):
            if not _is_plain(getattr(node, f"_raw{name}")):
                continue
            value = getattr(node, "saved_tensors" if name == "_saved_tensors" else name)
            values = value if isinstance(value, (tuple, list)) else (value,)
            kept.extend(
                (name.removeprefix("_saved_"), v) for v in values if isinstance(v, torch.Tensor)
            )
    # Skip wrappers without their own memory (quantized tensors); the node keeps their parts too.
    return [
        (name, t)
        for name, t in kept
        if type(t) in (torch.Tensor, nn.Parameter) and t.layout is torch.strided and t.numel()
    ]


def _is_plain(raw: Any) -> bool:
    """Return whether reading a saved value calls no hook, which might recompute a forward."""
    values = raw if isinstance(raw, (tuple, list)) else (raw,)
    return all(getattr(saved, "unpack_hook", _is_plain) is None for saved in values)


@functools.cache
def _names_of_saved(kind: type) -> tuple[str, ...]:
    raw = [n.removeprefix("_raw") for n in dir(kind) if n.startswith("_raw_saved_")]
    known = dir(kind)
    return tuple(n for n in raw if n in known or n == "_saved_tensors")


def guarded_outputs(
    outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """Return which outputs a caller must not change in place; see `Slot`.

    Args:
        outputs: outputs of the forward.
        others: arguments, parameters and buffers.
    """
    kept = [tensor for node in nodes_below(outputs) for _, tensor in kept_by(node)]
    return sharing_outputs(outputs, [*kept, *others])


def sharing_outputs(
    outputs: Sequence[torch.Tensor], others: Iterable[torch.Tensor]
) -> tuple[int, ...]:
    """Return which outputs share memory with another output or with one of ``others``."""
    storages = set(map(storage_address, others))
    of_outputs = [storage_address(tensor) for tensor in outputs]
    return tuple(
        i
        for i, storage in enumerate(of_outputs)
        if storage and (storage in storages or of_outputs.count(storage) > 1)
    )
