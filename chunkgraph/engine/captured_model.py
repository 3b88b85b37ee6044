"""What graphs take for granted of a module: its tensors, which of them train, and its mode.

A graph knows addresses. A parameter or buffer that is replaced by another tensor, or frozen, or
thawed, or a layer that is put into evaluation, changes nothing in it: replays would go on as
before, without any other sign. Nor do they run what hooks on parameters do in a backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

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
    address: int


class CapturedModel:
    """The tensors of one chunk's module as they are now.

    Args:
        chunk: about to be captured. Without a module nothing is known, and nothing checked.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._label = chunk.label
        self._module = chunk.module
        self._trains = chunk.module is not None and chunk.module.training
        self._modes: list[tuple[str, nn.Module, bool]] = []
        self._held: list[_Held] = []
        modules = chunk.module.named_modules() if chunk.module is not None else ()
        for path, module in modules:
            self._modes.append((path, module, module.training))
            for holder, is_buffer in ((module._parameters, False), (module._buffers, True)):
                for key, tensor in holder.items():
                    if tensor is not None:
                        name = ".".join(part for part in (chunk.module_name, path, key) if part)
                        trains, address = tensor.requires_grad, tensor.data_ptr()
                        self._held.append(
                            _Held(holder, key, tensor, trains, name, is_buffer, address)
                        )
        # The same as plain tuples: they are gone through in every step.
        self._facts = [(h.holder, h.key, h.tensor, h.trains) for h in self._held]
        # Of what trains, `GradientSinks` knows.
        self._addresses = [(h.tensor, h.address) for h in self._held if not h.trains]

    def refuse_hooks(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse what waits for gradients of ``parameters`` and would not hear of them.

        Whoever gives a parameter a ``main_grad`` takes care of that (see `Chunk.after_backward`).

        Raises:
            CaptureError: naming it.
        """
        for path, module, _ in self._modes:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                raise CaptureError(
                    f"{self._label}: {path or 'the chunk'} is a torch DistributedDataParallel, "
                    "which a replay does not tell of gradients, so that they would never be "
                    "reduced. Give ChunkGraphs the module in it, without the wrapper, and reduce "
                    "the gradients after the step."
                )
        hooked = {
            id(p)
            for p in parameters
            if not hasattr(p, "main_grad")
            and (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))
        }
        if hooked:
            names = [held.name for held in self._held if id(held.tensor) in hooked]
            raise CaptureError(
                f"{self._label}: hooks wait for the gradients of {len(hooked)} parameters "
                f"({', '.join(names[:3]) or 'not of its module'}{', ...' * (len(names) > 3)}), and "
                "a replay calls none. Remove them, and do their work after the step or in "
                "Chunk.after_backward."
            )

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

    def check_mode(self) -> None:
        """Compare, at every call.

        Raises:
            ReplayMismatchError: the module was put from training to evaluation or back.
        """
        if self._module is not None and self._module.training is not self._trains:
            raise self._other_mode("", self._module)

    def _other_mode(self, path: str, module: nn.Module) -> ReplayMismatchError:
        name = f"{path} of {self._label}" if path else self._label
        now, then = ("train()", "eval()") if module.training else ("eval()", "train()")
        return ReplayMismatchError(
            f"{name} is called in {now}, but was captured in {then}; the graphs would run it as "
            "it was captured. Ask for an eager step (`step(eager=True)`), or release the graphs "
            "and capture again."
        )

    def check_memory(self) -> None:
        """Compare, before a step: what a graph reads may be another's memory by now.

        Raises:
            ReplayMismatchError: a tensor that does not train was moved since.
        """
        if all(tensor.data_ptr() == address for tensor, address in self._addresses):
            return
        names = [h.name for h in self._held if h.tensor.data_ptr() != h.address]
        raise ReplayMismatchError(
            f"{self._label}: {', '.join(names)} was moved to other memory after capture; the "
            "graphs would read the old one. Update it in place (copy_), or release the graphs and "
            "capture again."
        )

    def check(self) -> None:
        """Compare, once a step, at its end.

        A buffer that was replaced by one of another shape is a cache that has grown; the graphs
        keep theirs.

        Raises:
            ReplayMismatchError: a tensor was replaced, frozen or thawed since, or a part of the
                module was put into evaluation or back.
        """
        if self._module is not None and self._module.training is self._trains:
            for path, module, trained in self._modes:
                if module.training is not trained:
                    raise self._other_mode(path, module)
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
