"""The options of a capture."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal, TypeGuard, get_args

from chunkgraph._text import did_you_mean, shown
from chunkgraph.errors import ConfigError

__all__ = ["CaptureOptions", "OnCapture", "VerifyMode", "is_whole"]

OnCapture = Callable[[int, int, int | None], None]
"""A function called after every graph with the graphs captured, all graphs, and free bytes or None.
"""

VerifyMode = Literal["none", "poison", "shadow"]


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer; booleans are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How and when to capture.

    Attributes:
        num_warmup_steps: eager training steps before the capture session.
        shared_slots: share the slots between the chunks of a rank: a slot holds one microbatch of
            any chunk. Interleaved schedules have fewer microbatches in flight than the chunks have
            slots in total, so this takes less memory, but every slot has graphs of every chunk.
        memset_kernels: run small memsets inside CUDA graphs as kernels, for which the device waits
            less, and copy inputs and gradients there, for which the host waits less
            (`chunkgraph.graphs.graph_nodes`), if torch and its CUDA bindings support it. Results
            stay the same. Ignored if a backend is passed to the engine.
        verify: how to check replays (for debugging; slow; results stay the same). ``poison``: fill
            scratch and freed slots with NaN around every replay. ``shadow``: compare every replay
            bit for bit with an eager pass on the same inputs and random state, which takes the
            activations of an eager step and a copy of the gradients. Errors name the first slot and
            layer that differ or have a NaN.
        num_verify_steps: number of replayed steps to verify after a capture; None: all.
        verify_every: verify only every n-th of these.
        on_failure: after a failed capture: ``raise`` the error, or continue eagerly (``eager``)
            with one warning.

    Raises:
        ConfigError: a value is not one of the choices, is out of range, or has a wrong type.
    """

    num_warmup_steps: int = 1
    shared_slots: bool = False
    memset_kernels: bool = field(
        default_factory=lambda: os.environ.get("CHUNKGRAPH_MEMSET_KERNELS", "1") != "0"
    )
    verify: VerifyMode = "none"
    num_verify_steps: int | None = None
    verify_every: int = 1
    on_failure: Literal["raise", "eager"] = "raise"

    def __post_init__(self) -> None:
        self._check_choice("verify", get_args(VerifyMode))
        self._check_choice("on_failure", ("raise", "eager"))
        for name in ("shared_slots", "memset_kernels"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} is {shown(value)}; it must be True or False.")
        self._check_count("num_warmup_steps", 0)
        self._check_count("verify_every", 1)
        self._check_count("num_verify_steps", 0, none="None for all steps")

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

    def verifies(self, step: int) -> bool:
        """Return whether to verify replayed step ``step`` after the capture, from 0."""
        is_early = self.num_verify_steps is None or step < self.num_verify_steps
        return is_early and step % self.verify_every == 0
