"""Run unmodified Megatron-core on a machine without a GPU.

::

    with cpu_host():
        import megatron.core            # schedules, DDP, optimizer: all on the CPU, over gloo

Effects inside the block, undone on exit:

* ``device="cuda"`` in factories, ``.to("cuda")``, ``.cuda()`` and pinned memory mean the CPU;
* ``torch.cuda`` streams do nothing, events hold the host's time, random-number calls of
  ``torch.cuda`` use the CPU generator, and ``torch.cuda.is_available()`` is false;
* the norm of gradients reads no device, as on a GPU;
* Megatron's RNG tracker switches states of the CPU generator in a way that a graph can repeat,
  and recomputation restores them;
* modules that import triton unconditionally load without it.

Streams, NCCL, GPU kernels and GPU memory are not emulated. The model must use the local layer
spec, no fusions, ``batch_p2p_comm=False`` and ``use_cpu_initialization=True``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, SimpleNamespace
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from chunkgraph.graphs import host_call
from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names

_CPU = torch.device("cpu")
_MOE = "megatron.core.transformer.moe"
# Methods that take or return a device without a keyword.
_NAMING_DEVICES = {
    *(torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.type, torch.Tensor.to)
}


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


class _Device(str):
    """The CPU as a device; its number is 0 in names such as ``cuda:0``."""

    __slots__ = ()

    def __new__(cls) -> Self:
        return super().__new__(cls, "cpu")

    def __format__(self, _: str) -> str:
        return "0"


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrite every request for a CUDA device into one for the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Even reading a shape passes through here, so most calls must be cheap.
        if not kwargs and func not in _NAMING_DEVICES:
            return func(*args)
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers recognize a parameter by the name of its CUDA type.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _Done:
    """A stream or an event whose work is always complete."""

    __init__ = __exit__ = synchronize = _nothing

    def query(self) -> bool:
        return True


class _Event(_Done):
    wait = _nothing
    _recorded_s = 0.0

    def record(self, *_: object) -> None:
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, other: _Event) -> float:
        return (other._recorded_s - self._recorded_s) * 1e3


class _Stream(_Done):
    cuda_stream = 0
    device = _CPU
    wait_stream = wait_event = _nothing

    def record_event(self, event: _Event | None = None) -> _Event:
        return event if event is not None else _Event()

    def __enter__(self) -> Self:
        return self


def _cuda_stubs() -> dict[str, Any]:
    """Return replacements by name, all distinct: torch's compiler refuses one under two names."""

    def nothing() -> Callable[..., None]:
        return lambda *_, **__: None

    return {
        "is_available": lambda: False,
        "device_count": lambda: 0,
        "current_device": _Device,
        # Transformer Engine may call this while it is imported, even next to a GPU.
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
        # Not torch.manual_seed, which calls manual_seed_all.
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }


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


class HostRng:
    """The CPU's default generator, shared by several states of which one is live."""

    def __init__(self) -> None:
        self.default = self.current = HostRngState(self, torch.get_rng_state())

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

        @contextmanager
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
        return HostRngState(host, host.current.get_state()) if clone else host.current

    def set_state(state: Any, *_: Any, **__: Any) -> None:
        if isinstance(state, torch.Tensor):
            torch.set_rng_state(state)
        else:
            host.switch_to(state)

    def convert(state: Any, to_graphable: bool) -> Any:
        """Convert a state from a checkpoint, of either kind, to one of this host."""
        values = state if isinstance(state, torch.Tensor) else state.get_state()
        return HostRngState(host, values) if to_graphable else values

    undo = ExitStack()
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


_mesh_from_group = DeviceMesh.from_group


def _mesh_of_cpus(group: Any, *_: Any, **kwargs: Any) -> DeviceMesh:
    """Return a mesh of CPUs, whatever type of device is asked for."""
    return _mesh_from_group(group, **{**kwargs, "device_type": "cpu"})


