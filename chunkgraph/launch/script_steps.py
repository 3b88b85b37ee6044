"""Steps of a pretrain script on packed sequences: what its forward step reads is read before.

The ranks decide before a step whether it replays, for which they need its documents. So a step's
microbatches are taken from the script's data iterators when the step begins, as many and in the
order in which the forward step reads them, and handed to it one by one. Those of the next step are
looked at, once a step is over, below what Megatron reads from (`look_ahead`): a rerun, a
skipped step or a save finds the iterators as they are without chunk graphs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.gloo_agreement import Share
from chunkgraph.megatron.features.packing.params import ARGUMENT

__all__ = ["Microbatches", "ScriptSteps"]

Microbatches = Sequence["deque[dict[str, Any]] | None"]
"""Of each model chunk those of a step; None where another rank reads them."""


_Found = TypeVar("_Found")


class ScriptSteps(ABC):
    """Reads the microbatches of each step ahead, and tells every call of the model its documents.

    Args:
        model_chunks: what the schedule is given as ``model``.
        rank: named in errors.
        share: gives a value of the first tensor-parallel rank, which reads data, to all of them;
            None where there is one.

    Attributes:
        metrics_scales: factors that make what routers added up over the last training step's
            microbatches that of as many as the script asked for; see `scale_expert_metrics`. None:
            these are what ran.
    """

    def __init__(
        self, model_chunks: Sequence[nn.Module], rank: int, share: Share | None = None
    ) -> None:
        self._rank = rank
        self._share = share
        self.metrics_scales: tuple[float, float] | None = None
        self._num_calls = 0  # of each chunk in the step that runs; 0 between steps
        self._turns = [0] * len(model_chunks)
        # What the schedule was given last: those of the next step, most likely.
        self._iterators: list[Any] = []
        self._hooks = [
            chunk.register_forward_pre_hook(self._hook_of(c), with_kwargs=True)
            for c, chunk in enumerate(model_chunks)
        ]

    def wrap(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """A step of training or evaluation; ``forward_backward`` is that of the graphs."""

        def read_ahead(**kwargs: Any) -> Any:
            if kwargs.get("forward_only", False):
                return forward_backward(**kwargs)
            iterators = kwargs["data_iterator"]
            several = list(iterators) if isinstance(iterators, (list, tuple)) else [iterators]
            self._iterators = several
            read = self._read(several, kwargs["num_microbatches"])
            read, changes = self._begin(read, kwargs)
            handed = [None if batches is None else _Handed(batches, self._rank) for batches in read]
            kwargs.update(changes)
            kwargs["data_iterator"] = handed if isinstance(iterators, (list, tuple)) else handed[0]
            with self._running(kwargs["num_microbatches"]):
                result = forward_backward(**kwargs)
            for left in handed:
                if left is not None:
                    left.refuse_rest()
            return result

        return read_ahead

    def begin_run(self) -> None:
        """Count microbatches from 0: the schedule is about to run a step, or to run it anew."""
        self._turns = [0] * len(self._turns)

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        if self._share is not None:
            self._share.close()

    # -- of each kind --------------------------------------------------------------------------

    @abstractmethod
    def announce_next(self, num_microbatches: int) -> None:
        """Say what the training step that comes next holds, where that is known before it.

        Called between two of them, on all ranks together.

        Args:
            num_microbatches: of that step.
        """

    @abstractmethod
    def _begin(
        self, read: Microbatches, kwargs: dict[str, Any]
    ) -> tuple[Microbatches, dict[str, Any]]:
        """Begin a step.

        Args:
            read: what its forward step would read.
            kwargs: what the schedule is called with.

        Returns:
            What the forward step is handed, and what the schedule is called with besides.
        """

    @abstractmethod
    def _params(self, turn: int, given: Any, where: str) -> Any:
        """Megatron's parameters of a microbatch of the step, where the script made ``given``."""

    def _besides(self, _turn: int) -> dict[str, Any]:
        """What else the model is called with for a microbatch, in the script's place."""
        return {}

    # -- reading -------------------------------------------------------------------------------

    def _read(self, iterators: Sequence[Any], num_microbatches: int) -> Microbatches:
        """The step's microbatches of each chunk."""
        given = [iterator for iterator in iterators if iterator is not None]
        if len({id(iterator) for iterator in given}) < len(given):
            raise ConfigError(
                f"rank {self._rank}: several model chunks read from one data iterator, so that the "
                "documents of a microbatch are not known before the step. Give each chunk an "
                "iterator of its own, as Megatron does, or leave out --cuda-graph-max-packed-seqs."
            )

        def take(iterator: Any) -> deque[dict[str, Any]]:
            batches: deque[dict[str, Any]] = deque()
            while len(batches) < num_microbatches:
                batches.append(next(iterator))
            return batches

        return [None if iterator is None else take(iterator) for iterator in iterators]

    def _of_chunks(self, found: Sequence[_Found]) -> _Found | None:
        """What all chunks of this rank found in their data; None where another rank reads.

        Raises:
            ConfigError: they differ.
        """
        if any(documents != found[0] for documents in found):
            raise ConfigError(
                f"rank {self._rank}: the data iterators of its model chunks give other documents "
                "for the same microbatch. They have to read the same samples."
            )
        return found[0] if found else None

    def _shared(self, own: _Found | None) -> _Found:
        """What the first tensor-parallel rank knows, on all of them.

        Raises:
            ConfigError: nobody reads.
        """
        shared = self._share(own) if self._share is not None else own
        if shared is None:
            raise ConfigError(
                f"rank {self._rank}: its stage has no data iterator. With packed sequences every "
                "stage reads where documents begin; the script's data set provider has to build "
                "the data set on all of them, as pretrain_gpt.py does with --sft."
            )
        return shared

    # -- the model -----------------------------------------------------------------------------

    @contextmanager
    def _running(self, num_microbatches: int) -> Iterator[None]:
        self._num_calls = num_microbatches
        self._turns = [0] * len(self._turns)
        try:
            yield
        finally:
            self._num_calls = 0

    def _hook_of(self, c: int) -> Callable[..., Any]:
        """Run before a model chunk; puts other offsets in the place of the script's."""

        def hook(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if not self._num_calls:
                return None
            turn = self._turns[c]
            where = f"{self._where(turn)}, chunk {c}"
            if turn == self._num_calls:
                raise ConfigError(f"{where}: the forward step calls its model more than once.")
            self._turns[c] += 1
            params = kwargs.get(ARGUMENT)
            if params is None:
                raise ConfigError(
                    f"{where}: the forward step calls its model without {ARGUMENT}=. With "
                    "--cuda-graph-max-packed-seqs it gives them by name on every stage, as "
                    "pretrain_gpt.py does with --sft."
                )
            told = {ARGUMENT: self._params(turn, params, where), **self._besides(turn)}
            return args, {**kwargs, **told}

        return hook

    def _where(self, microbatch: int) -> str:
        return f"rank {self._rank}, microbatch {microbatch}"


class _Handed:
    """Hands out the microbatches of a step, and keeps none that it handed out."""

    def __init__(self, batches: deque[dict[str, Any]], rank: int) -> None:
        self._batches = batches
        self._rank = rank

    def __iter__(self) -> _Handed:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self._batches:
            raise ConfigError(
                f"rank {self._rank}: the forward step reads more microbatches than the step has. "
                "With --cuda-graph-max-packed-seqs it reads one for each call."
            )
        return self._batches.popleft()

    def refuse_rest(self) -> None:
        """Complain of what was not read: without chunk graphs it would be of the next step."""
        if self._batches:
            raise ConfigError(
                f"rank {self._rank}: the forward step left {len(self._batches)} microbatches of "
                "its step unread. With --cuda-graph-max-packed-seqs it reads one for each call, on "
                "every pipeline stage, as pretrain_gpt.py does with --sft."
            )
