"""Describe a chunk, the options of its capture, and the training loop around it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, get_args

import torch
from torch import nn

from chunkgraph._text import did_you_mean, shown
from chunkgraph.errors import CaptureError, ConfigError, VerifyError

if TYPE_CHECKING:
    from chunkgraph.engine.program import GraphProgram

ReplayAction = Literal["F", "B", "I", "W"]
"""A replay: forward, whole backward, or the input and the weight half of a split one."""


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
        end_of_backward: device work at the end of every backward; it is captured with it.
        new_marker: creates the object that follows one slot's backward; see `GradientMarker`.
        keeps_input_grads: whether the caller may still use an input gradient when the next
            backward of this rank runs. True: the caller gets a copy. False: the caller gets the
            slot's own memory, valid until the next replay of any backward.
        copies_outputs: called with the arguments of the captured call; returns whether the caller
            may still use the result when the slot's next forward runs. True: the caller gets a
            copy. False: the caller gets the slot's own memory, and must not write it, since the
            backward may read it. None: always copy.
        check_sample: called with the arguments of a call before graphs are captured from it. It
            raises if graphs must not hold a value among them, and may read the device.
        caches: names of buffers that an eager call may replace by larger ones with the same
            values and more. Graphs keep using the old buffers, which their owner keeps alive.
        program: the graphs of a slot; None: a forward and a whole backward. See
            `chunkgraph.engine.program`.
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
    end_of_backward: Callable[[], None] | None = None
    new_marker: Callable[[], GradientMarker] | None = None
    keeps_input_grads: bool = True
    copies_outputs: Callable[..., bool] | None = None
    check_sample: Callable[..., None] | None = None
    caches: tuple[str, ...] = ()
    program: GraphProgram | None = None
    follows_module: bool = False

    @property
    def actions(self) -> tuple[ReplayAction, ...]:
        """Return the replays of one microbatch, in order."""
        return ("F", "B") if self.program is None else self.program.actions

    @property
    def has_backward(self) -> bool:
        """Return whether there is a backward."""
        return len(self.actions) > 1

    @property
    def enables_grad(self) -> bool:
        """Return whether forwards run with gradients enabled."""
        return self.program is None or self.program.enables_grad

    @staticmethod
    def from_module(module: nn.Module, label: str, *, program: GraphProgram | None = None) -> Chunk:
        """Return a chunk of ``module`` with all trainable parameters and buffers."""
        chunk = Chunk(module, (), label, module, program=program, follows_module=True)
        return chunk._of_module()

    def now(self) -> Chunk:
        """Return the chunk for a capture session that begins now, without frozen parameters.

        Raises:
            CaptureError: a parameter has no memory yet, or was frozen although data parallelism
                waits for its gradient.
        """
        chunk = self._of_module() if self.follows_module else self
        if not self.enables_grad:
            return replace(chunk, parameters=())
        trained = tuple(p for p in chunk.parameters if p.requires_grad)
        if trained and not self.has_backward:
            raise CaptureError(
                f"{self.label}: it is captured without a backward, but {chunk._name(trained[0])} "
                "requires grad. Freeze its parameters, or leave out program=FORWARD_ONLY."
            )
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

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters, also frozen ones, and the buffers."""
        if self.module is None:
            return chain(self.parameters, self.buffers)
        return chain(self.module.parameters(), self.module.buffers(), self.buffers)

    def _of_module(self) -> Chunk:
        assert self.module is not None
        trained = tuple(p for p in self.module.parameters() if p.requires_grad)
        return replace(self, parameters=trained, buffers=tuple(self.module.buffers()))

    def _name(self, parameter: nn.Parameter) -> str:
        for path, known in self.module.named_parameters() if self.module is not None else ():
            if known is parameter:
                return f"{self.module_name}.{path}".lstrip(".")
        return f"one of shape {tuple(parameter.shape)}"


VerifyMode = Literal["none", "poison", "shadow"]

