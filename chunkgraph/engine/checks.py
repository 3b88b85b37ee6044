"""Check, once a step and before its first launch, that the model is as it was captured.

A graph knows only addresses, and runs no Python. These checks find what training loops really do:
load a checkpoint into new tensors, freeze layers, forget ``train()``, add a profiler's hook. What
else a forward reads from Python must not change; see docs/contract.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from chunkgraph._text import shown
from chunkgraph.engine.chunk import Chunk
from chunkgraph.errors import CaptureError, ReplayMismatchError

__all__ = ["ModelGuard", "refuse_contexts"]

_LIBRARIES = frozenset({"chunkgraph", "megatron", "torch", "transformer_engine"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARTS = itemgetter("_modules", "_parameters", "_buffers")
_FACTS = (
    *("was replaced, added or removed", "was moved to other memory", "has other strides"),
    *("was frozen or unfrozen", "was put into another mode (train, eval)"),
    *("has its main_grad in other memory, or none", "was changed"),
)

_address, _stride, _training = torch.Tensor.data_ptr, torch.Tensor.stride, itemgetter("training")
_requires_grad, _main_grad = attrgetter("requires_grad"), attrgetter("main_grad")
_Error = type[CaptureError] | type[ReplayMismatchError]


class ModelGuard:
    """What one chunk's graphs depend on.

    Args:
        chunk: the chunk; without a module only its parameters are known.

    Attributes:
        label: label of the chunk.
        parameters: trainable parameters of the chunk.

    Raises:
        CaptureError: replays would skip a hook or a wrapper.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.label, self.parameters, self._caches = chunk.label, chunk.parameters, chunk.caches
        modules = chunk.module.named_modules() if chunk.module is not None else ()
        self._modules = {path or "the chunk": module for path, module in modules}
        self._modes = _modes()
        self.refuse_hooks(CaptureError)
        self._take()

    def _take(self) -> None:
        """Record the present state."""
        self._dicts = [*chain.from_iterable(_PARTS(vars(m)) for m in self._modules.values())]
        self._objects = self._objects_now()  # held, so that no other object gets their ids
        named = {id(t): (name, t) for name, t in self._objects if isinstance(t, torch.Tensor)}
        shapes = [(id(p), (f"shape {tuple(p.shape)}", p)) for p in self.parameters]
        named = {**dict(shapes), **named}
        names, self._tensors = [n for n, _ in named.values()], [t for _, t in named.values()]
        self._of_grads = [p for p in self.parameters if hasattr(p, "main_grad")]
        with_mode = {n: vars(m) for n, m in self._modules.items() if "training" in vars(m)}
        self._attributes = [*with_mode.values()]
        self._settings = [(n, vars(m), k) for n, m in self._modules.items() for k in _settings(m)]
        self._facts = self._facts_now()
        self._names = [
            *([name for name, _ in self._objects], names, names, names, [*with_mode]),
            [named[id(p)][0] for p in self._of_grads],
            [f"{name}.{key}" for name, _, key in self._settings],
        ]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore, on exit of a session, parts and tensors of the module.

        Raises:
            CaptureError: the forward replaced one of them.
        """
        before = [(held, dict(held)) for held in self._dicts]
        try:
            yield
        finally:
            replaced = [key for held, old in before for key in old if held.get(key) is not old[key]]
            for held, old in before:
                held.update(old)
        if replaced := [key for key in replaced if key not in self._caches]:
            raise CaptureError(
                f"{self.label}: its forward replaces {', '.join(replaced)} by another tensor, so "
                "every replay would start from the value of the capture. Update it in place "
                "(add_, copy_), or keep it out of the chunk."
            )
        self._take()

    def check(self) -> None:
        """Compare everything; called inside the contexts of a step's first call.

        Raises:
            ReplayMismatchError: something has changed since the capture.
        """
        refuse_contexts(self.label, ReplayMismatchError)
        if new := [mode for mode in _modes() if mode not in self._modes]:
            raise ReplayMismatchError(
                f"{self.label}: {new[0]} is active, which was not active at the capture. A replay "
                "runs no Python, so this mode would see nothing. Leave its block, or ask for an "
                "eager step (`step(eager=True)`)."
            )
        if RemovableHandle.next_id != self._num_hooks:
            self.refuse_hooks(ReplayMismatchError)
        if (now := self._facts_now()) != self._facts:
            raise ReplayMismatchError(
                f"{self.label}: {self._change(now)} after the capture; replays would ignore this. "
                "Update tensors in place (copy_), or release the graphs and capture again."
            )

    def refuse_hooks(self, error: _Error) -> None:
        """Refuse hooks on modules and gradients that no library owns, and wrappers of DDP.

        Raises:
            CaptureError: there is one (if it is ``error``).
            ReplayMismatchError: the same, at a replay.
        """
        self._num_hooks = -1  # until all hooks have been accepted
        hooks = {"all modules": [getattr(nn.modules.module, f"_global{name}") for name in _HOOKS]}
        for path, module in self._modules.items():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                raise error(
                    f"{self.label}: {path} is a torch DistributedDataParallel, which does not see "
                    "the gradients of replays. Pass ChunkGraphs the module without the wrapper, "
                    "and reduce the gradients after the step."
                )
            hooks[path] = [vars(module).get(name) or {} for name in _HOOKS]
        for p in self.parameters:
            if not hasattr(p, "main_grad"):  # whose owner does the work of its hooks
                after = getattr(p, "_post_accumulate_grad_hooks", None)
                hooks.setdefault("gradients", []).extend((p._backward_hooks or {}, after or {}))
        for where, hook in (
            (w, h) for w, dicts in hooks.items() for d in dicts for h in d.values()
        ):
            if not _is_of_library(hook):
                raise error(
                    f"{self.label}: there is a hook on {where} ({shown(hook)}), and a replay calls "
                    "no hooks. Remove it, or do its work outside of the chunk: after the step, or "
                    "in Chunk.after_backward."
                )
        self._num_hooks = RemovableHandle.next_id

    def _objects_now(self) -> list[tuple[str, Any]]:
        """Return parts and tensors, except caches that eager calls may replace."""
        return [
            (f"{path}.{key}".removeprefix("the chunk."), value)
            for path, module in self._modules.items()
            for held in _PARTS(vars(module))
            for key, value in held.items()
            if key not in self._caches
        ]

    def _facts_now(self) -> list[list[Any]]:
        tensors = self._tensors
        objects = chain.from_iterable(map(dict.values, self._dicts))
        if self._caches:
            objects = (v for held in self._dicts for k, v in held.items() if k not in self._caches)
        grads = (
            [*map(_main_grad, self._of_grads)] if all(map(_has_main_grad, self._of_grads)) else []
        )
        return [
            [*map(id, objects)],
            [*map(_address, tensors)],
            [*map(_stride, tensors)],
            [*map(_requires_grad, tensors)],
            [*map(_training, self._attributes)],
            [*map(_address, grads)],
            [own.get(key) for _, own, key in self._settings],
        ]

    def _change(self, now: Sequence[Sequence[Any]]) -> str:
        """Describe the first fact that differs."""
        for what, names, a, b in zip(_FACTS, self._names, self._facts, now, strict=True):
            if len(a) != len(b):
                changed = {*names} ^ {name for name, _ in self._objects_now()}
                return f"{min(changed, default='a tensor')} {what}"
            for name, old, new in zip(names, a, b, strict=True):
                if old != new:
                    detail = f" from {old!r} to {new!r}" if a is self._facts[-1] else ""
                    return f"{name} {what}{detail}"
        raise AssertionError("nothing has changed")


def refuse_contexts(label: str, error: _Error) -> None:
    """Refuse contexts that change eager work, but not replays.

    Raises:
        CaptureError: anomaly detection, torch.func, forward-mode autograd or hooks for saved
            tensors are active (if it is ``error``).
        ReplayMismatchError: the same, at a replay.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    active = {
        "anomaly detection": torch.is_anomaly_enabled(),
        "torch.func (grad, vmap, jvp)": torch._C._are_functorch_transforms_active(),
        "forward-mode autograd": forward_ad._current_level >= 0,
        "saved_tensors_hooks": hooks is not None and not _is_of_library(hooks[0]),
    }
    for name, is_active in active.items():
        if is_active:
            raise error(
                f"{label} is called under {name}, which does not reach the graphs of a replay. "
                "Leave its block, or ask for an eager step (`step(eager=True)`)."
            )


def _modes() -> list[str]:
    """Return the kinds of torch's dispatch and function modes that are active."""
    modes = (*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack())
    return [type(mode).__qualname__ for mode in modes]


def _settings(module: nn.Module) -> list[str]:
    """Return the names of the settings of a layer of torch.nn: ``p``, ``eps``, ``momentum``."""
    if not type(module).__module__.startswith("torch.nn."):
        return []
    own = ((k, v) for k, v in vars(module).items() if k != "training" and not k.startswith("_"))
    return [key for key, value in own if isinstance(value, (float, bool, str, type(None)))]


def _is_of_library(hook: Any) -> bool:
    """Return whether a hook belongs to a library whose hooks come and go around steps."""
    function = getattr(hook, "func", hook)  # of a partial
    owner = getattr(function, "__module__", None) or type(function).__module__
    return str(owner).partition(".")[0] in _LIBRARIES


def _has_main_grad(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "main_grad", None) is not None
