"""Megatron's RNG tracker: seeds, generators for graphs, and its replacement on a CPU host."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from chunkgraph.megatron.core.access import import_megatron, patch_attributes

if TYPE_CHECKING:
    from chunkgraph.megatron.cpu.host import HostRng

__all__ = [
    "RandomStates",
    "graph_safe_generators",
    "patch_rng",
    "preserve_rng",
    "rng_is_graph_safe",
    "seed_model_parallel",
]

_RANDOM = "megatron.core.tensor_parallel.random"


def patch_rng(host: HostRng) -> Callable[[], None]:
    """Point Megatron's RNG tracker at the CPU generator; return a function that undoes it.

    The tracker then holds state objects, as it does with graph-safe CUDA generators, and every
    switch between them goes through ``host.switch_to``. Megatron's ``fork`` also compares the CPU
    generator before and after, which reads a tensor's value. Here both are the same generator, and
    no graph can contain the read, so the tracker gets a ``fork`` without the comparison.
    """
    module = import_megatron(_RANDOM)
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


def seed_model_parallel(seed: int, device: torch.device) -> None:
    """Seed Megatron's tracker, as a kind whose states graphs can switch.

    On a GPU this is Transformer Engine's tracker if it is installed, since its modules expect it.
    """
    engine = importlib.util.find_spec("transformer_engine") is not None
    flag = "te_rng_tracker" if engine and device.type == "cuda" else "use_cudagraphable_rng"
    import_megatron(_RANDOM).model_parallel_cuda_manual_seed(seed, **{flag: True})


def _tracker() -> Any:
    return import_megatron(_RANDOM).get_cuda_rng_tracker()


def rng_is_graph_safe() -> bool:
    """Return whether a graph can contain the tracker's switches between its states."""
    return bool(import_megatron(_RANDOM).is_graph_safe_cuda_rng_tracker(_tracker()))


def graph_safe_generators() -> list[torch.Generator]:
    """Return the generators to register with every CUDA graph, the tracker's first.

    There are none on a CPU host.
    """
    own, every = _tracker().get_states(), import_megatron(_RANDOM).get_all_rng_states() or {}
    states = own | every | own
    return [state for state in states.values() if isinstance(state, torch.Generator)]


class RandomStates:
    """Save the default generators and every state of Megatron's tracker, by value."""

    def __init__(self) -> None:
        tracker = _tracker()
        self._states = tracker.get_states() if tracker.is_initialized() else {}
        self._host = torch.get_rng_state()
        self._device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._saved = {
            name: state.clone() if isinstance(state, torch.Tensor) else state.get_state()
            for name, state in self._states.items()
        }

    def restore(self) -> None:
        """Restore all saved states."""
        for name, state in self._states.items():
            if not isinstance(state, torch.Tensor):
                state.set_state(self._saved[name])
        if self._states and all(isinstance(s, torch.Tensor) for s in self._states.values()):
            _tracker().set_states(self._saved)
        torch.set_rng_state(self._host)
        if self._device is not None:
            torch.cuda.set_rng_state(self._device)


@contextlib.contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the default generators and every state of Megatron's tracker on exit."""
    states = RandomStates()
    try:
        yield
    finally:
        states.restore()
