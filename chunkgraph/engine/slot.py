"""One slot: static memory of one chunk, and the graphs that read and write it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from chunkgraph.engine.autocast import Autocast
from chunkgraph.engine.capture.static_inputs import LoadedSource, SlotStatics
from chunkgraph.engine.chunk import ReplayAction
from chunkgraph.engine.layout import copy_into, duplicate, same_layout
from chunkgraph.engine.tree import distinct_tensors, unflatten
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import AddressRanges, CopyNode, Graph, Pool


@dataclass
class SlotMemory:
    """The memory of one slot, and what one bank keeps in it.

    Attributes:
        slot_id: identifies the slot on its rank; the same in all variants.
        pool: the graphs' own memory, which all variants share.
        statics: memory outside of pools that the graphs read, which all variants share.
        live: the memory of ``pool`` that must survive from a forward to its last action.
        kept: the part of it that the forward wrote, for the next action.
    """

    slot_id: Hashable
    pool: Pool
    statics: SlotStatics
    live: AddressRanges = field(default_factory=AddressRanges)
    kept: AddressRanges = field(default_factory=AddressRanges)


@dataclass(eq=False)
class Slot:
    """A captured slot. All tensors are fixed in memory until the slot is released.

    A capture creates it from the first five attributes, and sets the others.

    Attributes:
        chunk: index of the chunk on its rank.
        index: number of the slot in its chunk.
        label: name of the slot in errors.
        bank: key of the bank that this variant of the slot belongs to.
        memory: where its tensors lie.
        inputs: the tensors that a forward reads.
        outputs: the results of a forward, valid from its replay to this slot's next one.
        output_grads: the gradients that a backward reads; None without a backward.
        input_grads: gradients of ``inputs`` (None where there is none), valid until the next replay
            of any backward.
        graphs: the graph of each action, in the order of their replays. An action without work has
            none.
        trained: indices of the chunk's parameters that get a gradient in the backward.
        turn: number that identifies the microbatch that took the slot last.
    """

    chunk: int
    index: int
    label: str
    bank: Hashable
    memory: SlotMemory
    inputs: StaticInputs = field(init=False)
    outputs: Outputs = field(init=False)
    output_grads: StaticOutputGrads | None = None
    input_grads: InputGrads = field(init=False)
    graphs: dict[ReplayAction, Graph] = field(default_factory=dict)
    trained: tuple[int, ...] = ()
    turn: int = 0

    @property
    def loaded(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that are loaded before replays; they lie outside of pools."""
        grads = self.output_grads.tensors if self.output_grads is not None else ()
        return *self.inputs.tensors, *grads

    def release(self) -> None:
        """Release the graphs; the buffers go with the slot."""
        for graph in self.graphs.values():
            graph.release()


class StaticInputs:
    """The tensors that a captured forward reads.

    Args:
        tensors: the tensors, one for each tensor argument.
        nodes: the graph's copies to them; empty if it makes none.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], nodes: Sequence[CopyNode | None] = ()
    ) -> None:
        self.tensors = tuple(tensors)
        self._places = [
            (i, t.data_ptr(), t.stride(), t, node)
            for i, (t, node) in enumerate(
                zip(self.tensors, nodes or [None] * len(tensors), strict=True)
            )
        ]
        self._addresses = {t.data_ptr() for t in tensors}
        self._sources: list[LoadedSource | None] = [None] * len(tensors)

    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Load a call's tensors, except those that are already there.

        The graph copies them if it can, else the host starts a copy.

        A tensor is already there if it was received into the static input itself, or if it is the
        constant tensor from which the input was last loaded. Skipping the latter is safe: it is the
        same object (the reference keeps its id and its address from being reused), it was not
        written since (its owner promised that torch counts every write), and only this method
        writes static inputs. They lie outside all pools, so neither replays nor poison reach them;
        a tensor received into one is passed here, which forgets the source.
        """
        sources = self._sources
        statics: list[torch.Tensor] = []
        copied: list[torch.Tensor] = []
        for i, address, stride, static, node in self._places:
            tensor = tensors[i]
            source = sources[i]
            if source is not None:
                if source.is_still(tensor):
                    continue
                sources[i] = None
            pointer = tensor.data_ptr()
            has_stride = tensor.stride() == stride
            if pointer == address:
                if not has_stride:  # a view of what was received
                    copied.append(tensor.clone())
                    statics.append(static)
            else:
                if tensor.__dict__:
                    sources[i] = LoadedSource.of(tensor)
                is_static = pointer in self._addresses
                is_constant = sources[i] is not None  # and need not be copied by each replay
                if (
                    not (is_static or is_constant)
                    and has_stride
                    and _is_read(node, tensor, pointer)
                ):
                    continue
                # Read a tensor in another static input before that input is written.
                copied.append(tensor.clone() if is_static else tensor)
                statics.append(static)
            if node is not None:
                node.read(address)
        if len(copied) == 1:
            statics[0].copy_(copied[0])
        elif copied:  # one launch for all that have one dtype
            torch._foreach_copy_(statics, copied)

    def forget_sources(self) -> None:
        """Load every tensor again next time: after a receive without its forward, or a sleep."""
        self._sources = [None] * len(self.tensors)


