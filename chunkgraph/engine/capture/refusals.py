"""Refuse chunks that a graph would compute otherwise than eager training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from chunkgraph.engine.capture.output_gradients import leaves_below
from chunkgraph.engine.capture.restore import tensors_kept
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.module_tree import entries
from chunkgraph.engine.tree import Call, argument_paths
from chunkgraph.errors import CaptureError

_PLAIN = (torch.Tensor, bool, int, float, complex, str, type(None))


def refuse_without_backward(
    chunk: Chunk,
    leaves: Sequence[object],
    outputs: Sequence[torch.Tensor],
    declared: Iterable[torch.Tensor],
) -> None:
    """Refuse a forward without a backward, or one whose backward would lose gradients.

    Args:
        chunk: runs the forward.
        leaves: leaves of its result.
        outputs: the outputs that require grad.
        declared: inputs and parameters, whose gradients are computed.

    Raises:
        CaptureError: there is no backward, or it would lose gradients; the message names the
            tensors.
    """
    others = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, _PLAIN)}
    if not outputs:
        hidden = f" (torch finds no tensors in {', '.join(sorted(others))})" if others else ""
        raise CaptureError(
            f"{chunk.label}: no output of its forward requires grad{hidden}, so there is no "
            "backward to capture, though it has parameters to train. Return tuples, lists or dicts "
            "of tensors that are not detached, or freeze its parameters."
        )
    refuse_undeclared(chunk, leaves_below(outputs), declared)


def refuse_undeclared(
    chunk: Chunk, leaves: Iterable[torch.Tensor], declared: Iterable[torch.Tensor]
) -> None:
    """Refuse ``leaves`` that take a gradient and are not among ``declared``.

    Raises:
        CaptureError: there are such leaves; the message names them.
    """
    known = set(map(id, declared))
    lost = [leaf for leaf in leaves if id(leaf) not in known]
    if lost:
        from torch.distributed.fsdp import FSDPModule

        if isinstance(chunk.module, FSDPModule):
            raise CaptureError(
                f"{chunk.label} is sharded by fully_shard, which gathers other parameters in each "
                "forward. Train it in a pipeline by GraphedSchedule (torch 2.15), or without it."
            )
        names = ", ".join(_described(chunk, lost))
        raise CaptureError(
            f"{chunk.label}: its forward uses tensors that require grad and are neither arguments "
            f"nor among its parameters ({names}); a replay would lose their gradients. List them "
            "in Chunk.parameters, pass them as arguments, or detach them."
        )


@contextmanager
def refusing_hidden(chunk: Chunk, declared: Iterable[torch.Tensor]) -> Iterator[None]:
    """Refuse an eager pass that leaves gradients in leaves that are not among ``declared``.

    Looks at what modules keep, since only a reentrant checkpoint may use it. Restores gradients.
    """
    known = set(map(id, (*chunk.parameters, *declared)))
    lost: list[torch.Tensor] = []
    before: dict[torch.Tensor, Any] = {}  # gradients, with their versions and copies
    with torch._C.DisableTorchFunction():
        for t in tensors_kept(chunk):
            with suppress(RuntimeError):  # a view whose base has changed is no leaf
                if t.requires_grad and t.is_leaf and id(t) not in known:
                    before[t] = (t.grad, 0, None)
                    if t.grad is not None:
                        before[t] = (t.grad, t.grad._version, t.grad.clone())
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for leaf, (grad, version, copy) in before.items():
                if (copy is not None and grad._version != version) or leaf.grad is not grad:
                    lost.append(leaf)
                    leaf.grad = grad if grad is None else grad.copy_(copy)
    refuse_undeclared(chunk, lost, ())


def _described(chunk: Chunk, tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the names of tensors in the chunk's module, with their shapes."""
    found = entries(chunk.module, chunk.module_name) if chunk.module is not None else ()
    names = {id(value): f"{name}: " for _, _, value, name in found}
    return [f"{names.get(id(t), '')}{tuple(t.shape)} {t.dtype}" for t in tensors]


def refuse_written(
    label: str, sample: Call, inputs: Sequence[torch.Tensor], versions: Sequence[int]
) -> None:
    """Refuse a chunk that writes into its arguments: a replay writes into copies of them.

    Raises:
        CaptureError: it writes into arguments; the message names them.
    """
    written = [
        path
        for path, tensor, version in zip(argument_paths(sample), inputs, versions, strict=True)
        if tensor._version != version
    ]
    if written:
        raise CaptureError(
            f"{label}: its forward changes {', '.join(written)} in place. A replay works on a "
            "copy and would leave the caller's tensor unchanged. Compute a new tensor and return "
            "it, or keep the state in a buffer of the module."
        )


def refuse_shared_parameters(chunks: Sequence[Chunk]) -> None:
    """Refuse parameters that a chunk with several backward actions shares with another one.

    The schedule determines when each adds its gradients, and so the order of the sum.

    Raises:
        CaptureError: There are such parameters; the message names the chunks.
    """
    owners: dict[int, Chunk] = {}
    for chunk in chunks:
        for parameter in chunk.parameters:
            other = owners.setdefault(id(parameter), chunk)
            if other is not chunk and max(len(other.actions), len(chunk.actions)) > 2:
                raise CaptureError(
                    f"{chunk.label} and {other.label} share a parameter of shape "
                    f"{tuple(parameter.shape)}, and at least one of their backwards is split, so "
                    "the order in which their gradients are added would depend on the schedule. "
                    "Capture both with whole backwards, or use a schedule that splits no backward."
                )


def refuse_sparse_gradients(chunk: Chunk) -> None:
    """Refuse embeddings with sparse gradients.

    Raises:
        CaptureError: there is one; the message names it.
    """
    for path, part in chunk.module.named_modules() if chunk.module is not None else ():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise CaptureError(
                f"{chunk.label}: {path or 'it'} is an embedding with sparse=True, whose gradient "
                "is a sparse tensor of a size that depends on values. Use sparse=False."
            )
