"""Find the operators of a backward that serve weight gradients alone.

An eager backward is watched operator by operator, below autograd. Operators from which an input's
gradient is computed belong to the input half. Operators from which only gradients of parameters are
computed can wait for the weight half. So every operator runs once, in one of the halves, with the
arguments and in the order of the whole backward: the bits are the same for all modules.

Some operators are never deferred:

* operators with an effect besides their results (random numbers, collectives, writes to memory that
  the backward did not allocate), and recomputation;
* operators that read memory that every forward or backward writes: it may change in between;
* operators that compute the incoming gradient of an autograd function outside of torch. The kernels
  of such a function are not seen, so everything that they read must exist.

An operator that returns views is deferred if the tensor that it views is deferred.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from chunkgraph.engine.split.deferral import DeferredTensor, TracedOperator
from chunkgraph.graphs.operators import (
    OperatorMode,
    computes_nothing,
    is_collective,
    run_to_its_end,
    storages_written,
    tensors_in,
)
from chunkgraph.graphs.random_state import draws

_WATCHED = "chunkgraph.engine.split"  # a key in the metadata of autograd's nodes

_Maker = Literal["outside", "forward", "backward"]


@dataclass
class _Memory:
    """A storage, with the operators of the backward that have read and written it so far.

    Attributes:
        alive: Weak reference to the storage.
        maker: What made it; ``outside`` is neither the forward nor the backward.
        writers: The operators that have written it.
        readers: The operators that have read it.
    """

    alive: StorageWeakRef
    maker: _Maker
    writers: set[int] = field(default_factory=set)
    readers: set[int] = field(default_factory=set)


class ForwardWatch(OperatorMode):
    """Watch a forward to find the memory that belongs to one microbatch.

    Memory that existed before may be shared: the forward of another microbatch, which may run
    between two halves, writes it too. Writes by kernels that torch does not know are not seen.

    Attributes:
        written: Tensors that existed before and that the forward writes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: list[torch.Tensor] = []
        self._memory: dict[int, _Memory] = {}

    def memory_of(self, tensor: torch.Tensor) -> _Memory:
        """Return the record of a tensor's memory."""
        memory = self._memory.get(_address(tensor))
        if memory is None or memory.alive.expired():
            return self.made(tensor, "outside")
        return memory

    def made(self, tensor: torch.Tensor, maker: _Maker) -> _Memory:
        """Record what made a tensor's memory."""
        memory = _Memory(StorageWeakRef(tensor.untyped_storage()), maker)
        self._memory[_address(tensor)] = memory
        return memory

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        for tensor in filter(_is_strided, storages_written(func, args, kwargs)):
            if self.memory_of(tensor).maker == "outside":
                self.written.append(tensor)
        inputs = tensors_in(*args, *kwargs.values())
        addresses = {_address(t) for t in filter(_is_strided, inputs)}
        out = func(*args, **kwargs)
        for tensor in filter(_is_strided, tensors_in(out)):
            if _address(tensor) not in addresses:
                self.made(tensor, "forward")
        return out


