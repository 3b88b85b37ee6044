"""Actions: one operation of a rank on one microbatch of one stage.

An action prints as stage, operation, microbatch, as in ``torch.distributed.pipelining``: ``2F0`` is
the forward of microbatch 0 on stage 2, ``3SEND_B1`` sends the input gradient of microbatch 1 from
stage 3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from chunkgraph.errors import ScheduleError


class Op(Enum):
    """The operation of an action. The value is its text form."""

    F = "F"
    """Forward."""
    B = "B"
    """Whole backward: gradients of the input and of the weights."""
    I = "I"  # noqa: E741  (the name torch and the zero bubble paper use)
    """Backward, gradient of the input only."""
    W = "W"
    """Backward, gradient of the weights only."""
    SEND_F = "SEND_F"
    """Send a forward output to the next stage."""
    RECV_F = "RECV_F"
    """Receive a forward input from the previous stage."""
    SEND_B = "SEND_B"
    """Send an input gradient to the previous stage."""
    RECV_B = "RECV_B"
    """Receive an output gradient from the next stage."""

    # Members are unique; Enum hashes their names, in Python, for each of millions of lookups.
    __hash__ = object.__hash__

    @property
    def is_compute(self) -> bool:
        """Return whether the operation computes (F, B, I or W), and is no send or receive."""
        return self in _COMPUTE

    @property
    def gives_input_grad(self) -> bool:
        """Return whether the previous stage waits for the operation: B or I."""
        return self is Op.B or self is Op.I

    @property
    def ends_lifetime(self) -> bool:
        """Return whether the operation releases saved activations: B or W, but not I."""
        return self is Op.B or self is Op.W


_COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
_NUMBER = r"(\d{1,9})"
_PATTERN = re.compile(rf"{_NUMBER}(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W){_NUMBER}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One operation on one (stage, microbatch).

    Attributes:
        op: the operation.
        stage: global stage number; see `Placement`.
        microbatch: microbatch of the step, from 0.
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text form.

        Args:
            text: an action such as ``2F0``; surrounding blanks are ignored.

        Raises:
            ScheduleError: the text is not an action.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            text = text.strip()
            shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
            operations = ", ".join(op.value for op in Op)
            raise ScheduleError(
                f"{shown} is not an action: expected <stage><operation><microbatch> with "
                f"one of the operations {operations}, for example '2F0' (forward of microbatch 0 "
                "on stage 2)"
            )
        stage, op, microbatch = match.groups()
        return cls(Op(op), int(stage), int(microbatch))
