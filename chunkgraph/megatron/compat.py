"""Every private name of Megatron-core that chunkgraph touches, and every patch, in one module.

Features are detected, never versions: each helper looks for the name it needs and says clearly
what is missing when a release has moved it. Nothing here imports Megatron at import time, so that
:mod:`chunkgraph.megatron.cpu_host` can prepare a machine without CUDA or triton first.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from chunkgraph.errors import ConfigError, MissingDependencyError

__all__ = [
    "HostGenerator",
    "TritonStubFinder",
    "call_parameter_gather_hooks",
    "capture_flag",
    "grad_ready_signal",
    "graph_safe_generators",
    "import_megatron",
    "is_fully_sharded",
    "patch_attributes",
    "patch_rng",
    "preserve_rng",
    "rng_is_graph_safe",
    "seed_model_parallel",
    "unwrap_ddp",
    "versions",
]

_MISSING = object()


def import_megatron(name: str = "megatron.core") -> ModuleType:
    """Import a Megatron module, with advice when the package is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "megatron":
            raise MissingDependencyError(
                f"{name} cannot be imported: {error}. Install megatron-core, for example with "
                "pip install 'chunkgraph[megatron]'."
            ) from error
        if error.name == "triton":
            raise MissingDependencyError(
                f"{name} imports triton, which this torch does not ship. Enter "
                "chunkgraph.megatron.cpu_host.cpu_host() before Megatron is imported, or install "
                "triton."
            ) from error
        raise


def versions() -> dict[str, str]:
    """Versions of what the run stands on, for reports."""
    found = {
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        # Its own __version__ carries the commit of whatever repository it is run in.
        "megatron_core": _distribution_version("megatron-core"),
    }
    with contextlib.suppress(ImportError):
        found["transformer_engine"] = str(importlib.import_module("transformer_engine").__version__)
    return found


def _distribution_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _private(module_name: str, *names: str) -> tuple[Any, ...]:
    module = import_megatron(module_name)
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"{module_name} of megatron-core {versions()['megatron_core']} has no "
            f"{', '.join(missing)}, which chunkgraph needs. Versions 0.16 to 0.19 have it; use one "
            "of them, or report the release."
        )
    return tuple(getattr(module, name) for name in names)


# -- patching ------------------------------------------------------------------------------------


def patch_attributes(target: object, replacements: Mapping[str, Any]) -> Callable[[], None]:
    """Set attributes on ``target`` and return a function that puts the old ones back."""
    saved = {name: getattr(target, name, _MISSING) for name in replacements}
    for name, value in replacements.items():
        setattr(target, name, value)

    def undo() -> None:
        for name, value in saved.items():
            if value is _MISSING:
                delattr(target, name)
            else:
                setattr(target, name, value)

    return undo


class _TritonStub:
    """Stands for triton in a module whose kernels are never launched on this machine."""

    def __getattr__(self, name: str) -> _TritonStub:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator it leaves the kernel alone; as anything else it stays a stub.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


class _StubTritonLoader(importlib.machinery.SourceFileLoader):
    """Compiles one source file with its top-level triton imports turned into stubs."""

    _IMPORT = re.compile(r"^import triton(?:\.language as (?P<alias>\w+))?[ \t]*$", re.MULTILINE)

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname) or ""
        stub = f"__import__({__name__!r}, fromlist=['_TritonStub'])._TritonStub()"
        source = self._IMPORT.sub(lambda m: f"{m['alias'] or 'triton'} = {stub}", source)
        return compile(source, self.path, "exec", dont_inherit=True)


class TritonStubFinder:
    """Meta-path finder for the paged-stash modules, which import triton without asking.

    A stub in ``sys.modules`` would be seen by torch itself, which then believes that triton is
    there. So only these modules are compiled differently, and nothing else changes.
    """

    modules = (
        "megatron.core.transformer.moe.paged_stash",
        "megatron.core.transformer.moe.ops.paged_stash",
    )

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
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
        """Add the finder where triton is missing; return a function that takes it away."""
        if importlib.util.find_spec("triton") is not None or cls in sys.meta_path:
            return lambda: None
        sys.meta_path.insert(0, cls)  # type: ignore[arg-type]
        return lambda: sys.meta_path.remove(cls)  # type: ignore[arg-type]


