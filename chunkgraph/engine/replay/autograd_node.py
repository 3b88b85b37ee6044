"""A replayed microbatch as one node of autograd.

Parameters do not pass through the node. The backward graph accumulates their gradients, so the host
cost does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from chunkgraph.engine.slot import Slot
from chunkgraph.errors import ReplayMismatchError

__all__ = ["SlotReplay", "SlotRunner", "replay_node"]


class SlotRunner(Protocol):
    """The part of the engine that the node uses."""

    def replay_forward(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> None:
        """Load inputs and replay the forward."""

    def replay_backward(
        self, slot: Slot, turn: int, grads: tuple[torch.Tensor | None, ...]
    ) -> None:
        """Load output gradients, replay the backward and free the slot.

        If the backward is split, replay only its input half; the slot stays in use.

        Args:
            slot: The slot of the microbatch.
            turn: The slot's turn at the forward of this backward.
            grads: Gradients of the outputs.
        """


class SlotReplay(torch.autograd.Function):
    """The forward and backward of one microbatch in one slot."""

    @staticmethod
    def forward(
        ctx: Any,
        runner: SlotRunner,
        slot: Slot,
        tensors: Sequence[torch.Tensor],
        *_differentiable: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Replay the forward.

        Args:
            ctx: The context that carries runner and slot to the backward.
            runner: The engine.
            slot: An acquired slot.
            tensors: The call's tensor arguments.
            *_differentiable: The tensors of ``slot.differentiable_inputs``, for autograd alone, and
                one more that requires grad, so that the backward runs.

        Returns:
            The output tensors, or a single one if it is the whole result. They are copies, or fresh
            aliases of the static outputs if the caller is known to be done with them in time. A
            caller may rebind their ``.data`` (Megatron frees sent outputs this way) without
            touching the static memory.
        """
        runner.replay_forward(slot, tensors)
        ctx.replayed = runner, slot, slot.turn
        ctx.set_materialize_grads(False)
        if slot.plain_output is not None:
            hand_out, output = slot.plain_output
            return hand_out(output)
        outputs = tuple(slot.hand_out())
        frozen = [out for i, out in enumerate(outputs) if i not in slot.differentiable]
        ctx.mark_non_differentiable(*frozen)
        return outputs[0] if slot.is_single else outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Replay the backward.

        The next backward overwrites the memory of the input gradients. Autograd may hold them
        longer: if several nodes read one tensor (it sums what all of them return), or if a leaf
        keeps them. So they are copied, unless the caller is known to be done with them by then.
        """
        runner, slot, turn = ctx.replayed
        if torch.is_grad_enabled():
            raise ReplayMismatchError(
                f"{slot.label}: backward(create_graph=True) asks for gradients that can be "
                "differentiated again, which a replay does not compute.\n  To do: leave "
                "create_graph out, or ask for an eager step (`step(eager=True)`)."
            )
        runner.replay_backward(slot, turn, grads)
        return (None, None, None, *slot.hand_out_input_grads(), None)


replay_node: Callable[..., Any] = super(torch.autograd.Function, SlotReplay).apply
"""`SlotReplay.apply` without support for ``torch.func``, under which no chunk can be called."""
