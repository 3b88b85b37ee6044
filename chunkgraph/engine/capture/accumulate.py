"""Take the gradients of a backward, and add them to sinks at memory bandwidth.

torch's kernel for operands of different dtypes converts element by element and reaches about half
of the memory bandwidth: adding bfloat16 gradients to a float32 ``main_grad`` then takes a fifth of
a training step. A float32 sum of the same two values has one correct result, so this kernel equals
torch's to the last bit.

Gradients of grouped experts, which are parts of one tensor, are added by one kernel: most of them
are too small to fill the GPU, and each kernel starts after a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

from chunkgraph.engine.chunk import GradientMarker

Accumulate = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""A function that adds each gradient to its sink, in place, on the current stream."""

_Pair = tuple[torch.Tensor, torch.Tensor]
_HALF = (torch.bfloat16, torch.float16)
_ALIGNMENT_BYTES = 16
_DIVISOR = 16
_BLOCK = 1024  # elements; larger blocks are slower by a quarter on an H200
_MARK = "_chunkgraph_adds_together"


def add_together(tensor: torch.Tensor) -> None:
    """Let gradients that are parts of ``tensor`` be added together.

    Call this where the tensor is computed, if nothing writes to it afterwards. Other gradients are
    added at once: a custom function may return parts of a workspace that the next one writes to.
    """
    setattr(tensor.untyped_storage(), _MARK, True)


