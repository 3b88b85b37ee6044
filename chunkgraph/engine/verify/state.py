"""Compare and restore random state and buffers around a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from chunkgraph.engine.bits import describe_difference, same_bits
from chunkgraph.engine.capture.preserved import put_back, versions

__all__ = ["ChunkState", "restored"]


@dataclass(frozen=True)
class ChunkState:
    """A snapshot of the state that a forward may change.

    Attributes:
        buffers: copies of the chunk's buffers.
        random: states of the random generators: the host's, the device's (CUDA), further ones.
    """

    buffers: tuple[torch.Tensor, ...]
    random: tuple[torch.Tensor, ...]

    @staticmethod
    def now(
        buffers: Sequence[torch.Tensor],
        device: torch.device,
        generators: Sequence[torch.Generator],
    ) -> ChunkState:
        """Copy the present state."""
        random = [torch.get_rng_state()]
        if device.type == "cuda":
            random.append(torch.cuda.get_rng_state(device))
        random.extend(generator.get_state() for generator in generators)
        return ChunkState(tuple(b.detach().clone() for b in buffers), tuple(random))

    def difference(
        self, eager: ChunkState, covers: Callable[[int, torch.Tensor, torch.Tensor], bool]
    ) -> str:
        """Return the difference to the state after an eager pass, or "".

        Args:
            eager: the other state.
            covers: returns whether the difference between both values of a buffer is noise.
        """
        for i, (mine, theirs) in enumerate(zip(self.buffers, eager.buffers, strict=True)):
            if not same_bits(mine, theirs) and not covers(i, mine, theirs):
                return f"buffer {i} of the chunk: {describe_difference(mine, theirs)}"
        if not all(same_bits(a, b) for a, b in zip(self.random, eager.random, strict=True)):
            return "the random state: a different number of random values was drawn"
        return ""

    def put_back(
        self,
        buffers: Sequence[torch.Tensor],
        device: torch.device,
        generators: Sequence[torch.Generator],
    ) -> None:
        """Make this the present state."""
        put_back(zip(buffers, self.buffers, strict=True))
        host, *others = self.random
        torch.set_rng_state(host)
        if device.type == "cuda":
            torch.cuda.set_rng_state(others.pop(0), device)
        for generator, value in zip(generators, others, strict=True):
            generator.set_state(value)


@contextmanager
def restored(
    buffers: Sequence[torch.Tensor],
    device: torch.device,
    generators: Sequence[torch.Generator],
    begin: ChunkState | None = None,
) -> Iterator[None]:
    """Restore buffers, their version counters and the random state on exit.

    Args:
        buffers: the tensors to restore.
        device: the chunk's device.
        generators: further random generators.
        begin: the state that the block begins with; None for the present one.
    """
    state = ChunkState.now(buffers, device, generators)
    try:
        with versions(buffers):
            if begin is not None:
                begin.put_back(buffers, device, generators)
            yield
    finally:
        state.put_back(buffers, device, generators)
