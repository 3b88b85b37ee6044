"""Run unmodified Megatron-core on a machine without a GPU.

::

    with cpu_host():
        import megatron.core            # schedules, DDP, optimizer: all on the CPU, over gloo

What it does, all of it undone on exit:

* ``device="cuda"`` in factories, ``.to("cuda")``, ``.cuda()`` and pinned memory mean the CPU;
* ``torch.cuda`` streams and events do nothing, ``torch.cuda`` random-number calls go to the CPU
  generator, and ``torch.cuda.is_available()`` is false even where there is a GPU;
* Megatron's RNG tracker switches states of the CPU generator in a way that a graph can repeat,
  and recomputation restores them;
* modules that import triton unconditionally load without it;
* the process groups of gloo share one network thread.

It cannot show streams, NCCL, kernels or memory of a GPU. The user's part: the local layer spec,
fusions off, ``batch_p2p_comm=False`` and ``use_cpu_initialization=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from chunkgraph.graphs import host_call
from chunkgraph.megatron.core.access import patch_attributes
from chunkgraph.megatron.core.random_state import patch_rng
from chunkgraph.megatron.cpu.gloo import share_gloo_device
from chunkgraph.megatron.cpu.triton_stub import TritonStubFinder
from chunkgraph.megatron.features.experts.dispatch import patch_router

__all__ = ["CpuHost", "HostRng", "HostRngState", "cpu_host"]

_CPU = torch.device("cpu")
# Methods that ask for a device, or tell one, without a keyword.
_NAMING_DEVICES = {
    *(torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.type, torch.Tensor.to)
}


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites every request for a CUDA device into one for the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Reading a shape comes through here too, and so most calls must cost next to nothing.
        if not kwargs and func not in _NAMING_DEVICES:
            return func(*args)
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers recognise a parameter by the name of its CUDA type.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class _Stream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event if event is not None else _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class _Event:
    """An event that has already been reached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: object) -> float:
        return 0.0


class HostRngState:
    """One state of the CPU generator, in the place of a graph-safe CUDA generator.

    While it is the live one the generator itself holds its numbers; otherwise they are kept here.
    """

    def __init__(self, rng: HostRng | None, state: torch.Tensor) -> None:
        self._rng = rng
        self.kept = state

    @property
    def _is_live(self) -> bool:
        return self._rng is not None and self._rng.current is self

    def get_state(self) -> torch.Tensor:
        """A copy of the state, shape [bytes], dtype uint8."""
        return torch.get_rng_state() if self._is_live else self.kept.clone()

    def __reduce__(self) -> tuple[Any, ...]:
        # In a checkpoint: the numbers without the host they belong to.
        return HostRngState, (None, self.get_state())

    def set_state(self, state: torch.Tensor) -> None:
        """Continue from ``state``, as given by :meth:`get_state`."""
        if self._is_live:
            torch.set_rng_state(state)
        else:
            self.kept = state.clone()

    def manual_seed(self, seed: int) -> HostRngState:
        """Restart from ``seed``."""
        self.set_state(torch.Generator().manual_seed(seed).get_state())
        return self

    def clone_state(self) -> HostRngState:
        """A new state that continues from the same point."""
        return HostRngState(self._rng, self.get_state())


class HostRng:
    """The CPU default generator shared by several states, one of them live at a time."""

    def __init__(self) -> None:
        self.default = self.current = HostRngState(self, torch.get_rng_state())

    def clone_current(self) -> HostRngState:
        """A new state that starts where the live one is."""
        return self.current.clone_state()

    def new_state(self, state: torch.Tensor) -> HostRngState:
        """A state that starts from ``state``, as of `HostRngState.get_state`."""
        return HostRngState(self, state)

    def switch_to(self, state: HostRngState) -> None:
        """Make ``state`` the live one.

        Inside a capture the switch is logged as well, and every replay does it again with the
        states as they then are: dropout masks go on as in eager training.
        """

        def switch() -> None:
            if self.current is state:
                return
            self.current.kept = torch.get_rng_state()
            torch.set_rng_state(state.kept)
            self.current = state

        host_call(switch)

    def save(self, states: Iterable[HostRngState]) -> SavedRng:
        """What the live state and ``states`` go on with, for :meth:`restore`.

        Inside a capture every replay saves anew, into the same object, what it then finds.
        """
        states = tuple(states)
        saved = SavedRng()

        def save() -> None:
            saved.current = self.current
            saved.values = {s: s.get_state() for s in (self.current, *states)}

        host_call(save)
        return saved

    def restore(self, saved: SavedRng) -> None:
        """Go on from what was saved last; repeated at every replay when captured."""

        def restore() -> None:
            assert saved.current is not None
            self.current.kept = torch.get_rng_state()
            for state, value in saved.values.items():
                state.kept = value.clone()
            self.current = saved.current
            torch.set_rng_state(self.current.kept)

        host_call(restore)


class SavedRng:
    """The states of a `HostRng` at one moment."""

    def __init__(self) -> None:
        self.current: HostRngState | None = None
        self.values: dict[HostRngState, torch.Tensor] = {}


def _cuda_stubs() -> dict[str, Any]:
    """A new function for every name: torch's compiler refuses one object under two names."""

    def nothing() -> Callable[..., None]:
        return lambda *_, **__: None

    return {
        "is_available": lambda: False,
        "device_count": lambda: 0,
        "current_device": lambda: _CPU,
        # Transformer Engine may ask while it is imported, also where there is a GPU.
        "get_device_capability": lambda *_: (0, 0),
        "get_device_properties": lambda *_: SimpleNamespace(
            name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=0
        ),
        "set_device": nothing(),
        "synchronize": nothing(),
        "empty_cache": nothing(),
        "ipc_collect": nothing(),
        "current_stream": lambda *_, **__: _Stream(),
        "default_stream": lambda *_, **__: _Stream(),
        "set_stream": nothing(),
        "Stream": _Stream,
        "stream": lambda *_, **__: _Stream(),
        "Event": _Event,
        "is_current_stream_capturing": lambda: False,
        # Not torch.manual_seed, which calls the second of these.
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }


class CpuHost:
    """Makes this thread a CPU host for Megatron until :meth:`remove`.

    Raises nothing of its own; :meth:`install` twice is the same as once.
    """

    def __init__(self) -> None:
        self.rng: HostRng | None = None
        self._undo: ExitStack | None = None

    @property
    def installed(self) -> bool:
        """Whether the host is in force."""
        return self._undo is not None

    def install(self) -> CpuHost:
        """Put the stand-ins in force; imports Megatron's RNG module."""
        if self._undo is not None:
            return self
        with ExitStack() as stack:
            stack.callback(patch_attributes(torch.cuda, _cuda_stubs()))
            stack.callback(TritonStubFinder.install())
            stack.callback(share_gloo_device())
            stack.enter_context(_CudaMeansCpu())
            self.rng = HostRng()
            stack.callback(patch_rng(self.rng))
            stack.callback(patch_router())
            self._undo = stack.pop_all()
        return self

    def remove(self) -> None:
        """Undo everything; must be called on the thread that installed it."""
        if self._undo is not None:
            if self.rng is not None:
                self.rng.switch_to(self.rng.default)
            self._undo.close()
            self._undo, self.rng = None, None


@contextmanager
def cpu_host() -> Iterator[CpuHost]:
    """A :class:`CpuHost` in force inside the ``with`` block."""
    host = CpuHost().install()
    try:
        yield host
    finally:
        host.remove()