class Accumulation:
    """The gradients of one backward pass, added to sinks.

    A gradient is added as soon as autograd has it. One that is a part of a tensor of `add_together`
    waits for the other parts: until all of them are there, another tensor's gradient arrives, or
    `finish`.

    Args:
        accumulate: See `new_accumulate`.
        sinks: Sink of each parameter, as ``accumulate`` takes them.
        marker: Observer of the sums; None: there is none.

    Attributes:
        trained: Indices of the parameters that got a gradient.
    """

    def __init__(
        self,
        accumulate: Accumulate,
        sinks: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
        marker: GradientMarker | None = None,
    ) -> None:
        self.trained: set[int] = set()
        self._accumulate, self._sinks, self._marker = accumulate, sinks, marker
        self._parts: dict[int, torch.Tensor] = {}
        # Address of the tensor whose parts wait, and the stream that computed them.
        self._source: tuple[int, torch.cuda.Stream | None] = (0, None)
        self._missing_bytes = 0

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to the sink of parameter ``index``, perhaps together with later ones."""
        storage = gradient.untyped_storage()
        stream = torch.cuda.current_stream(gradient.device) if gradient.is_cuda else None
        source = storage.data_ptr(), stream
        if self._parts and (index in self._parts or source != self._source):
            own = self._source[1]
            with nullcontext() if own is None else torch.cuda.stream(own):
                self.finish()
        if not self._parts:
            waits = getattr(storage, _MARK, False)
            self._source, self._missing_bytes = source, storage.nbytes() if waits else 0
        self._parts[index] = gradient
        self._missing_bytes -= gradient.numel() * gradient.element_size()
        if self._missing_bytes <= 0:
            self.finish()

    def finish(self) -> None:
        """Add the gradients that wait, on the current stream."""
        parts, self._parts = self._parts, {}
        if parts:
            with torch.no_grad():
                self._accumulate([self._sinks[index] for index in parts], list(parts.values()))
        for index in parts:
            self.note(index)

    def note(self, index: int) -> None:
        """Record that the gradient of parameter ``index`` is in its sink."""
        self.trained.add(index)
        if self._marker is not None:
            self._marker.accumulated(index)


def new_accumulate(sinks: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> Accumulate:
    """Return a function that adds gradients to ``sinks``, with its kernels compiled and loaded.

    Call it before a capture, during which nothing may be compiled or loaded.

    Args:
        sinks: Float tensors on one device.
        dtypes: The dtype of each sink's gradient.
    """
    pairs = {(sink.dtype, dtype) for sink, dtype in zip(sinks, dtypes, strict=True)}
    mixed = [dtype for sink, dtype in pairs if sink == torch.float32 and dtype in _HALF]
    if not mixed or not sinks[0].is_cuda or triton is None:
        return _add
    for dtype in mixed:
        sample = torch.zeros(1024, device=sinks[0].device)
        _launch([(sample, sample.to(dtype))])
    return _add_in_runs


def _add(sinks: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    for sink, gradient in zip(sinks, gradients, strict=True):
        sink.add_(gradient)


def _add_in_runs(sinks: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    for run in _runs(sinks, gradients):
        if _fits(*run[0]):
            _launch(run)
        else:
            _add(*zip(*run, strict=True))


def _runs(sinks: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[list[_Pair]]:
    """Return the pairs in runs of one shape whose sinks and gradients lie at even distances."""
    runs: list[list[_Pair]] = []
    pairs = zip(sinks, gradients, strict=True)
    for pair in sorted(pairs, key=lambda pair: pair[1].data_ptr()):
        if runs and _continues(runs[-1], pair):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return runs


def _continues(run: Sequence[_Pair], pair: _Pair) -> bool:
    """Return whether ``pair`` lies as far from the last pair as that one from the one before."""
    sink, gradient = run[-1]
    if not (_fits(sink, gradient) and _fits(*pair)):
        return False
    if sink.shape != pair[0].shape or gradient.dtype != pair[1].dtype:
        return False
    steps = _steps(run[-1], pair)
    if len(run) > 1:
        return steps == _steps(run[0], run[1])
    # Triton compiles the kernel for steps of this divisibility.
    return all(step % _DIVISOR == 0 and abs(step) >= sink.numel() for step in steps)


def _steps(first: _Pair, second: _Pair) -> tuple[int, int]:
    """Return the number of elements from one sink to the next, and between the gradients."""
    sink, gradient = (
        (b.data_ptr() - a.data_ptr()) // a.element_size()
        for a, b in zip(first, second, strict=True)
    )
    return sink, gradient


def _fits(sink: torch.Tensor, gradient: torch.Tensor) -> bool:
    return (
        sink.dtype == torch.float32
        and gradient.dtype in _HALF
        and sink.shape == gradient.shape
        and sink.is_contiguous()
        and gradient.is_contiguous()
        and not (sink.data_ptr() | gradient.data_ptr()) % _ALIGNMENT_BYTES
    )


if triton is not None:

    @triton.jit(do_not_specialize=["n"])
    def _add_mixed(sink, gradient, n, sink_step, gradient_step, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        pair = tl.program_id(1).to(tl.int64)
        sink += pair * sink_step
        gradient += pair * gradient_step
        total = tl.load(sink + at, inside) + tl.load(gradient + at, inside).to(tl.float32)
        tl.store(sink + at, total, inside)


def _launch(run: Sequence[_Pair]) -> None:
    """Add the half-precision gradients of a run of `_runs` to their float32 sinks."""
    (sink, gradient), n = run[0], run[0][0].numel()
    steps = _steps(run[0], run[1]) if len(run) > 1 else (0, 0)
    _add_mixed[(triton.cdiv(n, _BLOCK), len(run))](
        sink, gradient, n, *steps, BLOCK=_BLOCK, num_warps=8
    )


def receiver(
    leaves: Sequence[nn.Parameter], sums: Accumulation
) -> Callable[[int, torch.Tensor], None]:
    """Return a function that adds a gradient of a leaf to ``sums``."""

    def receive(index: int, gradient: torch.Tensor) -> None:
        leaf = leaves[index]
        is_dummy = not getattr(leaf, "zero_out_wgrad", False)  # else zeros, and others' gradients
        if is_dummy and getattr(leaf, "grad_added_to_main_grad", False):
            sums.note(index)
        else:
            sums.add(index, gradient)

    return receive


@contextmanager
def collecting(
    leaves: Sequence[nn.Parameter], take: Callable[[int, torch.Tensor], None]
) -> Iterator[None]:
    """Pass each gradient that autograd computes for a leaf in this block to ``take``.

    Inside, ``grad`` of each leaf is None except while a hook takes a gradient: autograd stores a
    new gradient without a copy only then. On exit it is restored.

    Args:
        leaves: parameters, or their aliases.
        take: called with the index of the leaf and one new gradient.
    """

    def hook(index: int) -> Callable[[torch.Tensor], None]:
        def receive(leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:  # a custom function may return None
                take(index, gradient)

        return receive

    grads = [leaf.grad for leaf in leaves]
    handles = [
        leaf.register_post_accumulate_grad_hook(hook(index)) for index, leaf in enumerate(leaves)
    ]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield
    finally:
        for handle in handles:
            handle.remove()
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
