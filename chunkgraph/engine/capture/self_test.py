"""The self-test of a capture: a replay of each chunk's first slot against eager passes.

Before the capture, eager passes over the sampled call leave digests of all that they compute. After
the first slot of a chunk is captured, before the others are, its graphs are replayed on the same
call and from the same state. The results must have the bits of the eager passes. Where two eager
passes differ in bits, since their kernels add in no fixed order, the replay must be about as close
to one of them as they are to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chunkgraph.engine.bits import Digests, digests_of
from chunkgraph.engine.capture.layers import parameter_names
from chunkgraph.engine.capture.saved import SavedTensor, first_difference, what_follows
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.tree import distinct_tensors
from chunkgraph.errors import CaptureError

# Estimates of a difference from sums in buckets, and the difference of two passes itself, vary.
_FACTOR = 4.0
_MOST_NOISE = 0.05  # of a tensor that differs little in two passes by chance
_LEAST_NOISE = 0.002
_ROUTED = 0.02  # of all gradients, where tokens may be routed otherwise
# Kernels differ by rounding; outputs that differ by this much depend on something else.
_MOST_OF_OUTPUTS = 0.1

_NOTHING = digests_of(())
_PLAIN = (bool, int, float, str)

TO_DO = (
    "  To do: look there for a Python number, flag or list that the forward reads and that changes "
    "from call to call, a tensor that it replaces instead of updating in place, or memory that "
    "others write. Keep such state in tensors that are updated in place, or outside of the chunk."
)


@dataclass(frozen=True)
class Measured:
    """Digests of all that one eager pass, or one replay, computes.

    Attributes:
        forward: of the result's tensors, then of the chunk's buffers.
        num_outputs: number of tensors in the result.
        plain: the other leaves of the result: values, and names of other types.
        random: states of the random generators after the forward.
        saved: what the forward keeps for its backward, as digests; empty if nobody asked.
        backward: of the inputs' gradients, then of the parameters' gradients.
        order: parameters in the order in which their gradients were ready; empty for replays.
    """

    forward: Digests
    num_outputs: int
    plain: tuple[str, ...] = ()
    random: tuple[torch.Tensor, ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    backward: Digests = _NOTHING
    order: tuple[int, ...] = ()

    @staticmethod
    def of(
        leaves: Sequence[Any],
        buffers: Sequence[torch.Tensor],
        generators: Iterable[torch.Generator],
    ) -> Measured:
        """Measure a forward that has just run.

        Args:
            leaves: leaves of its result.
            buffers: the chunk's buffers.
            generators: random generators that it draws from.
        """
        tensors = distinct_tensors(leaves)
        others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        plain = tuple(repr(x) if isinstance(x, _PLAIN) else type(x).__name__ for x in others)
        random = tuple(generator.get_state() for generator in generators)
        return Measured(digests_of([*tensors, *buffers]), len(tensors), plain, random)

    def with_saved(self, saved: Sequence[SavedTensor]) -> Measured:
        """Measure tensors too that the forward keeps, all of which exist now."""
        digests = digests_of([s.read() if s.tensor is None else s.tensor for s in saved])
        pairs = zip(saved, digests.bits, strict=True)
        return replace(self, saved=tuple(replace(s, tensor=bits) for s, bits in pairs))

    def with_backward(
        self,
        input_grads: Sequence[torch.Tensor | None],
        sums: Sequence[torch.Tensor | None],
        order: Sequence[int] = (),
    ) -> Measured:
        """Measure the backward too, from the inputs' and the parameters' gradients."""
        return replace(self, backward=digests_of([*input_grads, *sums]), order=tuple(order))


@dataclass(frozen=True)
class Noise:
    """How far two eager passes over one call are from repeating themselves.

    Where they repeat every bit, so must a replay. If a forward does not, tokens may be routed to
    other experts. The gradient of an expert with few tokens then tells nothing. With the default
    kernels of 8 layers of 32 experts, up to 13 of 555 gradients change by more than half of their
    norm from one eager pass to the next, and all together by 6% to 15%.

    Attributes:
        forward: for each tensor of `Measured.forward`, the norm of the difference of both passes as
            a fraction of the tensor's norm; 0 where all bits are equal.
        backward: the same for `Measured.backward`.
    """

    forward: torch.Tensor
    backward: torch.Tensor

    @staticmethod
    def of(passes: Sequence[Measured]) -> Noise:
        """Compare the first pass with the last one."""
        (one, a), (other, b) = ((p.forward, p.backward) for p in (passes[0], passes[-1]))
        forward = one.ratios(other).masked_fill(~one.are_float, 1.0)
        return Noise(
            forward.masked_fill(one.equal(other), 0.0),
            a.ratios(b).masked_fill(a.equal(b), 0.0),
        )

    def widened(self, replays: Sequence[Measured]) -> Noise:
        """Return the noise of these passes or of replays, whichever is larger.

        Replays that differ by more than rounding show a fault.
        """
        other = Noise.of(replays)
        pairs = (self.forward, other.forward), (self.backward, other.backward)
        return Noise(*(torch.maximum(a, b.masked_fill(b > _MOST_NOISE, 0.0)) for a, b in pairs))

    def of_forward(self, index: int) -> float:
        """Return the largest ratio, as in ``forward``, that is noise; 0: all bits must be equal."""
        if not self.is_routed:
            return 0.0
        floats = self.forward[self.forward < 1.0]
        level = min(float(floats.max()) if floats.numel() else 0.0, _MOST_NOISE)
        return _FACTOR * float(self.forward[index]) + level

    @property
    def is_routed(self) -> bool:
        """Return whether tokens may be routed otherwise in each pass."""
        return bool(self.forward.any())

    def of_backward(self, index: int) -> float:
        """Return the largest ratio, as in ``backward``, that is noise; 0: all bits are equal."""
        if self.is_routed:
            return 1.0  # `of_all_gradients` is the limit
        return _FACTOR * float(self.backward[index]) + _MOST_NOISE if self.backward.any() else 0.0

    def of_all_gradients(self) -> float:
        """Return the largest root mean square of all ratios of a backward that is noise."""
        slack = _ROUTED if self.is_routed else _LEAST_NOISE
        return _FACTOR * float(self.backward.square().mean().sqrt()) + slack


def check_passes(label: str, passes: Sequence[Measured]) -> Noise:
    """Refuse a chunk whose eager passes over one call differ by more than rounding.

    Args:
        label: name of the chunk and bank in errors.
        passes: measurements of the passes, each from the same state.

    Raises:
        CaptureError: they differ; the message names the output.
    """
    noise = Noise.of(passes)
    num_outputs = passes[0].num_outputs
    outputs = noise.forward[:num_outputs] * passes[0].forward.are_float[:num_outputs]
    if (outputs > _MOST_OF_OUTPUTS).any():
        index = int(outputs.argmax())
        raise CaptureError(
            f"{label}: two eager passes on the same inputs and random state give different results "
            f"(output {index} differs by {float(outputs[index]):.0%} of its norm), so a replay "
            f"cannot equal eager training.\n{TO_DO}"
        )
    return noise


def difference(
    chunk: Chunk, passes: Sequence[Measured], replays: Sequence[Measured], noise: Noise
) -> tuple[str, str]:
    """Return what differs in each replay from every pass, and its layer; "" if nothing does.

    One replay that is near one pass clears a tensor: where routing does not repeat itself, each
    replay may send the only token of another expert elsewhere.

    Args:
        chunk: the chunk.
        passes: its eager passes.
        replays: replays of one slot, each on the input of the passes.
        noise: the noise of passes and replays.
    """
    if what := forward_difference(passes, replays, noise):
        layer = first_difference(replays[-1].saved, passes[-1].saved)
        return what, layer or what_follows(replays[-1].saved)
    return backward_difference(chunk, passes, replays, noise, in_all=True)


def forward_difference(
    passes: Sequence[Measured], replays: Sequence[Measured], noise: Noise
) -> str:
    """Return what differs from eager passes after each replay of a forward, or ""."""
    eager, replay = passes[-1], replays[-1]
    held, expected = (f"{m.num_outputs} tensors and {m.plain}" for m in (replay, eager))
    if held != expected:
        return f"the result holds {held}, in an eager pass {expected}"
    ratios = _ratios([p.forward for p in passes], [r.forward for r in replays])
    if wrong := _exceeding(ratios, noise.of_forward):
        index = wrong[0]
        is_output = index < eager.num_outputs
        name = f"output {index}" if is_output else f"buffer {index - eager.num_outputs}"
        return name + _size(eager.forward, replay.forward, index)
    if not all(torch.equal(a, b) for a, b in zip(replay.random, eager.random, strict=True)):
        return "the random state: a different number of random values is drawn"
    return ""


def backward_difference(
    chunk: Chunk,
    passes: Sequence[Measured],
    replays: Sequence[Measured],
    noise: Noise,
    *,
    in_all: bool = False,
) -> tuple[str, str]:
    """Return what differs after each replay of a backward, and its layer; "" if nothing does.

    With ``in_all``, or if tokens may be routed otherwise, bound the differences of all gradients
    together as well. See `difference`.
    """
    eager, replayed = passes[-1], replays[-1].backward
    ratios = _ratios([p.backward for p in passes], [r.backward for r in replays])
    wrong = _exceeding(ratios, noise.of_backward)
    if (in_all or noise.is_routed) and not wrong:
        mean = (sum(r * r for r in ratios.values()) / max(1, len(replayed.norms))) ** 0.5
        if mean > noise.of_all_gradients():
            wrong = [i for i, ratio in ratios.items() if ratio >= mean]
    if not wrong:
        return "", ""
    num_inputs = len(replayed.norms) - len(chunk.parameters)
    of_parameters = [i - num_inputs for i in wrong if i >= num_inputs]
    if not of_parameters:
        size = _size(eager.backward, replayed, wrong[0])
        return f"the gradient of tensor argument {wrong[0]}{size}", "the chunk's input"
    ranks = {index: rank for rank, index in enumerate(eager.order)}
    first = min(of_parameters, key=lambda i: ranks.get(i, -1))
    name, size = parameter_names(chunk)[first], _size(eager.backward, replayed, num_inputs + first)
    what = (
        f"the gradient of {name}{size} (the first in the order of the backward; "
        f"{len(of_parameters)} of {len(chunk.parameters)} differ)"
    )
    return what, name.rpartition(".")[0] or name


def wrong_replay(label: str, what: str, layer: str) -> CaptureError:
    """Return the error for a slot whose replay differs from the eager passes."""
    return CaptureError(
        f"{label}: a replay of its graphs differs from an eager pass on the same inputs and random "
        f"state: {what}.\n  first layer that differs: {layer}\n{TO_DO}"
    )


def _exceeding(ratios: dict[int, float], limit_of: Callable[[int], float]) -> list[int]:
    """Return the tensors whose ratio is more than noise; where that is 0, other bits are."""
    return [i for i, r in ratios.items() if not (limit := limit_of(i)) or r > limit]


def _ratios(passes: Sequence[Digests], replays: Sequence[Digests]) -> dict[int, float]:
    """Return, for each tensor that no replay repeats bit by bit, its least ratio to a pass."""
    pairs = [(p, r) for p in passes for r in replays]
    differs = torch.stack([~p.equal(r) for p, r in pairs]).all(dim=0)
    ratios = torch.stack([r.ratios(p) for p, r in pairs]).amin(dim=0)
    ratios = ratios.masked_fill(~replays[-1].are_float, 0.0)  # counts follow the values
    return {i: float(ratios[i]) for i in differs.nonzero().flatten().tolist()}


def _size(eager: Digests, replayed: Digests, index: int) -> str:
    distance, norm = (float(d[index]) for d in (eager.distance(replayed), eager.norms))
    return f" differs by {distance / norm:.2g} of its norm" if norm and distance else " differs"
