"""Gradients: accumulated inside the backward graph, each as soon as it is ready.

A parameter's sink is ``param.main_grad`` where its owner (Megatron's DDP) made one, else memory of
the engine that becomes ``param.grad`` (`chunkgraph.engine.capture.grad_memory`). During the capture
of a backward a hook takes every gradient out of ``leaf.grad`` as soon as autograd has put it there,
adds it to the sink and drops it, so that no two weight gradients are alive at once. Activation
recomputation runs backwards inside the backward; their gradients arrive at the same place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, contains

import torch
from torch import nn

from chunkgraph.engine.capture.accumulate import new_accumulate
from chunkgraph.engine.capture.grad_memory import Binding, GradMemory, use_count
from chunkgraph.engine.chunk import GradientMarker
from chunkgraph.engine.watch.eager_gradients import foreign_hooks
from chunkgraph.engine.watch.registered_hooks import have_node_hooks, num_registered_hooks
from chunkgraph.errors import ReplayMismatchError

__all__ = ["GradientSinks"]

_Hook = Callable[[torch.Tensor], None]
_NODES_PER_STEP = 4
_UNBOUND = Binding([], [], [], is_fresh=False)


class GradientSinks:
    """The fixed gradient buffers of one chunk's parameters.

    Args:
        parameters: the chunk's trainable parameters.
        label: names the chunk in errors.
        memory: of the gradients of the rank's parameters, since chunks may share one; None: of
            these alone.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        label: str,
        memory: GradMemory | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self._label = label
        self._memory = GradMemory(self.parameters) if memory is None else memory
        self._has_main_grad = [hasattr(p, "main_grad") for p in self.parameters]
        self._sinks: list[torch.Tensor] = [
            p.main_grad if has else self._memory.sink(p)  # type: ignore[attr-defined]
            for p, has in zip(self.parameters, self._has_main_grad, strict=True)
        ]
        self._accumulate = new_accumulate(self._sinks, [p.dtype for p in self.parameters])
        every = zip(self.parameters, self._has_main_grad, strict=True)
        self._own = [p for p, has in every if not has]
        self._given = [p for p in self.parameters if hasattr(p, "main_grad")]
        self._given_addresses = [p.main_grad.data_ptr() for p in self._given]
        self._own_attributes = [vars(p) for p in self._own]
        self._owns_any = bool(self._own)
        self._trained: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._bound_for: tuple[int, ...] | None = None
        self._binding = _UNBOUND
        self._num_hooks = -1  # as counted when parameters were last looked at
        self._num_unseen = 0  # parameters whose nodes were not looked at since

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The buffers that gradients are added to, one for each parameter."""
        return tuple(self._sinks)

    @contextmanager
    def accumulating(
        self, leaves: Sequence[nn.Parameter], marker: GradientMarker | None = None
    ) -> Iterator[set[int]]:
        """Inside, a gradient that autograd computes for a leaf is added to its parameter's sink.

        ``leaves`` stand for the parameters, in order (see `ParameterAliases`); their ``grad`` is
        None inside but for the moment when a gradient arrives, and as before afterwards.

        Yields:
            The indices of the parameters that got a gradient, by the end of the block.
        """
        trained: set[int] = set()
        hooks = [self._hook(i, marker, trained) for i in range(len(leaves))]
        with _taking_gradients(leaves, hooks):
            yield trained

    @contextmanager
    def collecting(
        self, leaves: Sequence[nn.Parameter], take: Callable[[int, torch.Tensor], None]
    ) -> Iterator[None]:
        """Inside, a gradient that autograd computes for a leaf goes to ``take``, with its index."""

        def hook(index: int) -> _Hook:
            def receive(leaf: torch.Tensor) -> None:
                gradient, leaf.grad = leaf.grad, None
                if gradient is not None:  # a function may give none
                    take(index, gradient)

            return receive

        with _taking_gradients(leaves, [hook(i) for i in range(len(leaves))]):
            yield

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to the sink of parameter ``index``."""
        with torch.no_grad():
            self._accumulate(self._sinks[index], gradient)

    @contextmanager
    def discarding(self, leaves: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, gradients go nowhere (capture warmup), one at a time.

        Layers that accumulate in their weight-gradient GEMM write to ``main_grad``. Where all are
        zero, as at the begin of a step, they are so again afterwards; otherwise a throw-away buffer
        as large as the largest parameter stands in their place.
        """
        given = [s for s, has in zip(self._sinks, self._has_main_grad, strict=True) if has]
        if not any(_has_a_bit(sink) for sink in given):
            try:
                with _taking_gradients(leaves, [_discard] * len(leaves)):
                    yield
            finally:
                with torch.no_grad():
                    for sink in given:
                        sink.zero_()
            return
        largest: dict[torch.dtype, int] = {}
        for sink in self._sinks:
            largest[sink.dtype] = max(largest.get(sink.dtype, 0), sink.numel())
        dumps = {
            dtype: torch.empty(size, dtype=dtype, device=self._sinks[0].device)
            for dtype, size in largest.items()
        }
        kept = [getattr(leaf, "main_grad", None) for leaf in leaves]
        try:
            for leaf, main_grad in zip(leaves, kept, strict=True):
                if main_grad is not None:
                    dump = dumps[main_grad.dtype][: main_grad.numel()]
                    leaf.main_grad = dump.view(main_grad.shape)  # type: ignore[attr-defined]
            with _taking_gradients(leaves, [_discard] * len(leaves)):
                yield
        finally:
            for leaf, main_grad in zip(leaves, kept, strict=True):
                if main_grad is not None:
                    leaf.main_grad = main_grad  # type: ignore[attr-defined]

    def interned(self, trained: tuple[int, ...]) -> tuple[int, ...]:
        """Return the one object for equal ``trained``, as `before_backward` takes it."""
        return self._trained.setdefault(trained, trained)

    def begin_step(self) -> None:
        """Check addresses and hooks. Once a step, not per microbatch.

        Raises:
            ReplayMismatchError: a parameter or its gradient buffer was replaced since capture, or
                a hook waits for a gradient.
        """
        if not self._are_in_place():
            index = self._first_moved()
            raise ReplayMismatchError(
                f"{self._label}: the main_grad of parameter {index} "
                f"(shape {tuple(self.parameters[index].shape)}) was moved to other memory after "
                "capture, or there is none any more; the graphs would use the old one. Update it "
                "in place (copy_), or release the graphs and capture again."
            )
        self._refuse_hooks()
        self._bound_for, self._binding = None, _UNBOUND

    def _refuse_hooks(self) -> None:
        """Refuse hooks that wait for gradients: a replay calls none.

        After a hook was registered anywhere, hooks on parameters are looked for at once, and those
        on autograd's own nodes, which is slow, at a few in each step.
        """
        own = self._own
        if not own:
            return
        hooked: list[nn.Parameter] = []
        number = num_registered_hooks()
        if number != self._num_hooks:
            hooked += filter(foreign_hooks, own)
            self._num_unseen = len(own)
        if self._num_unseen:
            looked_at = own[: self._num_unseen][-_NODES_PER_STEP:]
            hooked += itertools.compress(looked_at, have_node_hooks(looked_at))
        if hooked:
            index = next(i for i, p in enumerate(self.parameters) if p is hooked[0])
            raise ReplayMismatchError(
                f"{self._label}: a hook waits for the gradient of parameter {index} (shape "
                f"{tuple(hooked[0].shape)}), and a replay calls none. Remove it, and do its "
                "work after the step or in Chunk.after_backward."
            )
        self._num_hooks = number
        self._num_unseen = max(0, self._num_unseen - _NODES_PER_STEP)

    def before_backward(self, trained: tuple[int, ...]) -> Binding:
        """Make ``param.grad`` the sinks, before a replay adds to them.

        Args:
            trained: indices of the parameters that it adds to, by `interned`.

        Raises:
            ReplayMismatchError: somebody keeps views of a gradient that was dropped.
        """
        binding, memory = self._binding, self._memory
        if not self._owns_any:
            return binding
        if (
            trained is self._bound_for
            and use_count(memory.address) == memory.num_expected
            and binding.generation == memory.generation
            and binding.is_current()
        ):
            binding.is_fresh = False
        else:
            own = [self.parameters[i] for i in trained if not self._has_main_grad[i]]
            self._binding = binding = _UNBOUND  # which holds no gradient
            with torch.no_grad():
                self._binding = binding = memory.bind(own)
            self._bound_for = trained
        if binding.others:
            with torch.no_grad():
                binding.before_backward()
        return binding

    def end_step(self) -> None:
        """Make sure that no gradient was lost in the step.

        Raises:
            ReplayMismatchError: a gradient was dropped while it was kept by reference, and a
                backward may have been added to it since.
        """
        if self._bound_for is None or self._memory.has_changed() or not self._binding.is_current():
            return
        if num_replaced := self._binding.num_replaced():
            raise ReplayMismatchError(
                f"{self._label}: gradients of {num_replaced} parameters were dropped or replaced "
                "inside the step and are kept by reference, so that later backwards may have been "
                "added to what was kept.\n"
                "  To do: keep copies (`p.grad.clone()`), or drop gradients between steps."
            )

    def _hook(self, index: int, marker: GradientMarker | None, trained: set[int]) -> _Hook:
        def receive(leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:  # by a function that gives none
                return
            trained.add(index)
            if not getattr(leaf, "grad_added_to_main_grad", False):
                self.add(index, gradient)
            if marker is not None:
                marker.accumulated(index)

        return receive

    def _are_in_place(self) -> bool:
        """Return whether every ``main_grad`` is where it was, and there is none where none was."""
        try:
            now = [*map(torch.Tensor.data_ptr, map(_main_grad, self._given))]
        except (AttributeError, TypeError):  # one was removed
            return False
        own = map(contains, self._own_attributes, itertools.repeat("main_grad"))
        return now == self._given_addresses and not any(own)

    def _first_moved(self) -> int:
        """Return the index of the first parameter whose ``main_grad`` is not as it was."""
        addresses = iter(self._given_addresses)
        for index, (p, has) in enumerate(zip(self.parameters, self._has_main_grad, strict=True)):
            grad = getattr(p, "main_grad", None)
            address = next(addresses) if has else None
            if (None if grad is None else grad.data_ptr()) != address:
                return index
        raise AssertionError("every main_grad is where it was")


_main_grad = attrgetter("main_grad")


def _has_a_bit(tensor: torch.Tensor) -> bool:
    """Whether it is other than zero_() leaves it, -0.0 included. Waits for the device."""
    return bool(tensor.detach().reshape(-1).view(torch.uint8).any())


def _discard(leaf: torch.Tensor) -> None:
    leaf.grad = None


@contextmanager
def _taking_gradients(leaves: Sequence[nn.Parameter], hooks: Sequence[_Hook]) -> Iterator[None]:
    """Inside, each hook gets its leaf when ``leaf.grad`` holds one more gradient, and nothing else.

    Autograd hands a fresh gradient over without a copy only where ``grad`` is None.
    """
    kept = [leaf.grad for leaf in leaves]
    handles = [
        leaf.register_post_accumulate_grad_hook(hook)
        for leaf, hook in zip(leaves, hooks, strict=True)
    ]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield
    finally:
        for handle in handles:
            handle.remove()
        for leaf, grad in zip(leaves, kept, strict=True):
            leaf.grad = grad
