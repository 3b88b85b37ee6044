"""A replayed microbatch as one node of autograd.

Parameters do not pass through the node: their gradients are accumulated inside the backward
graph, so that the host cost does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from chunkgraph.engine.slot import Slot

__all__ = ["SlotReplay", "SlotRunner"]


class SlotRunner(Protocol):
    """What the node needs of the engine."""

    def replay_forward(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> None:
        """Load inputs and replay the forward."""

    def replay_backward(
        self, slot: Slot, turn: int, grads: tuple[torch.Tensor | None, ...]
    ) -> None:
        """Load output gradients, replay the backward and free the slot.

        Args:
            slot: whose.
            turn: the slot's at the forward that this is the backward of.
            grads: of the outputs.
        """


class SlotReplay(torch.autograd.Function):
    """Forward and backward of one microbatch in one slot."""

    @staticmethod
    def forward(
        ctx: Any,
        runner: SlotRunner,
        slot: Slot,
        tensors: Sequence[torch.Tensor],
        _anchor: torch.Tensor,
        *_differentiable: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Replay the forward.

        Args:
            ctx: carries runner and slot to the backward.
            runner: the engine.
            slot: an acquired slot.
            tensors: the call's tensor arguments.
            _anchor: requires grad, so that the backward runs even when no input does.
            *_differentiable: those of ``slot.differentiable_inputs``, for autograd alone.

        Returns:
            Fresh aliases of the slot's static outputs. A caller may rebind their ``.data``
            (Megatron frees sent outputs so) without touching the static memory.
        """
        runner.replay_forward(slot, tensors)
        ctx.runner, ctx.slot, ctx.turn = runner, slot, slot.turn
        ctx.set_materialize_grads(False)
        outputs = tuple([tensor.detach() for tensor in slot.output_tensors])
        if slot.has_frozen_outputs:
            frozen = [out for i, out in enumerate(outputs) if i not in slot.differentiable]
            ctx.mark_non_differentiable(*frozen)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Replay the backward.

        Input gradients lie where the next backward writes its own. Autograd holds them beyond that
        where several nodes read one tensor (it adds up what all of them return) and where a leaf
        keeps them. So they are copied, unless the caller is known to be done with them by then.
        """
        slot = ctx.slot
        ctx.runner.replay_backward(slot, ctx.turn, grads)
        hand_out = torch.clone if slot.keeps_input_grads else torch.detach
        grads_of_inputs = [hand_out(g) for g in slot.input_grads if g is not None]
        return (None, None, None, None, *grads_of_inputs)
