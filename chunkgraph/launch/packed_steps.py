"""Steps of a pretrain script on packed sequences: read the data before the forward step does.

The ranks decide before a step whether it replays, and need its documents for that. So a step's
microbatches are read from the script's data iterators when the step begins, in the number and the
order in which the forward step reads them, and are passed to it one by one. After a step, the
microbatches of the next one are inspected below Megatron's iterators (`look_ahead`): a rerun, a
skipped step or a save finds the iterators in the same state as without chunk graphs.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron, private_names
from chunkgraph.megatron.core.gloo_agreement import Share
from chunkgraph.megatron.features.packing.params import ARGUMENT
from chunkgraph.packing import check_offsets

__all__ = [
    "ROWS",
    "DocumentSource",
    "Documents",
    "Microbatches",
    "PackedSteps",
    "ReadAhead",
    "StepData",
    "Turn",
    "cut",
    "documents_of",
    "look_ahead",
    "num_microbatches_at",
]

_OFFSETS = "cu_seqlens"
ROWS = ("tokens", "labels", "loss_mask", "position_ids")
"""Fields of a sample with one value for each row."""


@dataclass(frozen=True)
class Documents:
    """The documents of a microbatch.

    Attributes:
        offsets: Beginnings of the documents, as the script computes them, and the end of the last
            one; documents may be empty.
        num_needed: Number of rows up to the last one that a loss needs; all rows if rows may not
            be cut.
    """

    offsets: tuple[int, ...]
    num_needed: int

    @property
    def num_rows(self) -> int:
        """Return the number of all rows."""
        return self.offsets[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the rows of each nonempty document."""
        steps = np.diff(self.offsets)
        return tuple(steps[steps > 0].tolist())

    def up_to(self, num_rows: int) -> Documents:
        """Return the documents of the first ``num_rows`` rows; the last one may be cut."""
        offsets = np.minimum(self.offsets, num_rows)
        return Documents(tuple(offsets[: _end(offsets, num_rows)].tolist()), self.num_needed)


def documents_of(
    batch: Mapping[str, Any],
    seq_length: int,
    where: str,
    *,
    may_be_cut: bool = False,
    multiple_of: int = 1,
) -> Documents:
    """Return the documents of a microbatch from the data set, samples end to end.

    Args:
        batch: Batch from Megatron's data iterator.
        seq_length: Rows of a sample.
        where: Rank and microbatch, for errors.
        may_be_cut: Whether to find the rows that losses need; for microbatches of one sample.
        multiple_of: Number of pieces into which context-parallel ranks cut each document.

    Raises:
        ConfigError: The batch has no offsets on the host, or documents that the ranks cannot
            share.
        PackingError: The offsets are invalid.
    """
    offsets = _on_host(batch, _OFFSETS, where)
    starts = [0]
    for row in offsets.reshape(-1, offsets.shape[-1]):
        check_offsets(row, seq_length, where, may_repeat=True)
        if row[-1] != seq_length:
            raise ConfigError(
                f"{where}: the documents of a sample end at {row[-1]}, not at its {seq_length} "
                "rows. The data set must count the padding of a sample in its last document, as "
                "Megatron's data sets do."
            )
        if multiple_of > 1 and (row % multiple_of).any():
            raise ConfigError(
                f"{where}: documents begin at {row[: _end(row, seq_length)].tolist()}, and the "
                f"context-parallel ranks cut each in {multiple_of} equal pieces. The data set must "
                "pad them, as Megatron's --sft does if GPTDatasetConfig has "
                "context_parallel_size."
            )
        starts += (row[1 : _end(row, seq_length)] + starts[-1]).tolist()
    num_needed = starts[-1]
    if may_be_cut:
        counted = np.flatnonzero(_on_host(batch, "loss_mask", where).reshape(-1))
        num_needed = int(counted[-1]) + 1 if len(counted) else 1
    return Documents(tuple(starts), num_needed)


def cut(batch: Mapping[str, Any], num_rows: int, where: str) -> dict[str, Any]:
    """Return a copy of a one-sample microbatch with only its first ``num_rows`` rows.

    Attention is causal, and no loss needs the removed rows.
    """
    offsets = np.minimum(_on_host(batch, _OFFSETS, where), num_rows)
    short = dict(batch)
    for name in ROWS:
        if short.get(name) is not None:
            short[name] = short[name][:, :num_rows].contiguous()
    short[_OFFSETS] = torch.from_numpy(offsets)
    longest = batch.get("max_seqlen")
    if isinstance(longest, torch.Tensor):
        short["max_seqlen"] = torch.full_like(longest, int(np.diff(offsets.reshape(-1)).max()))
    return short


def _end(row: NDArray[Any], num_rows: int) -> int:
    """Return the number of entries before the padding."""
    return int(np.argmax(row == num_rows)) + 1


def _on_host(batch: Mapping[str, Any], name: str, where: str) -> NDArray[Any]:
    value = batch.get(name) if isinstance(batch, Mapping) else None
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        what = "nothing" if value is None else f"a {type(value).__name__} on a device"
        raise ConfigError(
            f"{where}: the data iterator gives {what} as {name!r}. With "
            "--cuda-graph-max-packed-seqs every microbatch must contain its documents' offsets "
            "on the host, as with Megatron's --sft, on every pipeline stage."
        )
    return value.numpy()