class BackwardTracer(OperatorMode):
    """Watch a backward.

    Args:
        forward: The watch of the forward, which has run.
        unstable: Further tensors that may change between the two halves.
    """

    def __init__(self, forward: ForwardWatch, unstable: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._forward, self._known = forward, forward.memory_of
        self._unstable = {_address(t) for t in (*forward.written, *unstable)}
        self._operators: list[TracedOperator] = []
        self._weights: set[int] = set()
        self._read_unseen: set[int] = set()
        self._mark = object()

    def take(self, _index: int, gradient: torch.Tensor) -> None:
        """Record the gradient of a parameter, which has just arrived."""
        self._weights |= self._known(gradient).writers

    def trace(self, input_grads: Iterable[torch.Tensor]) -> Sequence[TracedOperator]:
        """Return the operators in order, once the backward has run.

        Args:
            input_grads: The gradients that the input half must compute.
        """
        for_weights = set(self._weights)
        self._add_sources(for_weights)
        # Operators that serve no weight gradient run in the input half too: an unseen kernel may
        # read their results.
        needed = {
            i
            for i, o in enumerate(self._operators)
            if o.must_run or not (o.is_view or i in for_weights)
        } | self._read_unseen
        for gradient in input_grads:
            needed |= self._known(gradient).writers
        while True:
            self._add_sources(needed)
            late = {r for i in needed for r in self._operators[i].overwritten} - needed
            if not late:
                break
            needed |= late
        for i, operator in enumerate(self._operators):
            operator.is_deferred = i not in needed
        return self._operators

    def _add_sources(self, operators: set[int]) -> None:
        """Add all operators that these depend on."""
        stack = list(operators)
        while stack:
            new = self._operators[stack.pop()].sources - operators
            operators |= new
            stack.extend(new)

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        inputs = tensors_in(*args, *kwargs.values())
        written = storages_written(func, args, kwargs)
        node = torch._C._current_autograd_node()
        if node is not None:
            self._watch(node)
        has_effect = _has_effect(func, inputs) or torch.is_grad_enabled()
        out = run_to_its_end(func, args, kwargs)
        self._note(func, inputs, written, tensors_in(out), has_effect=has_effect)
        return out

    def _watch(self, node: Node) -> None:
        """Record what will arrive at functions outside of torch that follow ``node``.

        If a backward recomputes, the first operator leads to the rest of the graph that it makes.
        """
        stack = [node]
        while stack:
            new = stack.pop()
            # Nodes are not kept: tensors that they hold would live longer than in other passes.
            metadata: dict[Any, Any] = new.metadata  # type: ignore[assignment]  # not a method
            if metadata.get(_WATCHED) is not self._mark:
                metadata[_WATCHED] = self._mark
                if _is_outside_of_torch(new):
                    new.register_prehook(self._arrived)
                stack.extend(after for after, _ in new.next_functions if after is not None)

    def _arrived(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for gradient in gradients:
            if gradient is not None:
                self._read_unseen |= self._known(gradient).writers

    def _note(
        self,
        func: OpOverload,
        inputs: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        *,
        has_effect: bool,
    ) -> None:
        index = len(self._operators)
        read = [self._known(t) for t in inputs]
        changed = [self._known(t) for t in written]
        addresses = {_address(t) for t in inputs}
        fresh = [t for t in results if _address(t) not in addresses]
        is_view = bool(results) and not fresh and not written
        self._operators.append(
            TracedOperator(
                name=func.name(),
                is_view=is_view,
                results=tuple(_result(t, inputs) for t in results),
                must_run=has_effect
                or not results
                or any(memory.maker != "backward" for memory in changed)
                or any(memory.maker == "outside" and memory.writers for memory in read)
                or not addresses.isdisjoint(self._unstable),
                sources=frozenset().union(*[memory.writers for memory in read]),
                overwritten=frozenset().union(*[memory.readers for memory in changed]),
            )
        )
        if is_view:
            return
        for memory in read:
            memory.readers.add(index)
        for memory in changed:
            memory.writers.add(index)
        for tensor in fresh:
            self._forward.made(tensor, "backward").writers.add(index)


def _is_outside_of_torch(node: Node) -> bool:
    """Return whether a custom autograd function made the node, in Python or in C++."""
    return isinstance(node, BackwardCFunction) or "CppNode" in node.name()


def _has_effect(func: OpOverload, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether an operator does more than compute its results from its arguments."""
    return (
        is_collective(func)
        or draws(func)
        or computes_nothing(func)  # kernels that torch does not know may fill its results
        or func is torch.ops.aten.lift_fresh.default
        or any(t.layout is not torch.strided for t in inputs)
    )


def _result(tensor: torch.Tensor, inputs: Sequence[torch.Tensor]) -> DeferredTensor | int:
    for number, argument in enumerate(inputs):
        if argument is tensor:
            return number
    return DeferredTensor(tensor)


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