class Outputs:
    """The results of a captured forward, and what its caller gets of them.

    Args:
        leaves: leaves of the result.
        spec: structure of the result.
        differentiable: positions of the outputs that require grad, among the distinct tensors of
            ``leaves``.
        lent: positions of outputs that are parameters or buffers: the caller gets their memory, and
            so sees updates of them as in eager training.
        are_copied: whether the caller gets copies of the others, or aliases.

    Attributes:
        tensors: the distinct tensors among the leaves.
        is_single: whether the result is one tensor.
        plain: what hands out the only output, and the output, if it requires grad; else None.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        spec: TreeSpec,
        differentiable: tuple[int, ...],
        lent: tuple[int, ...],
        *,
        are_copied: bool,
    ) -> None:
        self.leaves = tuple(leaves)
        self.tensors = tuple(distinct_tensors(self.leaves))
        self.differentiable = differentiable
        self._spec = spec
        positions = {id(tensor): i for i, tensor in enumerate(self.tensors)}
        self._positions = [positions.get(id(leaf), -1) for leaf in self.leaves]
        self._hand_out = tuple(
            (_hand_over(t, is_copied=are_copied and i not in lent), t)
            for i, t in enumerate(self.tensors)
        )
        self.is_single = spec.is_leaf() and isinstance(self.leaves[0], torch.Tensor)
        self.plain = self._hand_out[0] if self.is_single and differentiable else None

    def hand_out(self) -> list[torch.Tensor]:
        """Return the output tensors for the caller: copies, or aliases."""
        return [give(tensor) for give, tensor in self._hand_out]

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the chunk's result with ``tensors`` instead of its tensors."""
        leaves = [
            plain if position < 0 else tensors[position]
            for position, plain in zip(self._positions, self.leaves, strict=True)
        ]
        return unflatten(leaves, self._spec)


