"""A dispatch mode that sees every operator of eager code, and leaves compiled parts compiled."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OperatorMode"]


class OperatorMode(TorchDispatchMode):
    """Pass every operator inside the mode to `run_operator`, one call for a compiled part."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled parts stay compiled."""
        return True

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.run_operator(func, args, kwargs or {})

    @abstractmethod
    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` and return its result."""
