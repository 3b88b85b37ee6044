"""The self-test of a capture: a replay of each chunk's first slot against eager passes.

Before the capture, eager passes over the sampled call leave digests of all that they compute. After
the first slot of a chunk is captured, before the others are, its graphs are replayed on the same
call and from the same state. The results must have the bits of the eager passes. Where two eager
passes differ in bits, since their kernels add in no fixed order, the replay must be about as close
to one of them as they are to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chunkgraph.engine.capture.layers import parameter_names
from chunkgraph.engine.capture.saved import SavedTensor
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.digest import Digests, digests_of
from chunkgraph.errors import CaptureError

__all__ = [
    "Measured",
    "Noise",
    "SavedDigests",
    "check_passes",
    "difference",
    "wrong_replay",
]

# Estimates of a difference from sums in buckets, and the difference of two passes itself, vary.
_FACTOR = 4.0
_MOST_NOISE = 0.05  # of a tensor that differs little in two passes by chance
_LEAST_NOISE = 0.002
_ROUTED = 0.5  # of one expert's gradient, where tokens may be routed otherwise
_ROUTED_IN_ALL = 0.02
# Kernels differ by rounding; outputs that differ by this much depend on something else.
_MOST_OF_OUTPUTS = 0.1

_TO_DO = (
    "  To do: look there for a Python number, flag or list that the forward reads and that changes "
    "from call to call, a tensor that it replaces instead of updating in place, or memory that "
    "others write. Keep such state in tensors that are updated in place, or outside of the chunk."
)


@dataclass(frozen=True)
class SavedDigests:
    """The tensors that a forward keeps for its backward, with their digests.

    Attributes:
        tensors: the tensors, in the order of the operators; only their addresses are kept.
        digests: one for each.
    """

    tensors: tuple[SavedTensor, ...]
    digests: Digests

    @staticmethod
    def of(saved: Sequence[SavedTensor]) -> SavedDigests:
        """Read tensors that exist now."""
        digests = digests_of([s.read() if s.tensor is None else s.tensor for s in saved])
        return SavedDigests(tuple(s.without_tensor() for s in saved), digests)


@dataclass(frozen=True)
class Measured:
    """Digests of all that one eager pass, or one replay, computes.

    Attributes:
        forward: of the result's tensors, then of the chunk's buffers.
        backward: of the inputs' gradients, then of the parameters' gradients.
        num_outputs: number of tensors in the result.
        plain: the other leaves of the result.
        random: states of the random generators after the forward.
        order: parameters in the order in which their gradients were ready; empty for replays.
        saved: what the forward keeps for its backward; None if nobody asked.
    """

    forward: Digests
    backward: Digests
    num_outputs: int
    plain: tuple[Any, ...]
    random: tuple[torch.Tensor, ...]
    order: tuple[int, ...] = ()
    saved: SavedDigests | None = None


@dataclass(frozen=True)
class Noise:
    """How far two eager passes over one call are from repeating themselves.

    Where they repeat every bit, so must a replay. If a forward does not, a token may be routed to
    another expert, whose gradients then change by more than rounding.

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
        one, other = passes[0], passes[-1]
        forward = one.forward.ratios(other.forward).masked_fill(~one.forward.are_float, 1.0)
        backward = one.backward.ratios(other.backward)
        return Noise(
            forward.masked_fill(one.forward.equal(other.forward), 0.0),
            backward.masked_fill(one.backward.equal(other.backward), 0.0),
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
        if not self.forward.any():
            return 0.0
        return _FACTOR * float(self.forward[index]) + self._level()

    def of_backward(self, index: int) -> float:
        """Return the largest ratio, as in ``backward``, that is noise; 0: all bits are equal."""
        if self.forward.any():
            return _FACTOR * float(self.backward[index]) + _ROUTED
        return _FACTOR * float(self.backward[index]) + _MOST_NOISE if self.backward.any() else 0.0

    def of_all_gradients(self) -> float:
        """Return the largest root mean square of all ratios of a backward that is noise."""
        slack = _ROUTED_IN_ALL if self.forward.any() else _LEAST_NOISE
        return _FACTOR * float(self.backward.square().mean().sqrt()) + slack

    def _level(self) -> float:
        floats = self.forward[self.forward < 1.0]
        return min(float(floats.max()) if floats.numel() else 0.0, _MOST_NOISE)


def check_passes(label: str, passes: Sequence[Measured]) -> Noise:
    """Refuse a chunk whose eager passes over one call differ by more than rounding.

    Args:
        label: name of the chunk and bank in errors.
        passes: measurements of the passes, each from the same state.

    Raises:
        CaptureError: they differ; the message names the output.
    """
    noise = Noise.of(passes)
    outputs = (
        noise.forward[: passes[0].num_outputs]
        * passes[0].forward.are_float[: passes[0].num_outputs]
    )
    if (outputs > _MOST_OF_OUTPUTS).any():
        index = int(outputs.argmax())
        raise CaptureError(
            f"{label}: two eager passes on the same inputs and random state give different results "
            f"(output {index} differs by {float(outputs[index]):.0%} of its norm), so a replay "
            f"cannot equal eager training.\n{_TO_DO}"
        )
    return noise


def difference(
    chunk: Chunk, passes: Sequence[Measured], replay: Measured, noise: Noise
) -> tuple[str, str]:
    """Return what differs in a replay, and its layer; "" if nothing does.

    Args:
        chunk: the chunk.
        passes: its eager passes.
        replay: the replay.
        noise: the noise of passes and replays.
    """
    what = _forward_difference(passes, replay, noise)
    if not what:
        return _backward_difference(chunk, passes, replay, noise)
    eager = passes[-1].saved
    return what, _first_layer(eager, replay.saved) if eager and replay.saved else "unknown"


def _forward_difference(passes: Sequence[Measured], replay: Measured, noise: Noise) -> str:
    """Return what differs after the replay of a forward, or ""."""
    eager = passes[-1]
    ratios = _ratios([p.forward for p in passes], replay.forward)
    wrong = [i for i, r in ratios.items() if not (limit := noise.of_forward(i)) or r > limit]
    if wrong:
        index = wrong[0]
        is_output = index < eager.num_outputs
        name = f"output {index}" if is_output else f"buffer {index - eager.num_outputs}"
        return name + _size(eager.forward, replay.forward, index)
    if not _equal_plain(replay.plain, eager.plain):
        return f"the result holds {tuple(replay.plain)!r}, in an eager pass {eager.plain!r}"
    return ""


def _backward_difference(
    chunk: Chunk, passes: Sequence[Measured], replay: Measured, noise: Noise
) -> tuple[str, str]:
    """Return what differs after the replay of a backward, and its layer; "" if nothing does."""
    eager = passes[-1]
    ratios = _ratios([p.backward for p in passes], replay.backward)
    wrong = [i for i, r in ratios.items() if not (limit := noise.of_backward(i)) or r > limit]
    if not wrong and ratios:
        in_all = (sum(r * r for r in ratios.values()) / len(eager.backward.norms)) ** 0.5
        wrong = [*ratios] if in_all > noise.of_all_gradients() else []
    num_inputs = len(eager.backward.norms) - len(chunk.parameters)
    if of_parameters := [i - num_inputs for i in wrong if i >= num_inputs]:
        ranks = {index: rank for rank, index in enumerate(eager.order)}
        first = min(of_parameters, key=lambda i: ranks.get(i, -1))
        name = parameter_names(chunk)[first]
        what = (
            f"the gradient of {name}{_size(eager.backward, replay.backward, num_inputs + first)} "
            f"(the first in the order of the backward; {len(of_parameters)} of "
            f"{len(chunk.parameters)} differ)"
        )
        return what, name.rpartition(".")[0] or name
    if wrong:
        size = _size(eager.backward, replay.backward, wrong[0])
        return f"the gradient of tensor argument {wrong[0]}{size}", "the chunk's input"
    if not all(torch.equal(a, b) for a, b in zip(replay.random, eager.random, strict=True)):
        return "the random state: a different number of random values is drawn", "unknown"
    return "", ""


def _first_layer(eager: SavedDigests, replayed: SavedDigests) -> str:
    """Return the first layer that keeps another tensor for its backward than in an eager pass.

    Args:
        eager: the tensors that an eager pass keeps.
        replayed: those of the slot, after the replay of its forward.
    """
    for i, saved in enumerate(replayed.tensors):
        layer = saved.layer or "(outside of any layer)"
        other = eager.tensors[i] if i < len(eager.tensors) else None
        if other is None or (other.operator, other.shape) != (saved.operator, saved.shape):
            return f"{layer} (it keeps {saved.operator}, which an eager pass does not)"
        if saved.device != other.device:
            continue  # attention keeps its seed on the device in a capture, else on the host
        if (eager.digests.bits[i] != replayed.digests.bits[i]).any():
            return f"{layer} (it keeps {saved.operator}, shape {saved.shape})"
    last = replayed.tensors[-1].layer if replayed.tensors else ""
    return f"{last or 'the chunk'}, or what follows it (all that it keeps is right)"


def wrong_replay(label: str, what: str, layer: str) -> CaptureError:
    """Return the error for a slot whose replay differs from the eager passes."""
    return CaptureError(
        f"{label}: a replay of its graphs differs from an eager pass on the same inputs and random "
        f"state: {what}.\n  first layer that differs: {layer}\n{_TO_DO}"
    )


def _ratios(passes: Sequence[Digests], replayed: Digests) -> dict[int, float]:
    """Return, for each tensor with other bits than in every pass, the least ratio to a pass."""
    differs = torch.stack([~p.equal(replayed) for p in passes]).all(dim=0)
    ratios = torch.stack([replayed.ratios(p) for p in passes]).amin(dim=0)
    ratios = ratios.masked_fill(~replayed.are_float, 0.0)  # counts follow the values
    return {i: float(ratios[i]) for i in differs.nonzero().flatten().tolist()}


def _size(eager: Digests, replayed: Digests, index: int) -> str:
    distance, norm = (float(d[index]) for d in (eager.distance(replayed), eager.norms))
    return f" differs by {distance / norm:.2g} of its norm" if norm and distance else " differs"


def _equal_plain(replayed: Sequence[Any], eager: Sequence[Any]) -> bool:
    return len(replayed) == len(eager) and all(
        type(a) is type(b) and (a == b or not isinstance(a, (bool, int, float, str)))
        for a, b in zip(replayed, eager, strict=True)
    )
