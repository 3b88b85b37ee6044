"""How and when to capture."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal, TypeGuard, get_args

from chunkgraph._text import did_you_mean, shown
from chunkgraph.errors import ConfigError
from chunkgraph.memory import MemoryPlan

__all__ = ["CaptureOptions", "OnCapture", "VerifyMode", "is_whole"]

OnCapture = Callable[[int, int, int | None], None]
"""Called after every graph with graphs captured, all graphs, and bytes left (None: unknown)."""

VerifyMode = Literal["none", "poison", "shadow"]


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value counts something; True and False do not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How and when to capture.

    Attributes:
        num_warmup_steps: eager training steps before the capture session.
        num_warmup_passes: eager passes over each chunk on the capture stream, in the session.
            None: 1 on a GPU, 0 on the CPU recorder.
        memory_plan: which pools the graphs use; see `chunkgraph.memory.pools`.
        shared_slots: the chunks of a rank share its slots: a slot holds one microbatch of any of
            them. Interleaved schedules never have as many microbatches in flight as their chunks'
            slots are together, so it takes less memory, for a pair of graphs for each chunk in
            each slot.
        memset_kernels: small memsets inside CUDA graphs run as kernels, which the device does not
            wait for as long, where torch and its CUDA bindings can do that
            (`chunkgraph.graphs.memset_nodes`). The numbers stay the same. A backend that is given
            to the engine has its own setting.
        verify: how replays are checked (debugging; slow; the numbers stay the same). ``poison``:
            scratch and freed slots are filled with NaN around every replay. ``shadow``: every
            replay is compared, bit for bit, with an eager pass on the same inputs and random
            state; that takes an eager step's activations and a copy of the gradients more.
            Either way the first slot and layer that differ or show a NaN are named.
        num_verify_steps: verify only so many replayed steps after a capture; None: no end.
        verify_every: of those, verify every so many.
        on_failure: what follows a failed capture once the model is back in order: ``raise`` the
            error, or train on eagerly (``eager``) after one warning.

    Raises:
        ConfigError: an unknown choice, a count that cannot be, or a value of another type.
    """

    num_warmup_steps: int = 1
    num_warmup_passes: int | None = None
    memory_plan: MemoryPlan = "shared_backward"
    shared_slots: bool = False
    memset_kernels: bool = field(
        default_factory=lambda: os.environ.get("CHUNKGRAPH_MEMSET_KERNELS", "1") != "0"
    )
    verify: VerifyMode = "none"
    num_verify_steps: int | None = None
    verify_every: int = 1
    on_failure: Literal["raise", "eager"] = "raise"

    def __post_init__(self) -> None:
        self._check_choice("memory_plan", get_args(MemoryPlan))
        self._check_choice("verify", get_args(VerifyMode))
        self._check_choice("on_failure", ("raise", "eager"))
        for name in ("shared_slots", "memset_kernels"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} is {shown(value)}; it must be True or False.")
        self._check_count("num_warmup_steps", 0)
        self._check_count("verify_every", 1)
        self._check_count("num_warmup_passes", 0, none="None for the backend's own number")
        self._check_count("num_verify_steps", 0, none="None for no end")

    def _check_choice(self, name: str, known: Sequence[str]) -> None:
        value = getattr(self, name)
        if isinstance(value, str) and value in known:
            return
        choices = " or ".join(f"{choice!r}" for choice in known)
        hint = did_you_mean(value, known) if isinstance(value, str) else ""
        raise ConfigError(f"{name} is {shown(value)}; it must be {choices}.{hint}")

    def _check_count(self, name: str, least: int, *, none: str = "") -> None:
        value = getattr(self, name)
        if (none and value is None) or (is_whole(value) and value >= least):
            return
        what = f"a whole number, {least} or greater{f', or {none}' if none else ''}"
        raise ConfigError(f"{name} is {shown(value)}; it must be {what}.")

    def num_passes_on(self, backend_name: str) -> int:
        """Eager passes over each chunk in a session on this backend."""
        if self.num_warmup_passes is not None:
            return self.num_warmup_passes
        return 0 if backend_name == "recorder" else 1

    def verifies(self, step: int) -> bool:
        """Whether replayed step ``step`` after the capture, from 0, is a verified one."""
        is_early = self.num_verify_steps is None or step < self.num_verify_steps
        return is_early and step % self.verify_every == 0
