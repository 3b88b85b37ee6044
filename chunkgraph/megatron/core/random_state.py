"""Megatron's RNG tracker: seeds, generators for graphs, and its state by value."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from chunkgraph.megatron.core.access import import_megatron

_RANDOM = "megatron.core.tensor_parallel.random"


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
