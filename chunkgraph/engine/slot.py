"""One slot: a chunk's static buffers and the forward and backward graph on them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from chunkgraph.engine.autocast import Autocast
from chunkgraph.engine.chunk import GradientMarker
from chunkgraph.engine.constant_inputs import LoadedSource
from chunkgraph.engine.layout import copy_into, duplicate, same_layout
from chunkgraph.engine.tree import distinct_tensors, unflatten
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import CopyNode, Graph, Pool

__all__ = ["Slot"]


@dataclass(eq=False)
class Slot:
    """A captured slot. All tensors are fixed in memory until the slot is released.

    Attributes:
        chunk: index of the chunk on its rank.
        index: number of the slot in its chunk.
        bank: key of the bank that this variant of the slot belongs to.
        inputs: static inputs, one for each tensor argument; a replay reads them.
        outputs: leaves of the result. Tensors are valid from this slot's forward replay to its
            next one.
        output_spec: structure of the result.
        differentiable: positions of the outputs that require grad, among the distinct tensors of
            ``outputs``.
        receiving: those of them that get a gradient in the captured backward.
        output_grads: static gradients of ``receiving``; the backward replay reads them.
        has_grad_layouts: whether ``output_grads`` have the strides observed in a warmup step. If
            so, a gradient with other strides is refused, otherwise copied.
        input_grads: gradients of ``inputs`` (None where there is none); valid until the next
            replay of any backward.
        backward_graph: graph of the whole backward, or of the input half of a split one; None for
            a split one if no input takes a gradient.
        weight_graph: graph of the weight half of a split backward; None for a whole one.
        pool: pool that holds the forward's memory.
        trained: indices of the chunk's parameters that get a gradient in the backward.
        lent: outputs that are parameters or buffers, by position: the caller gets their memory, and
            so sees updates of them as in eager training.
        backward_autocast: autocast setting of the captured backward.
        grads_lie_in_pool: whether an input gradient lies in ``pool`` (a compiled backward may write
            it over a saved tensor).
        marker: watches the gradients of the backward, or None.
        keeps_input_grads: see `Chunk`.
        copies_outputs: whether the caller gets copies of the outputs.
        turn: number that identifies the microbatch that took the slot last.
    """

    chunk: int
    index: int
    label: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[Any, ...]
    output_spec: TreeSpec
    differentiable: tuple[int, ...]
    receiving: tuple[int, ...]
    output_grads: tuple[torch.Tensor, ...]
    input_grads: tuple[torch.Tensor | None, ...]
    forward_graph: Graph
    backward_graph: Graph | None
    weight_graph: Graph | None
    pool: Pool
    has_grad_layouts: bool = False
    trained: tuple[int, ...] = ()
    lent: tuple[int, ...] = ()
    backward_autocast: Autocast | None = None
    grads_lie_in_pool: bool = False
    marker: GradientMarker | None = None
    keeps_input_grads: bool = True
    copies_outputs: bool = True
    bank: Hashable = None
    turn: int = 0

    def __post_init__(self) -> None:
        self.is_single = self.output_spec.is_leaf() and isinstance(self.outputs[0], torch.Tensor)
        self.output_tensors = tuple(distinct_tensors(self.outputs))
        positions = {id(tensor): i for i, tensor in enumerate(self.output_tensors)}
        self._positions = [positions.get(id(leaf), -1) for leaf in self.outputs]
        self.differentiable_inputs = tuple(
            i for i, grad in enumerate(self.input_grads) if grad is not None
        )
        nodes = self.forward_graph.copy_nodes or [None] * len(self.inputs)
        self._places = [
            (i, t.data_ptr(), t.stride(), t, node)
            for i, (t, node) in enumerate(zip(self.inputs, nodes, strict=True))
        ]
        self._addresses = {t.data_ptr() for t in self.inputs}
        self._sources: list[LoadedSource | None] = [None] * len(self.inputs)
        self.has_frozen_outputs = len(self.differentiable) < len(self.output_tensors)
        self._hand_out = tuple(
            (self._hand_over(i, t), t) for i, t in enumerate(self.output_tensors)
        )
        is_plain = self.is_single and not self.has_frozen_outputs
        self.plain_output = self._hand_out[0] if is_plain else None
        self._hand_out_grads = tuple(
            (duplicate(g) if self.keeps_input_grads else torch.detach, g)
            for g in self.input_grads
            if g is not None
        )
        # Of a split backward without an input half, whose graph begins with no copies, None.
        copies = self.backward_graph.copy_nodes if self.backward_graph is not None else ()
        grads = zip(
            self.receiving, self.output_grads, copies or [None] * len(self.receiving), strict=True
        )
        self._grad_places = [
            (i, t.data_ptr(), t.stride(), copy_into(t), node) for i, t, node in grads
        ]

    def _hand_over(
        self, position: int, tensor: torch.Tensor
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that returns an output tensor for the caller."""
        if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad:
            return _itself  # can be thawed
        if self.copies_outputs and position not in self.lent:
            return duplicate(tensor)
        return torch.detach

    @property
    def graphs(self) -> list[Graph]:
        """Return the graphs, in the order of their replays."""
        graphs = (self.forward_graph, self.backward_graph, self.weight_graph)
        return [graph for graph in graphs if graph is not None]

    def load_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Load a call's tensors into the static inputs, except those that are already there.

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
        """Load every input again next time: a step ended between a receive and its forward."""
        self._sources = [None] * len(self.inputs)

    def load_output_grads(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Copy the gradients of the outputs.

        Raises:
            ReplayMismatchError: other outputs than in the captured backward got a gradient, or a
                gradient has another layout.
        """
        if len(grads) > 1:
            num_gradients = sum(grad is not None for grad in grads)
            if num_gradients != len(self.receiving):
                raise self._other_gradients(grads)
        for position, address, strides, copy, node in self._grad_places:
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
                not self.has_grad_layouts
                or position in self.lent  # only added to the parameter's other gradients
                or same_layout(grad.shape, grad.stride(), strides)
            ):
                copy(grad.clone() if pointer == address else grad)
            else:
                raise self._other_layout(position, grad.stride(), strides)
            if node is not None:
                node.read(address)

    def _other_gradients(self, grads: Sequence[torch.Tensor | None]) -> ReplayMismatchError:
        now = [i for i, grad in enumerate(grads) if grad is not None]
        return ReplayMismatchError(
            f"{self.label}: the backward has gradients of the output tensors {now}, but it was "
            f"captured with gradients of {list(self.receiving)}. Parameters below an output "
            "without a gradient get none in eager training, which this graph cannot reproduce.\n"
            "  To do: let every microbatch's loss use the same outputs as the warmup steps, detach "
            "in the chunk what is only logged, or ask for an eager step (`step(eager=True)`)."
        )

    def _other_layout(
        self, position: int, now: tuple[int, ...], captured: tuple[int, ...]
    ) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"{self.label}: the gradient of output tensor {position} has strides {now}, but the "
            f"backward was captured with {captured}; kernels may give other bits. Let the same "
            "operators follow the chunk in every microbatch as in the warmup steps, or release "
            "the graphs and capture again."
        )

    def hand_out(self) -> list[torch.Tensor]:
        """Return the output tensors for the caller: copies, or aliases where they are lent."""
        return [give(tensor) for give, tensor in self._hand_out]

    def hand_out_input_grads(self) -> list[torch.Tensor]:
        """Return the input gradients for autograd: copies, or aliases where they are lent."""
        return [give(grad) for give, grad in self._hand_out_grads]

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the chunk's result with ``tensors`` instead of its tensors."""
        leaves = [
            plain if position < 0 else tensors[position]
            for position, plain in zip(self._positions, self.outputs, strict=True)
        ]
        return unflatten(leaves, self.output_spec)

    def release(self) -> None:
        """Drop the graphs; the buffers go with the slot."""
        for graph in self.graphs:
            graph.release()


def _is_read(node: CopyNode | None, tensor: torch.Tensor, pointer: int) -> bool:
    """Return whether a graph copies ``tensor``, which has the layout of the node's target.

    The memory of a lazy negation or conjugation holds other values; zeros may have none.
    """
    if node is None or not pointer or tensor.is_neg() or tensor.is_conj():
        return False
    return node.read(pointer)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
