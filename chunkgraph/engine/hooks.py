"""Refuse hooks, modes and contexts that change eager work, but do not reach a replay's graphs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from chunkgraph._text import shown
from chunkgraph.errors import CaptureError, ReplayMismatchError

Error = type[CaptureError] | type[ReplayMismatchError]
"""The class of an error, at a capture or at a replay."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_GRADS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_LIBRARIES = frozenset({"chunkgraph", "megatron", "torch", "transformer_engine"})


def refuse_hooks(
    label: str,
    modules: Mapping[str, nn.Module],
    parameters: Mapping[str, nn.Parameter],
    error: Error,
) -> None:
    """Raise ``error`` for others' hooks on modules, any hooks on gradients, and DDP wrappers.

    Args:
        label: label of the chunk.
        modules: the chunk's modules by their paths.
        parameters: the parameters that must have no hooks, by their names.
        error: class of the error.
    """
    places = [("all modules", vars(nn.modules.module), "_global{}")]
    places += [(path, vars(module), "{}") for path, module in modules.items()]
    of_modules = ((w, own.get(k.format(n)), True) for w, own, k in places for n in _HOOKS)
    grads = [(f"the gradient of {name}", p) for name, p in parameters.items()]
    of_grads = ((where, getattr(p, n, None), False) for where, p in grads for n in _OF_GRADS)
    for where, hooks, may_be_known in chain(of_modules, of_grads):
        for hook in (hooks or {}).values():
            if not (may_be_known and _is_of_library(hook)):
                raise error(
                    f"{label}: there is a hook on {where} ({shown(hook)}), and a replay calls no "
                    "hooks. Remove it, or do its work after the step."
                )
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in modules.values()):
        raise error(
            f"{label} has a torch DistributedDataParallel, which does not see the gradients of "
            "replays. Pass ChunkGraphs the module without the wrapper, and reduce the gradients "
            "after the step."
        )


def refuse_contexts(label: str, error: Error) -> None:
    """Raise ``error`` in contexts that change eager work, but not replays."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    found = ["anomaly detection"] if torch.is_anomaly_enabled() else []
    found += ["saved_tensors_hooks"] if hooks is not None and not _is_of_library(hooks[0]) else []
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        found.append("torch.func or forward-mode autograd")
    modes = (*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack())
    # Harmless: a default device, since what a capture creates on it belongs to the graph, and the
    # CPU host's own mode.
    kinds = [kind for kind in map(type, modes) if kind is not DeviceContext]
    found += [k.__name__.lstrip("_") for k in kinds if not k.__module__.startswith("chunkgraph.")]
    if found:
        raise error(
            f"{label} is called under {found[0]}, and a replay runs no Python, so it would have no "
            "effect. Leave its block, or ask for an eager step (`step(eager=True)`)."
        )


def refuse_gradients_of_parameters(label: str, error: BaseException) -> None:
    """Explain torch's error in a replayed step that asks autograd.grad() for them."""
    if isinstance(error, RuntimeError) and "not have been used in the graph" in str(error):
        raise ReplayMismatchError(
            f"{label}: autograd.grad() asks for gradients of parameters, which a replayed backward "
            "adds to .grad itself.\n  To do: call backward() and read .grad after the step, or ask "
            "for an eager step (`step(eager=True)`)."
        ) from error


def _is_of_library(hook: Any) -> bool:
    """Return whether a hook belongs to a library whose hooks come and go around steps."""
    function = getattr(hook, "func", hook)  # of a partial
    owner = getattr(function, "__module__", None) or type(function).__module__
    return str(owner).partition(".")[0] in _LIBRARIES