class StaticOutputGrads:
    """The gradients of the outputs that a captured backward reads.

    Args:
        label: name of the slot in errors.
        receiving: positions of the outputs that get a gradient, among the tensors of the result.
        tensors: the static gradient of each.
        nodes: the graph's copies to them; empty if it makes none.
        has_layouts: whether ``tensors`` have the strides observed in a warmup step. If so, a
            gradient with other strides is refused, otherwise copied.
        lent: see `Outputs`.
        autocast: autocast setting of the backward; None: any.
    """

    def __init__(
        self,
        label: str,
        receiving: tuple[int, ...],
        tensors: Sequence[torch.Tensor],
        nodes: Sequence[CopyNode | None],
        *,
        has_layouts: bool,
        lent: tuple[int, ...],
        autocast: Autocast | None,
    ) -> None:
        self.receiving, self.tensors = receiving, tuple(tensors)
        self._label, self._has_layouts = label, has_layouts
        self._lent, self._autocast = lent, autocast
        self._places = [
            (i, t.data_ptr(), t.stride(), copy_into(t), node)
            for i, t, node in zip(
                receiving, self.tensors, nodes or [None] * len(receiving), strict=True
            )
        ]

    def load(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Copy the gradients of the outputs.

        Raises:
            ReplayMismatchError: other outputs than in the captured backward got a gradient, or a
                gradient has another layout.
        """
        if len(grads) > 1:
            num_gradients = sum(grad is not None for grad in grads)
            if num_gradients != len(self.receiving):
                raise self._other_gradients(grads)
        for position, address, strides, copy, node in self._places:
            grad = grads[position]
            if grad is None:
                raise self._other_gradients(grads)
            pointer = grad.data_ptr()
            if grad.stride() == strides:
                if _is_read(node, grad, pointer):
                    continue
                if pointer != address:
                    copy(grad)
            elif (
                not self._has_layouts
                or position in self._lent  # only added to the parameter's other gradients
                or same_layout(grad.shape, grad.stride(), strides)
            ):
                copy(grad.clone() if pointer == address else grad)
            else:
                raise self._other_layout(position, grad.stride(), strides)
            if node is not None:
                node.read(address)

    def check_autocast(self) -> None:
        """Check that the backward runs under the captured autocast setting.

        Raises:
            ReplayMismatchError: it runs under another one.
        """
        captured = self._autocast
        if captured is not None and not captured.is_now():
            raise ReplayMismatchError(
                f"{self._label}: its backward was captured with autocast {captured}, and runs with "
                f"{captured.now(captured.device_type)}. Call backward() under the same autocast in "
                "warmup steps and in every later step (torch recommends outside of autocast), or "
                "release the graphs and capture again."
            )

    def _other_gradients(self, grads: Sequence[torch.Tensor | None]) -> ReplayMismatchError:
        now = [i for i, grad in enumerate(grads) if grad is not None]
        return ReplayMismatchError(
            f"{self._label}: the backward has gradients of the output tensors {now}, but it was "
            f"captured with gradients of {list(self.receiving)}. Parameters below an output "
            "without a gradient get none in eager training, which this graph cannot reproduce.\n"
            "  To do: let every microbatch's loss use the same outputs as the warmup steps, detach "
            "in the chunk what is only logged, or ask for an eager step (`step(eager=True)`)."
        )

    def _other_layout(
        self, position: int, now: tuple[int, ...], captured: tuple[int, ...]
    ) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"{self._label}: the gradient of output tensor {position} has strides {now}, but the "
            f"backward was captured with {captured}; kernels may give other bits. Let the same "
            "operators follow the chunk in every microbatch as in the warmup steps, or release "
            "the graphs and capture again."
        )


class InputGrads:
    """The gradients of a slot's inputs, and what autograd gets of them.

    Args:
        tensors: the gradient of each input; None where there is none.
        are_copied: whether autograd gets copies, or aliases.

    Attributes:
        positions: the inputs that have a gradient.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor | None] = (), *, are_copied: bool = True
    ) -> None:
        self.tensors = tuple(tensors)
        self.positions = tuple(i for i, grad in enumerate(tensors) if grad is not None)
        self._hand_out = tuple(
            (duplicate(grad) if are_copied else torch.detach, grad)
            for grad in tensors
            if grad is not None
        )

    def hand_out(self) -> list[torch.Tensor]:
        """Return the gradients for autograd: copies, or aliases."""
        return [give(grad) for give, grad in self._hand_out]


def _hand_over(tensor: torch.Tensor, *, is_copied: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that returns an output tensor for the caller."""
    if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad:
        return lambda parameter: parameter  # can be thawed
    return duplicate(tensor) if is_copied else torch.detach


def _is_read(node: CopyNode | None, tensor: torch.Tensor, pointer: int) -> bool:
    """Return whether a graph copies ``tensor``, which has the layout of the node's target.

    The memory of a lazy negation or conjugation holds other values; zeros may have none.
    """
    if node is None or not pointer or tensor.is_neg() or tensor.is_conj():
        return False
    return node.read(pointer)
