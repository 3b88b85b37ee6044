"""Steps of a pretrain script on packed sequences: what its forward step reads is read before.

The ranks decide before a step whether it replays, for which they need its documents. So a step's
microbatches are taken from the script's data iterators when the step begins, as many and in the
order in which the forward step reads them, and handed to it one by one. Those of the next step are
looked at, once a step is over, below what Megatron reads from (`look_ahead`): a rerun, a
skipped step or a save finds the iterators as they are without chunk graphs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.launch.document_source import DocumentSource, Microbatches, Turn
from chunkgraph.megatron.features.packing.params import ARGUMENT

__all__ = ["PackedSteps"]


class PackedSteps:
    """Reads the microbatches of each step ahead, and tells every call of the model its documents.

    Args:
        source: settles the documents of each microbatch.
        model_chunks: what the schedule is given as ``model``.
        rank: named in errors.

    Attributes:
        source: see above.
        metrics_scales: factors that make what routers added up over the last training step's
            microbatches that of as many as the script asked for; see `scale_expert_metrics`. None:
            these are what ran.
    """

    def __init__(
        self, source: DocumentSource, model_chunks: Sequence[nn.Module], rank: int
    ) -> None:
        self.source = source
        self.metrics_scales: tuple[float, float] | None = None
        self._rank = rank
        self._turns: Sequence[Turn] = ()  # of the step that runs; none between steps
        self._num_calls = [0] * len(model_chunks)
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
            data = self.source.begin(read, kwargs)
            self.metrics_scales = data.metrics_scales
            handed = [
                None if batches is None else _Handed(batches, self._rank) for batches in data.handed
            ]
            kwargs.update(data.keywords)
            kwargs["data_iterator"] = handed if isinstance(iterators, (list, tuple)) else handed[0]
            with self._running(data.turns):
                result = forward_backward(**kwargs)
            for left in handed:
                if left is not None:
                    left.refuse_rest()
            return result

        return read_ahead

    def begin_run(self) -> None:
        """Count microbatches from 0: the schedule is about to run a step, or to run it anew."""
        self._num_calls = [0] * len(self._num_calls)

    def announce_next(self, num_microbatches: int) -> None:
        """Announce the training step that comes next; see `DocumentSource.announce_next`."""
        self.source.announce_next(num_microbatches, self._iterators)

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        self.source.close()

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

    # -- the model -----------------------------------------------------------------------------

    @contextmanager
    def _running(self, turns: Sequence[Turn]) -> Iterator[None]:
        self._turns = turns
        self.begin_run()
        try:
            yield
        finally:
            self._turns = ()

    def _hook_of(self, c: int) -> Callable[..., Any]:
        """Run before a model chunk; replaces offsets of the script."""

        def hook(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if not self._turns:
                return None
            number = self._num_calls[c]
            where = f"rank {self._rank}, microbatch {number}, chunk {c}"
            if number == len(self._turns):
                raise ConfigError(f"{where}: the forward step calls its model more than once.")
            self._num_calls[c] += 1
            turn, params = self._turns[number], kwargs.get(ARGUMENT)
            if params is None:
                raise ConfigError(
                    f"{where}: the forward step calls its model without {ARGUMENT}=. With "
                    "--cuda-graph-max-packed-seqs it gives them by name on every stage, as "
                    "pretrain_gpt.py does with --sft."
                )
            if params.cu_seqlens_q.numel() != turn.num_offsets:
                raise ConfigError(
                    f"{where}: the forward step made {params.cu_seqlens_q.numel()} offsets of a "
                    f"microbatch whose data have {turn.num_offsets}. It has to read one "
                    "microbatch for each call, in their order, and to leave their documents alone."
                )
            return args, {**kwargs, **turn.inputs(params)}

        return hook


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
