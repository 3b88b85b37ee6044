"""States of the CPU generator in place of CUDA generators, and in Megatron's RNG tracker."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from chunkgraph.graphs import host_call
from chunkgraph.megatron.core.access import import_megatron, patch_attributes

__all__ = ["HostRng", "HostRngState", "patch_rng"]


class HostRngState:
    """One state of the CPU generator, which replaces a graph-safe CUDA generator.

    If the state is live, the generator holds its value; otherwise ``stored`` does.
    """

    def __init__(self, rng: HostRng | None, state: torch.Tensor) -> None:
        self._rng = rng
        self.stored = state

    @property
    def _is_live(self) -> bool:
        return self._rng is not None and self._rng.current is self

    def get_state(self) -> torch.Tensor:
        """Return a copy of the state, a uint8 tensor [bytes]."""
        return torch.get_rng_state() if self._is_live else self.stored.clone()

    def __reduce__(self) -> tuple[Any, ...]:
        # A checkpoint contains the value without the host.
        return HostRngState, (None, self.get_state())

    def set_state(self, state: torch.Tensor) -> None:
        """Continue from ``state``, a result of `get_state`."""
        if self._is_live:
            torch.set_rng_state(state)
        else:
            self.stored = state.clone()

    def manual_seed(self, seed: int) -> HostRngState:
        """Restart from ``seed``."""
        self.set_state(torch.Generator().manual_seed(seed).get_state())
        return self

    def clone_state(self) -> HostRngState:
        """Return a new state with the same value."""
        return HostRngState(self._rng, self.get_state())


class HostRng:
    """The CPU's default generator, shared by several states of which one is live."""

    def __init__(self) -> None:
        self.default = self.current = HostRngState(self, torch.get_rng_state())

    def new_state(self, state: torch.Tensor) -> HostRngState:
        """Return a new state that starts from ``state``, a result of `HostRngState.get_state`."""
        return HostRngState(self, state)

    def switch_to(self, state: HostRngState) -> None:
        """Make ``state`` the live one.

        Inside a capture the switch is also logged. Every replay repeats it with the current values
        of the states, so that dropout masks continue as in eager training.
        """

        def switch() -> None:
            if self.current is state:
                return
            # Not `torch.set_rng_state`, which a capture refuses.
            self.current.stored = torch.default_generator.get_state()
            torch.default_generator.set_state(state.stored)
            self.current = state

        host_call(switch)


def patch_rng(host: HostRng) -> Callable[[], None]:
    """Point Megatron's RNG tracker at the CPU generator; return a function that undoes it.

    The tracker then holds state objects, as it does with graph-safe CUDA generators, and every
    switch between them goes through ``host.switch_to``. Megatron's ``fork`` also compares the CPU
    generator before and after, which reads a tensor's value. Here both are the same generator, and
    no graph can contain the read, so the tracker gets a ``fork`` without the comparison.
    """
    module = import_megatron("megatron.core.tensor_parallel.random")
    base: Any = module.CudaRNGStatesTracker
    default_name = inspect.signature(base.fork).parameters["name"].default

    class HostRngStatesTracker(base):
        """Megatron's tracker on the CPU generator; always graph-safe."""

        _current_state_name: str

        def __init__(self, *_: Any, is_inference_rng_tracker: bool = False, **__: Any) -> None:
            super().__init__(
                use_cudagraphable_rng=False, is_inference_rng_tracker=is_inference_rng_tracker
            )
            self.use_cudagraphable_rng = True

        @contextlib.contextmanager
        def fork(self, name: str = default_name) -> Iterator[None]:
            if name not in self.states_:
                raise KeyError(f"RNG state {name} is not added to the tracker")
            outer_name, outer = self._current_state_name, host.current
            host.switch_to(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                host.switch_to(outer)
                self._current_state_name = outer_name

    def get_state(*_: Any, clone: bool = False, graph_safe: bool = False, **__: Any) -> Any:
        if not graph_safe:
            return torch.get_rng_state()
        return host.current.clone_state() if clone else host.current

    def set_state(state: Any, *_: Any, **__: Any) -> None:
        if isinstance(state, torch.Tensor):
            torch.set_rng_state(state)
        else:
            host.switch_to(state)

    def convert(state: Any, to_graphable: bool) -> Any:
        """Convert a state from a checkpoint, of either kind, to one of this host."""
        values = state if isinstance(state, torch.Tensor) else state.get_state()
        return host.new_state(values) if to_graphable else values

    undo = contextlib.ExitStack()
    converting = {"convert_cuda_rng_state": convert}
    undo.callback(patch_attributes(import_megatron("megatron.core.tensor_parallel"), converting))
    replacements = {
        **converting,
        "CudaRNGStatesTracker": HostRngStatesTracker,
        "_get_cuda_rng_state": get_state,
        "_set_cuda_rng_state": set_state,
        # A tracker made before the patch would hold states of the wrong kind.
        "_CUDA_RNG_STATE_TRACKER": None,
        "_CUDA_RNG_STATE_TRACKER_INITIALIZED": False,
    }
    undo.callback(patch_attributes(module, replacements))
    return undo.close