# -- random numbers ------------------------------------------------------------------------------

_RANDOM = "megatron.core.tensor_parallel.random"


class HostGenerator(Protocol):
    """What the CPU host offers in place of the CUDA default generator and its states."""

    current: Any

    def clone_current(self) -> Any:
        """A new state object that starts where the current one is."""

    def switch_to(self, state: Any) -> None:
        """Make ``state`` the live one; repeated at every replay when captured."""


def patch_rng(host: HostGenerator) -> Callable[[], None]:
    """Point Megatron's RNG tracker at the CPU generator; return a function that undoes it.

    The tracker then holds state objects, as it does with graph-safe CUDA generators, and every
    switch between them goes through ``host.switch_to``. Megatron's own ``fork`` also compares the
    CPU generator before and after, reading a tensor's value; here both are the same generator, and
    no graph could hold the read, so the tracker gets a ``fork`` without it.
    """
    module = import_megatron(_RANDOM)
    base, default_name = _private(
        _RANDOM, "CudaRNGStatesTracker", "_MODEL_PARALLEL_RNG_TRACKER_NAME"
    )
    _private(_RANDOM, "_get_cuda_rng_state", "_set_cuda_rng_state", "initialize_rng_tracker")

    class HostRngStatesTracker(base):  # type: ignore[misc,valid-type]
        """Megatron's tracker on the CPU generator, always graph-safe."""

        def __init__(
            self, use_cudagraphable_rng: bool = True, is_inference_rng_tracker: bool = False
        ) -> None:
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

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        if not graph_safe:
            return torch.get_rng_state()
        return host.clone_current() if clone else host.current

    def set_state(state: Any, device: Any = -1, graph_safe: bool = False) -> None:
        if isinstance(state, torch.Tensor):
            torch.set_rng_state(state)
        else:
            host.switch_to(state)

    restore = patch_attributes(
        module,
        {
            "CudaRNGStatesTracker": HostRngStatesTracker,
            "_get_cuda_rng_state": get_state,
            "_set_cuda_rng_state": set_state,
            # A tracker made before the patch would hold states of the wrong kind.
            "_CUDA_RNG_STATE_TRACKER": None,
            "_CUDA_RNG_STATE_TRACKER_INITIALIZED": False,
        },
    )
    return restore


def seed_model_parallel(seed: int, *, graph_safe: bool = True) -> None:
    """Seed Megatron's tracker; with ``graph_safe``, one whose states graphs can switch.

    Transformer Engine's tracker is used where it is installed, since its modules expect it.
    """
    (manual_seed,) = _private(_RANDOM, "model_parallel_cuda_manual_seed")
    accepted = inspect.signature(manual_seed).parameters
    wanted: dict[str, bool] = {}
    if graph_safe:
        engine = importlib.util.find_spec("transformer_engine") is not None
        wanted["te_rng_tracker" if engine else "use_cudagraphable_rng"] = True
    manual_seed(seed, **{name: value for name, value in wanted.items() if name in accepted})


def _tracker() -> Any:
    (get_tracker,) = _private(_RANDOM, "get_cuda_rng_tracker")
    return get_tracker()


def rng_is_graph_safe() -> bool:
    """Whether the tracker's states are generators whose switch a graph can hold."""
    module = import_megatron(_RANDOM)
    tracker = _tracker()
    probe = getattr(module, "is_graph_safe_cuda_rng_tracker", None)
    if probe is not None:
        return bool(probe(tracker))
    return bool(getattr(tracker, "use_cudagraphable_rng", False))


def graph_safe_generators() -> list[torch.Generator]:
    """The tracker's generators, to be registered with every CUDA graph (none on a CPU host)."""
    (get_all,) = _private(_RANDOM, "get_all_rng_states")
    states = get_all() or {}
    return [state for state in states.values() if isinstance(state, torch.Generator)]


