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
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from chunkgraph.errors import CaptureError
from chunkgraph.graphs.operators import (
    OperatorMode,
    run_to_its_end,
    storages_written,
    tensors_in,
)

__all__ = ["BackwardTrace", "BackwardTracer", "ForwardWatch", "Geometry", "TracedOperator"]

_aten = torch.ops.aten
# They compute nothing; kernels that torch does not know may fill their results.
_WITHOUT_CONTENTS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}

_WATCHED = "chunkgraph.engine.split"  # a key in the metadata of autograd's nodes


@dataclass(frozen=True)
class Geometry:
    """Shape, strides, type and device of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Geometry:
        """Return the geometry of ``tensor``."""
        return Geometry(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


@dataclass(frozen=True)
class TracedOperator:
    """One operator of a backward.

    Attributes:
        name: Name of the operator.
        is_deferred: Whether it serves weight gradients alone.
        is_view: Whether its results are views of its arguments.
        results: For each tensor that it returns, the geometry; if the tensor is an argument, the
            argument's number among the tensor arguments.
    """

    name: str
    is_deferred: bool
    is_view: bool
    results: tuple[Geometry | int, ...]


@dataclass(frozen=True)
class BackwardTrace:
    """The operators of a backward, in order."""

    operators: tuple[TracedOperator, ...]


@dataclass
class _Memory:
    """A storage, with the operators that have read and written it so far.

    Attributes:
        alive: Weak reference to the storage.
        is_own: Whether the backward made it.
        is_shared: Whether neither forward nor backward made it.
        is_gradient: Whether a parameter has it as its gradient.
        writers: The operators that have written it.
        readers: The operators that have read it.
    """

    alive: StorageWeakRef
    is_own: bool
    is_shared: bool = False
    is_gradient: bool = False
    writers: set[int] = field(default_factory=set)
    readers: set[int] = field(default_factory=set)


@dataclass
class _Operator:
    """An operator as it was seen.

    Attributes that `TracedOperator` does not have:
        must_run: Whether it must not be deferred.
        sources: The operators that wrote the memory that it reads.
        overwritten: The operators that have read the memory that it writes.
        changes_gradient: Whether it writes to a parameter's gradient that has arrived.
    """

    name: str
    is_view: bool
    results: tuple[Geometry | int, ...]
    must_run: bool
    sources: frozenset[int]
    overwritten: frozenset[int]
    changes_gradient: bool


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
        self._made: dict[int, StorageWeakRef] = {}

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Return whether the forward made the memory of a tensor."""
        made = self._made.get(_address(tensor))
        return made is not None and not made.expired()

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        for tensor in filter(_is_strided, storages_written(func, args, kwargs)):
            if not self.has_made(tensor):
                self.written.append(tensor)
        inputs = tensors_in(*args, *kwargs.values())
        addresses = {_address(t) for t in filter(_is_strided, inputs)}
        out = func(*args, **kwargs)
        for tensor in filter(_is_strided, tensors_in(out)):
            if _address(tensor) not in addresses:
                self._made[_address(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return out


class BackwardTracer(OperatorMode):
    """Watch a backward.

    Args:
        label: Name of the chunk in errors.
        forward: The watch of the forward, which has run.
        unstable: Further tensors that may change between the two halves.
    """

    def __init__(
        self, label: str, forward: ForwardWatch, unstable: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self._label = label
        self._forward = forward
        self._unstable = {_address(t) for t in (*forward.written, *unstable)}
        self._operators: list[_Operator] = []
        self._memory: dict[int, _Memory] = {}
        self._weights: set[int] = set()
        self._read_unseen: set[int] = set()
        self._mark = object()

    def take(self, _index: int, gradient: torch.Tensor) -> None:
        """Record the gradient of a parameter, which has just arrived."""
        memory = self._known(gradient)
        memory.is_gradient = True
        self._weights |= memory.writers

    def trace(self, input_grads: Iterable[torch.Tensor]) -> BackwardTrace:
        """Return the trace, once the backward has run.

        Args:
            input_grads: The gradients that the input half must compute.

        Raises:
            CaptureError: The input half changes a gradient that waits for the weight half.
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
        for i in needed:
            if self._operators[i].changes_gradient:
                raise CaptureError(
                    f"{self._label}: {self._operators[i].name} in its backward changes a "
                    "parameter's gradient in place. Compute a new tensor instead, or capture the "
                    "chunk with a whole backward, or use a schedule that splits no backward."
                )
        return BackwardTrace(
            tuple(
                TracedOperator(o.name, i not in needed, o.is_view, o.results)
                for i, o in enumerate(self._operators)
            )
        )

    def _add_sources(self, operators: set[int]) -> None:
        """Add all operators that these depend on."""
        waiting = list(operators)
        while waiting:
            new = self._operators[waiting.pop()].sources - operators
            operators |= new
            waiting.extend(new)

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
        waiting = [node]
        while waiting:
            new = waiting.pop()
            # Nodes are not kept: tensors that they hold would live longer than in other passes.
            metadata: dict[Any, Any] = new.metadata  # type: ignore[assignment]  # not a method
            if metadata.get(_WATCHED) is not self._mark:
                metadata[_WATCHED] = self._mark
                if _is_outside_of_torch(new):
                    new.register_prehook(self._arrived)
                waiting.extend(after for after, _ in new.next_functions if after is not None)

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
            _Operator(
                name=func.name(),
                is_view=is_view,
                results=tuple(_result(t, inputs) for t in results),
                must_run=has_effect
                or not results
                or not all(memory.is_own for memory in changed)
                or any(memory.is_shared and memory.writers for memory in read)
                or not addresses.isdisjoint(self._unstable),
                sources=frozenset().union(*[memory.writers for memory in read]),
                overwritten=frozenset().union(*[memory.readers for memory in changed]),
                changes_gradient=any(memory.is_gradient for memory in changed),
            )
        )
        if is_view:
            return
        for memory in read:
            memory.readers.add(index)
        for memory in changed:
            memory.writers.add(index)
        for tensor in fresh:
            made = _Memory(StorageWeakRef(tensor.untyped_storage()), is_own=True)
            made.writers.add(index)
            self._memory[_address(tensor)] = made

    def _known(self, tensor: torch.Tensor) -> _Memory:
        """Return the record of a tensor's memory."""
        address = _address(tensor)
        memory = self._memory.get(address)
        if memory is None or memory.alive.expired():
            memory = _Memory(
                StorageWeakRef(tensor.untyped_storage()),
                is_own=False,
                is_shared=not self._forward.has_made(tensor),
            )
            self._memory[address] = memory
        return memory


def _is_outside_of_torch(node: Node) -> bool:
    """Return whether a custom autograd function made the node, in Python or in C++."""
    return isinstance(node, BackwardCFunction) or "CppNode" in node.name()


def _has_effect(func: OpOverload, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether an operator does more than compute its results from its arguments."""
    return (
        func.namespace == "c10d"
        or torch.Tag.nondeterministic_seeded in func.tags
        or func in _WITHOUT_CONTENTS
        or func is _aten.lift_fresh.default
        or any(t.layout is not torch.strided for t in inputs)
    )


def _result(tensor: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Geometry | int:
    for number, argument in enumerate(inputs):
        if argument is tensor:
            return number
    return Geometry.of(tensor)


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
