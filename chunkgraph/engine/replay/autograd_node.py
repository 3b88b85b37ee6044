"""A replayed microbatch as one node of autograd.

Parameters do not pass through the node: their gradients are accumulated inside the backward
graph, so that the host cost does not grow with their number.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from chunkgraph.engine.autograd_graph import refuse_hooks_on_nested
from chunkgraph.engine.slot import Slot
from chunkgraph.errors import ReplayMismatchError

__all__ = ["SlotReplay", "SlotRunner", "replay_node"]


class SlotRunner(Protocol):
    """What the node needs of the engine."""

    def replay_forward(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> None:
        """Load inputs and replay the forward."""

    def replay_backward(
        self, slot: Slot, turn: int, grads: tuple[torch.Tensor | None, ...]
    ) -> None:
        """Load output gradients, replay the backward and free the slot.

        Where the backward is split, its input half is replayed, and the slot stays in use.

        Args:
            slot: whose.
            turn: the slot's at the forward that this is the backward of.
            grads: of the outputs.
        """

    def replay_weight(self, slot: Slot) -> None:
        """Replay the weight half of a split backward and free the slot."""


class SlotReplay(torch.autograd.Function):
    """Forward and backward of one microbatch in one slot."""

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
            ctx: carries runner and slot to the backward.
            runner: the engine.
            slot: an acquired slot.
            tensors: the call's tensor arguments.
            *_differentiable: those of ``slot.differentiable_inputs``, for autograd alone, and one
                more that requires grad, so that the backward runs.

        Returns:
            The output tensors, one alone if it is the whole result: copies, or fresh aliases of the
            static outputs where the caller is known to be done with them in time. A caller may
            rebind their ``.data`` (Megatron frees sent outputs so) without touching the static
            memory.
        """
        runner.replay_forward(slot, tensors)
        ctx.replayed = runner, slot, slot.turn
        ctx.set_materialize_grads(False)
        if slot.plain_output is not None:
            hand_out, output = slot.plain_output
            return hand_out(output)
        outputs = tuple(slot.hand_out())
        if slot.guarded:
            ctx.save_for_backward(*[outputs[i] for i in slot.guarded])
        if slot.nested:
            ctx.nested = [weakref.ref(outputs[i]) for i in slot.nested]
        if slot.is_single and not slot.has_frozen_outputs:
            return outputs[0]
        frozen = [out for i, out in enumerate(outputs) if i not in slot.differentiable]
        ctx.mark_non_differentiable(*frozen)
        return outputs[0] if slot.is_single else outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Replay the backward.

        Input gradients lie where the next backward writes its own. Autograd holds them beyond that
        where several nodes read one tensor (it adds up what all of them return) and where a leaf
        keeps them. So they are copied, unless the caller is known to be done with them by then.
        """
        runner, slot, turn = ctx.replayed
        if torch.is_grad_enabled():
            raise ReplayMismatchError(
                f"{slot.label}: backward(create_graph=True) asks for gradients that can be "
                "differentiated again, which a replay does not give.\n  To do: leave create_graph "
                "out, or ask for an eager step (`step(eager=True)`)."
            )
        if slot.guarded:
            _refuse_changed_outputs(ctx, slot)
        if slot.nested:
            refuse_hooks_on_nested(slot.label, [reference() for reference in ctx.nested])
        runner.replay_backward(slot, turn, grads)
        return (None, None, None, *slot.hand_out_input_grads(), None)


def _refuse_changed_outputs(ctx: Any, slot: Slot) -> None:
    try:
        _ = ctx.saved_tensors
    except RuntimeError as error:
        if "inplace" not in str(error):  # a second backward: refused by what follows
            return
        raise ReplayMismatchError(
            f"{slot.label}: an output was changed in place. The chunk's backward needs it as it "
            "was, or it shares memory with an argument, a parameter or another output, which a "
            "replay does not change with it.\n  To do: clone it, or use another operator."
        ) from error


replay_node: Callable[..., Any] = super(torch.autograd.Function, SlotReplay).apply
"""`SlotReplay.apply`, without its support of ``torch.func``, which no chunk can be called under."""