@contextmanager
def cpu_host() -> Iterator[HostRng]:
    """Install the replacements for this thread; this imports Megatron's RNG module."""
    with ExitStack() as stack:
        stack.callback(patch_attributes(torch.cuda, _cuda_stubs()))
        stack.callback(patch_attributes(torch.Tensor, {"record_stream": lambda *_: None}))
        stack.callback(patch_attributes(DeviceMesh, {"from_group": _mesh_of_cpus}))
        stack.callback(TritonStubFinder.install())
        stack.enter_context(_CudaMeansCpu())
        # Otherwise a backward, which may recompute a forward, runs without the mode.
        stack.callback(patch_attributes(torch.autograd, {"has_torch_function": lambda _: False}))
        stack.enter_context(torch.serialization.safe_globals([HostRngState]))
        rng = HostRng()
        stack.callback(patch_rng(rng))
        stack.callback(_patch_router())
        stack.callback(_patch_norm())
        stack.callback(rng.switch_to, rng.default)
        yield rng


def _patch_router() -> Callable[[], None]:
    """Let Megatron's router and dispatchers run on a CPU host; return the undo function.

    Releases before 0.17 look up Transformer Engine's matrix product under a name that exists only
    with Transformer Engine, and one compiled function of the router needs a compiler on the host.
    """
    utils = import_megatron(f"{_MOE}.moe_utils")
    (top_k,) = private_names(f"{_MOE}.router", "TopKRouter")
    undo = ExitStack()
    if not hasattr(utils, "te_general_gemm"):
        undo.callback(patch_attributes(utils, {"te_general_gemm": None}))
    compiled = vars(top_k).get("_apply_expert_bias")
    original = inspect.unwrap(compiled) if compiled is not None else None
    if original is not compiled:
        undo.callback(patch_attributes(top_k, {"_apply_expert_bias": original}))
    module = import_megatron(f"{_MOE}.token_dispatcher")
    undo.callback(patch_attributes(module, {"maybe_move_tensor_to_cpu": _on_the_host}))
    return undo.close


def _patch_norm() -> Callable[[], None]:
    """Let the norm of gradients, with the same bits, read nothing; return the undo function."""
    clipping = import_megatron("megatron.core.optimizer.clip_grads")

    def l2_norm(_size: int, _flag: Any, lists: Sequence[Any], _by_tensor: bool) -> Any:
        norms = torch.stack([torch.norm(tensor) for tensor in lists[0]])
        return torch.norm(norms.view(1, -1)).view(1), None

    return patch_attributes(clipping, {"l2_norm_impl": l2_norm})


def _on_the_host(tensor: Any, as_numpy: bool = False, **_: object) -> Any:
    """Return the splits in the requested form; Megatron moves them to the host only from GPUs."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _TritonStub:
    """Replace triton in a module whose kernels are never launched on this machine."""

    def __getattr__(self, name: str) -> _TritonStub:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator, return the kernel; otherwise return the stub.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


class _StubTritonLoader(importlib.machinery.SourceFileLoader):
    """Compile one source file with stubs instead of its top-level triton imports."""

    _IMPORT = re.compile(
        r"^import triton(?:\.language as (?P<alias>\w+))?[ \t]*(?:#.*)?$", re.MULTILINE
    )

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname) or ""
        stub = f"__import__({__name__!r}, fromlist=['_TritonStub'])._TritonStub()"
        source = self._IMPORT.sub(lambda m: f"{m['alias'] or 'triton'} = {stub}", source)
        return compile(source, self.path, "exec", dont_inherit=True)


class TritonStubFinder:
    """Meta-path finder for modules that import triton unconditionally.

    These are modules of the paged stash, and a module of inference that Mamba layers import.

    A stub in ``sys.modules`` would make torch believe that triton is installed. So only these
    modules are compiled differently.
    """

    modules = (
        "megatron.core.transformer.moe.paged_stash",
        "megatron.core.transformer.moe.ops.paged_stash",
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
    )

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, *_: object
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec with the stubbing loader for the listed modules, else None."""
        if fullname not in cls.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return spec
        spec.loader = _StubTritonLoader(fullname, spec.origin)
        return spec

    @classmethod
    def install(cls) -> Callable[[], None]:
        """Add the finder if triton is missing; return a function that removes it."""
        if importlib.util.find_spec("triton") is not None or cls in sys.meta_path:
            return lambda: None
        sys.meta_path.insert(0, cls)
        return lambda: sys.meta_path.remove(cls)
