"""What graphs take for granted of a module: which tensors it holds, and which of them train.

A graph knows addresses. A parameter or buffer that is replaced by another tensor, or frozen, or
thawed, changes nothing in it: replays would go on with the old one, without any other sign.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from chunkgraph.engine.chunk import Chunk
from chunkgraph.errors import CaptureError, ReplayMismatchError

__all__ = ["CapturedModel"]


@dataclass(frozen=True)
class _Held:
    """A tensor in its place."""

    holder: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor
    trains: bool
    name: str
    is_buffer: bool


class CapturedModel:
    """The tensors of one chunk's module as they are now.

    Args:
        chunk: about to be captured. Without a module nothing is known, and nothing checked.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._label = chunk.label
        self._held: list[_Held] = []
        modules = chunk.module.named_modules() if chunk.module is not None else ()
        for path, module in modules:
            for holder, is_buffer in ((module._parameters, False), (module._buffers, True)):
                for key, tensor in holder.items():
                    if tensor is not None:
                        name = ".".join(part for part in (chunk.module_name, path, key) if part)
                        held = _Held(holder, key, tensor, tensor.requires_grad, name, is_buffer)
                        self._held.append(held)
        # The same as plain tuples: they are gone through in every step.
        self._facts = [(h.holder, h.key, h.tensor, h.trains) for h in self._held]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a capture session: the module holds the same tensors afterwards.

        Raises:
            CaptureError: the forward replaced one of them, which a replay would not.
        """
        replaced: list[_Held] = []
        try:
            yield
        finally:
            replaced = [h for h in self._held if h.holder.get(h.key) is not h.tensor]
            for held in replaced:
                held.holder[held.key] = held.tensor
        if replaced:
            names = ", ".join(held.name for held in replaced)
            raise CaptureError(
                f"{self._label}: its forward replaces {names} by another tensor. A replay runs no "
                "Python, so that all of them would start from the value of the capture. Update it "
                "in place (add_, copy_), or keep it out of the chunk."
            )

    def check(self) -> None:
        """Compare, once a step.

        A buffer that was replaced by one of another shape is a cache that has grown; the graphs
        keep theirs.

        Raises:
            ReplayMismatchError: a tensor was replaced, frozen or thawed since.
        """
        if all(
            holder.get(key) is tensor and tensor.requires_grad is trains
            for holder, key, tensor, trains in self._facts
        ):
            return
        for held in self._held:
            now = held.holder.get(held.key)
            if now is held.tensor:
                if now.requires_grad == held.trains:
                    continue
                what = "trained when it was captured, and is frozen now"
                if not held.trains:
                    what = "was frozen when it was captured, and trains now"
            elif held.is_buffer and (now is None or now.shape != held.tensor.shape):
                continue
            else:
                what = "was replaced by another tensor after capture"
            raise ReplayMismatchError(
                f"{self._label}: {held.name} {what}; the graphs would go on as before. Update "
                "tensors in place (copy_), or release the graphs and capture again."
            )
