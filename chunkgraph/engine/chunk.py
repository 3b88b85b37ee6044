"""`Chunk`: what the engine knows of a model chunk that it captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import nn

from chunkgraph._text import shown
from chunkgraph.errors import CaptureError, ConfigError

__all__ = ["Chunk", "GradientMarker"]


class GradientMarker(Protocol):
    """Follows one slot's backward from its capture into its replays.

    With it, work that waits for a gradient (a bucket's reduction) can start before the backward
    has ended: `accumulated` may record an external event into the graph that is being captured,
    and `replayed` lets another stream wait for it.
    """

    def accumulated(self, index: int) -> None:
        """Handle, in the capture, that the gradient of ``parameters[index]`` is accumulated."""

    def replayed(self) -> None:
        """Handle that a replay of the backward has been launched on the current stream."""


@dataclass(frozen=True)
class Chunk:
    """A model chunk: its forward and the state around it.

    Attributes:
        forward: the eager forward to capture. Arguments and result are trees (tuples, lists,
            dicts) of tensors and plain values.
        parameters: the parameters whose gradients the chunk produces. A gradient goes to
            ``param.main_grad`` if the parameter has that attribute, else to ``param.grad``.
        label: name of the chunk in errors, for example ``rank 0 chunk 1``.
        module: holds the parameters; during a capture it holds aliases of them. None: the forward
            is captured with the parameters themselves, which must not be in a DDP wrapper.
        module_name: name of ``module`` in the user's model, a prefix of layers' names in errors.
        buffers: tensors the forward updates in place; ``verify`` compares them.
        before_forward: host work before every replayed forward.
        before_backward: work before every replayed backward, on the current stream.
        after_backward: host work after every replayed backward.
        end_of_backward: device work at the end of every backward; it is captured with it.
        new_marker: creates the object that follows one slot's backward; see `GradientMarker`.
        keeps_input_grads: whether the caller may still use an input gradient when the next
            backward of this rank runs. True: the caller gets a copy. False: the caller gets the
            slot's own memory, valid until the next replay of any backward.
        copies_outputs: called with the arguments of the captured call; returns whether the caller
            may still use the result when the slot's next forward runs. True: the caller gets a
            copy. False: the caller gets the slot's own memory. None: always copy.
        check_sample: called with the arguments of a call before graphs are captured from it. It
            raises if graphs must not hold a value among them, and may read the device.
        caches: names of buffers that an eager call may replace by larger ones with the same
            values and more. Graphs keep using the old buffers, which their owner keeps alive.
        backward: ``whole``, or ``split`` into the input gradients, which ``backward()`` of autograd
            computes, and the weight gradients, which `WeightBackwards` computes when the schedule
            asks for them; the slot is in use until then. ``before_backward`` runs before the first
            half, ``end_of_backward`` at its end, ``after_backward`` after the second.
        follows_module: whether each capture session reads ``parameters`` and ``buffers`` again from
            ``module``; see `now`.
    """

    forward: Callable[..., Any]
    parameters: tuple[nn.Parameter, ...]
    label: str
    module: nn.Module | None = None
    module_name: str = ""
    buffers: tuple[torch.Tensor, ...] = ()
    before_forward: Callable[[], None] | None = None
    before_backward: Callable[[], None] | None = None
    after_backward: Callable[[], None] | None = None
    end_of_backward: Callable[[], None] | None = None
    new_marker: Callable[[], GradientMarker] | None = None
    keeps_input_grads: bool = True
    copies_outputs: Callable[..., bool] | None = None
    check_sample: Callable[..., None] | None = None
    caches: tuple[str, ...] = ()
    backward: Literal["whole", "split"] = "whole"
    follows_module: bool = False

    def __post_init__(self) -> None:
        if self.backward not in ("whole", "split"):
            raise ConfigError(
                f"{self.label}: backward is {shown(self.backward)}; it must be 'whole' or 'split'."
            )

    @property
    def is_split(self) -> bool:
        """Return whether the backward is split."""
        return self.backward == "split"

    @staticmethod
    def from_module(
        module: nn.Module, label: str, *, backward: Literal["whole", "split"] = "whole"
    ) -> Chunk:
        """Return a chunk of ``module`` with all trainable parameters and buffers."""
        chunk = Chunk(module, (), label, module, backward=backward, follows_module=True)
        return chunk._of_module()

    def now(self) -> Chunk:
        """Return the chunk for a capture session that begins now, without frozen parameters.

        Raises:
            CaptureError: a parameter has no memory yet, or was frozen although data parallelism
                waits for its gradient.
        """
        chunk = self._of_module() if self.follows_module else self
        trained = tuple(p for p in chunk.parameters if p.requires_grad)
        if len(trained) < len(chunk.parameters) and chunk.new_marker is not None:
            frozen = [p for p in chunk.parameters if not p.requires_grad]
            names = ", ".join(chunk._name(p) for p in frozen[:3])
            raise CaptureError(
                f"{self.label}: {len(frozen)} parameters ({names}{', ...' * (len(frozen) > 3)}) "
                "were frozen after the model was wrapped for data parallelism, which waits for "
                "all of their gradients. Freeze them before the model is wrapped."
            )
        lazy = [p for p in trained if nn.parameter.is_lazy(p)]
        if lazy:
            raise CaptureError(
                f"{self.label}: {chunk._name(lazy[0])} has no shape yet. Call the module once "
                "eagerly, then capture."
            )
        return replace(chunk, parameters=trained)

    def _of_module(self) -> Chunk:
        assert self.module is not None
        trained = tuple(p for p in self.module.parameters() if p.requires_grad)
        return replace(self, parameters=trained, buffers=tuple(self.module.buffers()))

    def _name(self, parameter: nn.Parameter) -> str:
        for path, known in self.module.named_parameters() if self.module is not None else ():
            if known is parameter:
                return f"{self.module_name}.{path}".lstrip(".")
        return f"one of shape {tuple(parameter.shape)}"