@contextlib.contextmanager
def preserve_rng() -> Iterator[None]:
    """Put the default generators and every state of Megatron's tracker back on exit."""
    tracker = _tracker()
    states = tracker.get_states() if tracker.is_initialized() else {}
    saved = {
        name: state.clone() if isinstance(state, torch.Tensor) else state.get_state()
        for name, state in states.items()
    }
    cuda = torch.cuda.is_available()
    host_state, device_state = torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None
    try:
        yield
    finally:
        for name, state in states.items():
            if not isinstance(state, torch.Tensor):
                state.set_state(saved[name])
        if states and all(isinstance(state, torch.Tensor) for state in states.values()):
            tracker.set_states(saved)
        torch.set_rng_state(host_state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)


# -- capture flag --------------------------------------------------------------------------------


@contextlib.contextmanager
def capture_flag() -> Iterator[None]:
    """Tell Megatron (and Transformer Engine) that a graph is being captured.

    DDP's parameter-gather and gradient hooks keep silent while it is set; the plug-in gives their
    signals around every replay instead.
    """
    start, end = _private(
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


# -- distributed data parallel -------------------------------------------------------------------

_DDP = "megatron.core.distributed.distributed_data_parallel"


def unwrap_ddp(chunk: nn.Module) -> nn.Module | None:
    """Megatron's DistributedDataParallel among the wrappers of ``chunk``, or None."""
    (ddp_class,) = _private(_DDP, "DistributedDataParallel")
    module: Any = chunk
    while isinstance(module, nn.Module):
        if isinstance(module, ddp_class):
            return module
        module = getattr(module, "module", None)
    return None


def is_fully_sharded(chunk: nn.Module) -> bool:
    """Whether any wrapper of ``chunk`` shards its parameters (any flavour of FSDP)."""
    module: Any = chunk
    while isinstance(module, nn.Module):
        kind = type(module)
        where = f"{kind.__module__}.{kind.__name__}".lower()
        if "fsdp" in where or "fullysharded" in where or "fully_sharded" in where:
            return True
        module = getattr(module, "module", None)
    return False


def call_parameter_gather_hooks(modules: Sequence[nn.Module]) -> None:
    """Run DDP's forward pre-hooks of ``modules`` by hand; a replay would not.

    DDP adds and takes away these hooks between steps, so they are looked up at every call.
    """
    for module in modules:
        for hook in list(module._forward_pre_hooks.values()):
            if getattr(hook, "__module__", None) == _DDP:
                hook(module, ())


def grad_ready_signal(
    ddp: nn.Module, parameters: Sequence[nn.Parameter]
) -> Callable[[], None] | None:
    """A function that tells ``ddp`` that the gradients of ``parameters`` are accumulated.

    Returns None where DDP wants no such signal (without overlap_grad_reduce it reduces at the
    step's end). The bucket groups themselves ignore it but for the last microbatch.
    """
    ddp_config = getattr(ddp, "ddp_config", None)
    groups = getattr(ddp, "param_to_bucket_group", None)
    if ddp_config is None or groups is None:
        raise ConfigError(
            f"{type(ddp).__qualname__} has no ddp_config or param_to_bucket_group: this release of "
            "megatron-core keeps its gradient buckets elsewhere. Use 0.16 to 0.19."
        )
    if not ddp_config.overlap_grad_reduce:
        return None
    targets = [(groups[parameter], parameter) for parameter in parameters if parameter in groups]
    takes_force = all(
        "force_all_reduce" in inspect.signature(group.register_grad_ready).parameters
        for group, _ in targets
    )

    def signal() -> None:
        if takes_force:
            force = getattr(ddp, "force_all_reduce", False)
            for group, parameter in targets:
                group.register_grad_ready(parameter, force)
        else:
            for group, parameter in targets:
                group.register_grad_ready(parameter)

    return signal
