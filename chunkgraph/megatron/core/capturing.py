"""Make Megatron's and Transformer Engine's layers capturable, as contexts around a capture.

Inside, both libraries know of the capture, recompute as in eager training, copy nothing from the
host, read nothing back, and choose the attention of eager steps. `HostTorch` emulates, on a CPU
host, Megatron's small tensors that stay on the host next to a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from chunkgraph.errors import CaptureError
from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names


def is_in_backward() -> bool:
    """Return whether this thread runs a backward, in which a forward is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def has_gpu() -> bool:
    """Return whether there is a real GPU; a CPU host makes torch report one without a GPU."""
    return torch.cuda.is_available() and issubclass(torch.cuda.Stream, torch.Stream)


class _HostTensor(torch.Tensor):
    """A tensor that lies on the host on a machine with a GPU, where reading it is allowed."""

    def item(self) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return super().item()

    def tolist(self) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return super().tolist()

    def detach(self) -> _HostTensor:
        return self


def host_full(shape: tuple[int, ...], value: int) -> torch.Tensor:
    """Return an int64 host tensor of ``shape`` filled with ``value``; captures do not see it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        tensor = torch.full(shape, value, dtype=torch.long, device="cpu")
        return tensor if has_gpu() else tensor.as_subclass(_HostTensor)


class HostTorch:
    """Replace the name ``torch`` in one of Megatron's modules on a CPU host.

    Next to a GPU, tensors made without a device lie on the host, and Megatron reads them there. A
    CUDA graph does not see this; the recorder would report a read of device memory.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call `torch.tensor`, outside of the capture if no device is named."""
        return self._create(torch.tensor, args, kwargs)

    def full(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call `torch.full`, outside of the capture if no device is named."""
        return self._create(torch.full, args, kwargs)

    @staticmethod
    def _create(make: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if "device" in kwargs:
            return make(*args, **kwargs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return make(*args, **kwargs).as_subclass(_HostTensor)


@contextlib.contextmanager
def capture_flag() -> Iterator[None]:
    """Set the flags by which Megatron and Transformer Engine recognize a running capture.

    While they are set, DDP's parameter-gather and gradient hooks do nothing; chunkgraph sends
    their signals around every replay instead.
    """
    start, end = private_names(
        "megatron.core.transformer.cuda_graphs", "_set_capture_start", "_set_capture_end"
    )
    engine: ModuleType | None = None
    if "transformer_engine" in sys.modules:
        with contextlib.suppress(ImportError):
            engine = importlib.import_module("transformer_engine.pytorch.graph")
    start()
    if engine is not None:
        engine.set_capture_start()
    try:
        yield
    finally:
        if engine is not None:
            engine.set_capture_end()
        end()


_RANDOM = "megatron.core.tensor_parallel.random"


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Make Megatron's checkpoint recompute in a capture as it does in eager training.

    Later releases check their capture flag and then silently keep all activations, since their
    graphs end with each layer's forward. Here the backward is captured as well, by ``backward()``,
    so recomputation is legal and becomes part of the backward's graph.

    Megatron saves and restores the states of its RNG tracker around a recomputation, as references
    to generators, which a capture does not see. Here it saves the state of the default generator:
    captures then refuse dropout in what is recomputed, as they do for torch's checkpoints.
    """
    (function,) = private_names(_RANDOM, "CheckpointFunction")

    def checkpoint(run: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        return function.apply(run, distribute_saved_activations, *args)

    generators = torch.cuda if has_gpu() else torch.random
    private_names(_RANDOM, "_get_all_rng_states", "_set_all_rng_states")

    def get_states() -> tuple[torch.Tensor]:
        return (generators.get_rng_state(),)

    def set_states(state: torch.Tensor) -> None:
        generators.set_rng_state(state)  # which captures replace

    states = {"_get_all_rng_states": get_states, "_set_all_rng_states": set_states}
    with contextlib.ExitStack() as stack:
        stack.callback(patch_attributes(import_megatron(_RANDOM), states))
        for name in (_RANDOM, "megatron.core.tensor_parallel"):
            private_names(name, "checkpoint")
            stack.callback(patch_attributes(import_megatron(name), {"checkpoint": checkpoint}))
        if not has_gpu():
            # Attention passes the mask type to its recomputation in a small host tensor.
            attention = import_megatron("megatron.core.transformer.attention")
            stack.callback(patch_attributes(attention, {"torch": HostTorch()}))
        yield


_RULE = "torch_chunk_gated_delta_rule"
_LAYER_RULE = "gated_delta_rule"


@contextmanager
def states_on_device(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make the gated delta rule of ``modules`` copy nothing from the host.

    Without an initial state, the rule makes zeros on the host and copies them to the GPU, which a
    capture cannot hold. Here it gets the zeros as its initial state.
    """
    layers = [m for m in modules if hasattr(sys.modules[type(m).__module__], _RULE)]
    with ExitStack() as stack:
        for name in {type(layer).__module__ for layer in layers}:
            source = sys.modules[name]
            eager = getattr(source, _RULE)
            patched = _with_state(eager)
            # Later releases look the rule up once per layer, earlier ones in every call.
            stack.callback(patch_attributes(source, {_RULE: patched}))
            for layer in layers:
                if getattr(layer, _LAYER_RULE, None) is eager:
                    stack.callback(patch_attributes(layer, {_LAYER_RULE: patched}))
        yield


def _with_state(eager: Callable[..., Any]) -> Callable[..., Any]:
    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        initial_state: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the rule on tensors [batch, sequence, heads, width]."""
        if initial_state is None:
            batch, _, heads, width = key.shape
            shape = (batch, heads, width, value.shape[-1])
            initial_state = torch.zeros(shape, device=value.device)
        return eager(query, key, value, *args, initial_state=initial_state, **kwargs)

    return rule


@contextmanager
def without_realtime_tests() -> Iterator[None]:
    """Leave out the comparison of the query and key norms of all data-parallel ranks.

    It reads the result on the host and changes nothing that is computed.
    """
    (attention,) = private_names("megatron.core.transformer.attention", "SelfAttention")

    def run_realtime_tests(_self: Any) -> None:
        pass

    with ExitStack() as undo:
        undo.callback(patch_attributes(attention, {"run_realtime_tests": run_realtime_tests}))
        yield


_MODULE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


@contextmanager
def same_attention() -> Iterator[None]:
    """Check, around captures, that they run the attention that eager steps ran.

    Another backend computes other bits than eager training, and is slower. Only choices for the
    same attention arguments are compared.

    Raises:
        CaptureError: Transformer Engine chose another backend for the capture.
    """
    before = _last_choice()
    yield
    after = _last_choice()
    if before and after and before[0] == after[0] and before[1] != after[1]:
        # The rule is in `nvte_get_fused_attn_backend` of Transformer Engine 2.x.
        raise CaptureError(
            f"Transformer Engine ran {before[1]} in eager steps and takes {after[1]} in captures, "
            "which computes other bits. With cuDNN up to 9.15 it captures cuDNN's attention only "
            "for sequences (under context parallelism: half of a rank's) of a multiple of 128. To "
            "do: use a multiple of 128, or a newer cuDNN, or install flash-attn; NVTE_DEBUG=1 "
            "NVTE_DEBUG_LEVEL=2 shows other reasons."
        )


def _last_choice() -> tuple[Any, str] | None:
    """Return the last attention's arguments, with ``cuda_graph`` set, and the backend it used."""
    choice = getattr(sys.modules.get(_MODULE), "_attention_backends", None) or {}
    arguments: Any = copy.copy(choice.get("attention_params"))
    if not hasattr(arguments, "cuda_graph"):
        return None
    arguments.cuda_graph = True
    kinds = (kind for kind in ("flash", "fused", "unfused") if choice.get(f"use_{kind}_attention"))
    return arguments, f"{', '.join(kinds)} attention"