class ReadAhead:
    """An iterator whose next items can be inspected before they are read.

    Args:
        iterator: The underlying iterator, read on demand. An error that it raises surfaces when
            the item is read, not when it is inspected.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._seen: deque[Any] = deque()
        self._error: Exception | None = None  # raised after the items in _seen

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._seen:
            return self._seen.popleft()
        if self._error is not None:
            raise self._error
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        # Forward all other public attributes to the underlying iterator.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def first(self, num: int) -> list[Any] | None:
        """Return the next items without consuming them; None if there are fewer."""
        while len(self._seen) < num and self._error is None:
            try:
                self._seen.append(next(self._iterator))
            except StopIteration:
                return None
            except Exception as error:  # noqa: BLE001
                self._error = error
        return list(islice(self._seen, num)) if len(self._seen) >= num else None


def look_ahead(iterator: Any) -> ReadAhead | None:
    """Return a look-ahead below one of Megatron's training iterators; None for other iterators.

    Readers of the iterator still get the inspected items, and Megatron can still replay them if it
    runs a step a second time: its `RerunDataIterator` stores the items that it returns, and the
    look-ahead replaces the iterator below it. An iterator that saves its position is left alone:
    the saved position would include inspected items.
    """
    kind = import_megatron("megatron.core.rerun_state_machine").RerunDataIterator
    if type(iterator) is not kind or not hasattr(iterator, "iterable"):
        return None
    wrapped = iterator.iterable
    if isinstance(wrapped, ReadAhead):
        return wrapped
    if any(hasattr(wrapped, name) for name in ("save_state", "state_dict")):
        return None
    iterator.iterable = ahead = ReadAhead(wrapped)
    return ahead


def num_microbatches_at(consumed_samples: int) -> int | None:
    """Return the number of microbatches of a step that begins after ``consumed_samples``.

    Return None if Megatron has no calculator for it. Megatron's own count does not change.
    """
    (calculator,) = private_names(
        "megatron.core.num_microbatches_calculator", "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"
    )
    if calculator is None:
        return None
    future = copy.copy(calculator)
    future.update(consumed_samples, consistency_check=False)
    return int(future.get())


Microbatches = Sequence["deque[dict[str, Any]] | None"]
"""The microbatches of a step for each model chunk; None for a chunk that another rank reads."""

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Turn:
    """A microbatch of the running step on this rank.

    Attributes:
        num_offsets: Number of offsets that the forward step computes from its data.
        inputs: Function that computes keyword arguments of the model from the forward step's
            packed-sequence parameters; they replace the forward step's own.
    """

    num_offsets: int
    inputs: Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class StepData:
    """The data and arguments that a step runs with.

    Attributes:
        batches: Data for the forward step.
        turns: The microbatches, in order.
        keywords: Additional keywords for the schedule.
        metrics_scales: Factors for metrics; see `PackedSteps`.
    """

    batches: Microbatches
    turns: Sequence[Turn]
    keywords: dict[str, Any] = field(default_factory=dict)
    metrics_scales: tuple[float, float] | None = None


class DocumentSource(ABC):
    """Determines the documents of each microbatch of a step from the samples that are read.

    Args:
        rank: The rank, for errors.
        share: Function that broadcasts a value of the first tensor-parallel rank, which reads
            data, to the others; None without tensor parallelism.
    """

    def __init__(self, rank: int, share: Share | None = None) -> None:
        self._rank = rank
        self._share = share

    @abstractmethod
    def begin(self, read: Microbatches, kwargs: dict[str, Any]) -> StepData:
        """Begin a step.

        Args:
            read: The microbatches that the forward step would read.
            kwargs: Keywords of the schedule.
        """

    @abstractmethod
    def announce_next(self, num_microbatches: int, iterators: Sequence[Any]) -> None:
        """Announce the documents of the next training step, if they are known in advance.

        All ranks must call this together, between two training steps.

        Args:
            num_microbatches: Number of microbatches of the next step.
            iterators: The data iterators of the last schedule call, one for each chunk.
        """

    def close(self) -> None:
        """Release process groups."""
        if self._share is not None:
            self._share.close()

    def _documents_of(
        self, read: Microbatches, seq_length: int, *, may_be_cut: bool, multiple_of: int = 1
    ) -> list[list[Documents]]:
        """Return the documents of each sample, for each chunk that reads."""
        return [
            [
                documents_of(
                    batch,
                    seq_length,
                    f"rank {self._rank}, microbatch {i}",
                    may_be_cut=may_be_cut,
                    multiple_of=multiple_of,
                )
                for i, batch in enumerate(batches)
            ]
            for batches in read
            if batches is not None
        ]

    def _of_chunks(self, values: Sequence[_Value]) -> _Value | None:
        """Return the value that all chunks agree on; None if another rank reads.

        Raises:
            ConfigError: The values differ.
        """
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"rank {self._rank}: the data iterators of its model chunks give different "
                "documents for the same microbatch. They must read the same samples."
            )
        return values[0] if values else None

    def _shared(self, local: _Value | None) -> _Value:
        """Return the first tensor-parallel rank's value on all tensor-parallel ranks.

        Raises:
            ConfigError: No rank reads data.
        """
        shared = self._share(local) if self._share is not None else local
        if shared is None:
            raise ConfigError(
                f"rank {self._rank}: its stage has no data iterator. With packed sequences every "
                "stage reads where documents begin; the script's data set provider must build "
                "the data set on all stages, as pretrain_gpt.py does with --sft."
            )
        return shared


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