_NO, _YES = ("0", "false", "no", "off"), ("1", "true", "yes", "on")


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer; booleans are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How and when to capture.

    Attributes:
        num_warmup_steps: eager training steps before the capture session.
        shared_slots: share the slots between the chunks of a rank: a slot holds one microbatch of
            any chunk. Interleaved schedules then need fewer, each with graphs of every chunk.
        memset_kernels: run small memsets inside CUDA graphs as kernels, for which the device waits
            less, and copy inputs and gradients there, for which the host waits less
            (`chunkgraph.graphs.graph_nodes`), if torch and its CUDA bindings support it. Ignored if
            a backend is passed to the engine.
        can_sleep: whether `ChunkGraphs.sleep` can give memory back; each slot is then one range of
            addresses (`chunkgraph.graphs.arena`). Ignored if a backend is passed to the engine.
        max_slots: most slots of a chunk, the same on all ranks. What more microbatches in flight
            save moves to pinned memory of the host and back (`chunkgraph.engine.paging`).
        max_slot_memory: instead, the memory of a rank's slots: ``20GiB``, or a number of bytes.
        verify: how to check replays (for debugging; slow; results stay the same). ``poison``: fill
            scratch and freed slots with NaN around every replay. ``shadow``: compare every replay
            bit for bit with an eager pass on the same inputs and random state, which takes an eager
            step's activations and a copy of the gradients. Errors name the first slot and layer.
        num_verify_steps: number of replayed steps to verify after a capture; None: all.
        on_failure: after a failed capture: ``raise`` the error, or continue eagerly (``eager``)
            with one warning.
        on_moved_memory: if parameters or gradients lie in other memory than at the capture:
            ``refuse`` the step with an error, or ``recapture`` at once, without warmup steps; ranks
            then agree when a step begins.

    Raises:
        ConfigError: a value is not one of the choices, is out of range, or has a wrong type.
    """

    num_warmup_steps: int = 1
    shared_slots: bool = False
    memset_kernels: bool = field(default_factory=lambda: _is_on("CHUNKGRAPH_MEMSET_KERNELS"))
    can_sleep: bool = False
    max_slots: int | None = None
    max_slot_memory: str | int | None = None
    verify: VerifyMode = "none"
    num_verify_steps: int | None = None
    on_failure: Literal["raise", "eager"] = "raise"
    on_moved_memory: Literal["refuse", "recapture"] = "refuse"

    def __post_init__(self) -> None:
        self._check_choice("verify", get_args(VerifyMode))
        self._check_choice("on_failure", ("raise", "eager"))
        self._check_choice("on_moved_memory", ("refuse", "recapture"))
        for name in ("shared_slots", "memset_kernels", "can_sleep"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} is {shown(value)}; it must be True or False.")
        self._check_count("num_warmup_steps", 0)
        self._check_count("num_verify_steps", 0, none="None for all steps")
        self._check_count("max_slots", 1, none="None for as many as the schedule needs")

    def _check_choice(self, name: str, known: Sequence[str]) -> None:
        value = getattr(self, name)
        if isinstance(value, str) and value in known:
            return
        choices = " or ".join(f"{choice!r}" for choice in known)
        hint = did_you_mean(value, known) if isinstance(value, str) else ""
        raise ConfigError(f"{name} is {shown(value)}; it must be {choices}.{hint}")

    def _check_count(self, name: str, least: int, *, none: str = "") -> None:
        value = getattr(self, name)
        if (none and value is None) or (is_integer(value) and value >= least):
            return
        what = f"a whole number, {least} or greater{f', or {none}' if none else ''}"
        raise ConfigError(f"{name} is {shown(value)}; it must be {what}.")

    @property
    def has_pages(self) -> bool:
        """Return whether slots may be fewer than microbatches in flight."""
        return self.max_slots is not None or self.max_slot_memory is not None


def _is_on(variable: str) -> bool:
    """Return whether an environment variable is on, as it is if it is not set."""
    text = (os.environ.get(variable) or "1").lower()
    if text not in _YES + _NO:
        known = ", ".join(_YES + _NO)
        raise ConfigError(f"{variable} is {shown(text)}. Set it to one of {known}, or unset it.")
    return text in _YES


class Host:
    """The training loop around the chunks. Override what it needs; by default nothing happens.

    Args:
        generators: the random generators that the chunks draw from, besides the default one.
    """

    _generators: Sequence[torch.Generator] = ()

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        self._generators = tuple(generators)

    def preserving(self) -> AbstractContextManager[object]:
        """Enclose a capture session or an eager pass of ``verify``; restore host-side state."""
        return nullcontext()

    def capturing(self) -> AbstractContextManager[object]:
        """Enclose capture warmup and captures. All ranks enter it together.

        What it yields lives as long as the graphs.
        """
        return nullcontext()

    def verifying(self) -> AbstractContextManager[object]:
        """Enclose an eager pass that ``verify`` compares with a replay."""
        return nullcontext()

    def judge(self, wrong_replay: VerifyError) -> None:
        """Handle a replay that ``verify`` finds wrong: by default, raise the error.

        A host that returns continues the step; ``verify`` may report more replays of it.
        """
        raise wrong_replay

    def generators(self) -> Sequence[torch.Generator]:
        """Return the random generators that the chunks draw from, besides the default one."""
        return self._generators
