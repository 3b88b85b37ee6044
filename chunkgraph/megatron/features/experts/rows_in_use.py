"""Find the rows of an expert's input that contain a token, if there are more rows than tokens.

Megatron's router fills an expert's room with tokens that did not choose it, at probability 0, mixed
with those that did. Here filler rows carry probability -1 from the router to the experts: no
collective is needed to mark them on other ranks, and a token that chose an expert at probability 0
still counts. The experts themselves still receive probability 0 for fillers.

Without a capacity there are no fillers: the used rows come first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from chunkgraph.megatron.core.access import patch_attributes, private_names
from chunkgraph.megatron.features.experts.dropless_experts import experts_on_device
from chunkgraph.megatron.features.experts.dropless_rows import DeviceSplits
from chunkgraph.megatron.rules.experts import uses_dropless
from chunkgraph.memory.stash import RowsInUse

PADDING = -1.0
"""The probability that marks a row as padding."""

ExpertScope = Callable[[RowsInUse, Collection[torch.Tensor], str], AbstractContextManager[None]]
"""Context around experts, from the rows in use, their parameters and a name."""

_EXPERTS = "megatron.core.transformer.moe.experts"


def moe_layers_of(modules: Sequence[Any]) -> list[Any]:
    """Return the expert layers among ``modules``, each once, in order."""
    (layer,) = private_names("megatron.core.transformer.moe.moe_layer", "MoELayer")
    return list(dict.fromkeys(m for m in modules if isinstance(m, layer)))


def watch_expert_rows(
    layers: Sequence[Any], is_on: Callable[[], bool], scope: ExpertScope
) -> Callable[[], None]:
    """Replace the forwards of the experts of ``layers``; the new ones know the rows in use.

    The routers must mark padding (`TokenDrops.install`), unless experts take all tokens.

    Args:
        layers: Expert layers.
        is_on: Returns whether ``scope`` is currently to be entered.
        scope: See `ExpertScope`.

    Returns:
        The undo function.
    """
    undo = ExitStack()
    for layer in layers:
        watched = _Watched(layer, is_on, scope)
        if uses_dropless(layer.config):
            undo.callback(patch_attributes(layer.experts, {"forward": watched.dropless}))
            continue
        undo.callback(patch_attributes(layer.experts, {"forward": watched.with_capacity}))
        for index, expert in enumerate(watched.one_by_one):
            forward = watched.one_expert(index, expert)
            undo.callback(patch_attributes(expert, {"forward": forward}))
    return undo.close


class _Watched:
    """The experts of one layer on this rank, which run at once or one by one."""

    def __init__(self, layer: Any, is_on: Callable[[], bool], scope: ExpertScope) -> None:
        (sequential,) = private_names(_EXPERTS, "SequentialMLP")
        self._experts = layer.experts
        runs_one_by_one = isinstance(layer.experts, sequential)
        self.one_by_one = tuple(layer.experts.local_experts) if runs_one_by_one else ()
        self._parameters = tuple(layer.experts.parameters())
        self._name = f"layer {layer.layer_number} experts"
        self._is_on = is_on
        self._scope = scope
        self._rows: RowsInUse | None = None

    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._experts).forward(self._experts, *args, **kwargs)  # a capture may patch it

    def with_capacity(
        self, hidden: torch.Tensor, tokens_per_expert: Any, probs: torch.Tensor, **kwargs: Any
    ) -> Any:
        rows: RowsInUse | None = None
        scope: AbstractContextManager[None] = nullcontext()
        if self._is_on() and torch.is_grad_enabled():
            rows = RowsInUse.of((probs.detach() >= 0).reshape(-1))
            if not self.one_by_one:
                scope = self._scope(rows, self._parameters, self._name)
        self._rows = rows
        try:
            with scope:
                return self._eager(hidden, tokens_per_expert, probs.clamp(min=0), **kwargs)
        finally:
            self._rows = None

    def one_expert(self, index: int, expert: Any) -> Callable[..., Any]:
        eager, parameters = type(expert).forward, tuple(expert.parameters())

        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._rows is None:
                return eager(expert, hidden, *args, **kwargs)
            rows = self._rows.part(index * hidden.shape[0], hidden.shape[0])
            with self._scope(rows, parameters, self._name):
                return eager(expert, hidden, *args, **kwargs)

        return forward

    def dropless(
        self, hidden: torch.Tensor, tokens_per_expert: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with ExitStack() as stack:
            if self._is_on() and torch.is_grad_enabled():
                if not isinstance(tokens_per_expert, DeviceSplits):
                    # Measure the tensors that graphs save, which belong to all experts together.
                    ends = tokens_per_expert.to(hidden.device).cumsum(0).int()
                    tokens_per_expert = DeviceSplits(ends)
                    stack.enter_context(experts_on_device())
                rows = RowsInUse.first(tokens_per_expert.sum().reshape(1), hidden.shape[0])
                stack.enter_context(self._scope(rows, self._parameters, self._name))
            return self._eager(hidden, tokens_per_expert, *args, **kwargs)
