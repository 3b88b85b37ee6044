"""Steps of a pretrain script on packed sequences: read the data before the forward step does.

The ranks decide before a step whether it replays, and need its documents for that. So a step's
microbatches are read from the script's data iterators when the step begins, in the number and the
order in which the forward step reads them, and are passed to it one by one. After a step, the
microbatches of the next one are inspected below Megatron's iterators (`look_ahead`): a rerun, a
skipped step or a save finds the iterators in the same state as without chunk graphs.
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
    """Reads ahead the microbatches of each step, and passes their documents to the model's calls.

    Args:
        source: Source of the documents of each microbatch.
        model_chunks: The schedule's argument ``model``.
        rank: The rank, for errors.

    Attributes:
        source: See above.
        metrics_scales: Factors that scale the routers' sums over the last training step from the
            number of microbatches that ran to the number that the script requested; see
            `scale_expert_metrics`. None if the numbers are equal.
    """

    def __init__(
        self, source: DocumentSource, model_chunks: Sequence[nn.Module], rank: int
    ) -> None:
        self.source = source
        self.metrics_scales: tuple[float, float] | None = None
        self._rank = rank
        self._turns: Sequence[Turn] = ()  # of the running step; empty between steps
        self._num_calls = [0] * len(model_chunks)
        # From the last schedule call; the next step most likely uses the same ones.
        self._iterators: list[Any] = []
        self._hooks = [
            chunk.register_forward_pre_hook(self._hook_of(c), with_kwargs=True)
            for c, chunk in enumerate(model_chunks)
        ]

    def wrap(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the schedule of a training or evaluation step, already wrapped by the graphs."""

        def read_ahead(**kwargs: Any) -> Any:
            if kwargs.get("forward_only", False):
                return forward_backward(**kwargs)
            iterators = kwargs["data_iterator"]
            by_chunk = list(iterators) if isinstance(iterators, (list, tuple)) else [iterators]
            self._iterators = by_chunk
            read = self._read(by_chunk, kwargs["num_microbatches"])
            data = self.source.begin(read, kwargs)
            self.metrics_scales = data.metrics_scales
            feeds = [
                None if batches is None else _Feed(batches, self._rank) for batches in data.batches
            ]
            kwargs.update(data.keywords)
            kwargs["data_iterator"] = feeds if isinstance(iterators, (list, tuple)) else feeds[0]
            with self._running(data.turns):
                result = forward_backward(**kwargs)
            for feed in feeds:
                if feed is not None:
                    feed.refuse_rest()
            return result

        return read_ahead

    def begin_run(self) -> None:
        """Count microbatches from 0: the schedule is about to run a step, or to run it again."""
        self._num_calls = [0] * len(self._num_calls)

    def announce_next(self, num_microbatches: int) -> None:
        """Announce the next training step; see `DocumentSource.announce_next`."""
        self.source.announce_next(num_microbatches, self._iterators)

    def close(self) -> None:
        """Remove the hooks from the model, and close the source."""
        for hook in self._hooks:
            hook.remove()
        self.source.close()

    # -- reading -------------------------------------------------------------------------------

    def _read(self, iterators: Sequence[Any], num_microbatches: int) -> Microbatches:
        """Read the step's microbatches of each chunk."""
        sources = [iterator for iterator in iterators if iterator is not None]
        if len({id(iterator) for iterator in sources}) < len(sources):
            raise ConfigError(
                f"rank {self._rank}: several model chunks read from one data iterator, so the "
                "documents of a microbatch are not known before the step. Use one iterator per "
                "chunk, as Megatron does, or leave out --cuda-graph-max-packed-seqs."
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
        """Return a pre-forward hook of a model chunk that replaces the script's offsets."""

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
                    "--cuda-graph-max-packed-seqs it must pass it by name on every stage, as "
                    "pretrain_gpt.py does with --sft."
                )
            if params.cu_seqlens_q.numel() != turn.num_offsets:
                raise ConfigError(
                    f"{where}: the forward step passed {params.cu_seqlens_q.numel()} offsets, but "
                    f"the data of the microbatch has {turn.num_offsets}. It must read one "
                    "microbatch for each call, in order, and must not change their documents."
                )
            return args, {**kwargs, **turn.inputs(params)}

        return hook


class _Feed:
    """Iterates over the microbatches of a step, and drops each one when it returns it."""

    def __init__(self, batches: deque[dict[str, Any]], rank: int) -> None:
        self._batches = batches
        self._rank = rank

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self._batches:
            raise ConfigError(
                f"rank {self._rank}: the forward step reads more microbatches than the step has. "
                "With --cuda-graph-max-packed-seqs it reads one for each call."
            )
        return self._batches.popleft()

    def refuse_rest(self) -> None:
        """Refuse unread microbatches: without chunk graphs, the next step would read them."""
        if self._batches:
            raise ConfigError(
                f"rank {self._rank}: the forward step left {len(self._batches)} microbatches of "
                "its step unread. With --cuda-graph-max-packed-seqs it reads one for each call, on "
                "every pipeline stage, as pretrain_gpt.py does with --sft."
            )
