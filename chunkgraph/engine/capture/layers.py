"""Locate events in the layers of a chunk, by temporary forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from chunkgraph.engine.chunk import Chunk

_next_sequence_number = torch._C._autograd._get_sequence_nr


def parameter_names(chunk: Chunk) -> list[str]:
    """Return a name for each of the chunk's parameters, in order."""
    names: dict[int, str] = {}  # by address, since a session replaces parameters by aliases
    if chunk.module is not None:
        for path, parameter in chunk.module.named_parameters():
            names[parameter.data_ptr()] = f"{chunk.module_name}.{path}".lstrip(".")
    return [
        names.get(p.data_ptr(), f"parameter {i} of shape {tuple(p.shape)}")
        for i, p in enumerate(chunk.parameters)
    ]


class LayerWatch:
    """Follow chunks through their layers inside `watching`.

    After an exception, `layer` is the layer that raised it. Layers inside compiled code are not
    seen, nor are layers of a torch encoder in evaluation mode, whose hooks would make torch run
    other kernels.
    """

    def __init__(self) -> None:
        self._running: list[tuple[nn.Module, str, int]] = []
        # (first, end, name) in autograd's sequence numbers; inner layers before outer layers.
        self._spans: list[tuple[int, int, str]] = []

    @property
    def layer(self) -> str:
        """Return the innermost layer that runs or raised the last exception; else ""."""
        return self._running[-1][1] if self._running else ""

    def layer_of(self, sequence_number: int) -> str:
        """Return the innermost layer whose forward created this autograd node, or ""."""
        return next((name for a, b, name in self._spans if a <= sequence_number < b), "")

    @contextmanager
    def watching(self, chunks: Sequence[Chunk]) -> Iterator[LayerWatch]:
        """Follow the forwards of ``chunks`` in this block."""
        with ExitStack() as stack:
            for chunk in chunks:
                layers = [*chunk.module.named_modules()] if chunk.module is not None else []
                unwatched = _choosing_by_hooks(module for _, module in layers)
                for path, module in layers:
                    if module in unwatched:
                        continue
                    name = f"{chunk.module_name}.{path}".strip(".")
                    name = name or f"{type(module).__name__} (the chunk itself)"
                    pre = module.register_forward_pre_hook(self._entering(chunk.module, name))
                    stack.callback(pre.remove)
                    post = module.register_forward_hook(self._leave)
                    stack.callback(post.remove)
            yield self

    def _entering(self, root: nn.Module | None, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _args: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if module is root:
                self._running.clear()
                self._spans.clear()
            self._running.append((module, name, _next_sequence_number()))

        return hook

    def _leave(self, module: nn.Module, _args: Any, _result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # Layers whose exception the model caught are still on top.
        while self._running and self._running[-1][0] is not module:
            self._running.pop()
        if self._running:
            _, name, first = self._running.pop()
            self._spans.append((first, _next_sequence_number(), name))


def _choosing_by_hooks(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the modules on which any hook would disable a layer's fast path."""
    return {
        part
        for module in modules
        if isinstance(module, nn.TransformerEncoderLayer) and not module.training
        for part in module.modules()
    }
