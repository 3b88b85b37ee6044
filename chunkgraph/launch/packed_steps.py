"""Steps of a pretrain script on packed sequences: read the data before the forward step does.

The ranks decide before a step whether it replays, and need its documents for that. So a step's
microbatches are read from the script's data iterators when the step begins, in the number and the
order in which the forward step reads them, and are passed to it one by one. After a step, the
microbatches of the next one are inspected below Megatron's iterators (`look_ahead`): a rerun, a
skipped step or a save finds the iterators in the same state as without chunk graphs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from chunkgraph.errors import ConfigError, PackingError
from chunkgraph.megatron.attachment import MegatronChunkGraphs
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.core.agreement import Exchange
from chunkgraph.megatron.features.packing.bank import PackedBank
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.documents import ROWS, Documents, cut, documents_of
from chunkgraph.megatron.features.packing.params import (
    ARGUMENT,
    PADDING_MASK,
    fixed_params,
    make_params,
    to_device,
)
from chunkgraph.packing import (
    PackedSequences,
    SmallestSizes,
    pack,
    schedule_contexts,
    smallest_that_fits,
)

_Value = TypeVar("_Value")

Microbatches = Sequence["deque[dict[str, Any]] | None"]
"""The microbatches of a step for each model chunk; None for a chunk that another rank reads."""
Inputs = Callable[[Any], dict[str, Any]]
"""Compute keyword arguments of the model for a microbatch from the forward step's packed-sequence
parameters; they replace the forward step's own."""


class ReadAhead:
    """An iterator whose next items can be inspected before they are read.

    An error of the underlying iterator surfaces when the item is read, not when it is inspected.
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

    def first(self, num: int) -> list[Any] | None:
        """Return the next items without consuming them; None if there are fewer."""
        while len(self._seen) < num and self._error is None:
            try:
                self._seen.append(next(self._iterator))
            except Exception as error:  # noqa: BLE001
                self._error = error
        return list(islice(self._seen, num)) if len(self._seen) >= num else None


def look_ahead(iterators: Sequence[Any], num_microbatches: int) -> Microbatches | None:
    """Return the next microbatches of each chunk's iterator without consuming them.

    Readers still get them, and Megatron can replay them if it runs a step a second time: its
    `RerunDataIterator` stores the items that it returns, and a `ReadAhead` goes below it.

    Returns:
        None if an iterator is not Megatron's, or has fewer microbatches.
    """
    kind = import_megatron("megatron.core.rerun_state_machine").RerunDataIterator
    read: list[deque[dict[str, Any]] | None] = []
    for iterator in iterators:
        if iterator is None:
            read.append(None)
            continue
        if type(iterator) is not kind:
            return None
        if not isinstance(iterator.iterable, ReadAhead):
            iterator.iterable = ReadAhead(iterator.iterable)
        batches = iterator.iterable.first(num_microbatches)
        if batches is None:
            return None
        read.append(deque(batches))
    return read


class PackedSteps(ABC):
    """Reads the microbatches of each step ahead, and passes their documents to the model's calls.

    Args:
        model_chunks: The schedule's argument ``model``.
        rank: The rank, for errors.
        tensor_ranks: Exchange of the tensor-parallel ranks, the first of which reads data; None
            without tensor parallelism.

    Attributes:
        metrics_scales: Factors that scale the routers' sums over the last training step from the
            number of microbatches that ran to the number that the script requested; see
            `scale_expert_metrics`. None if the numbers are equal.
    """

    def __init__(
        self, model_chunks: Sequence[nn.Module], rank: int, tensor_ranks: Exchange | None = None
    ) -> None:
        self.metrics_scales: tuple[float, float] | None = None
        self._rank = rank
        self._tensor_ranks = tensor_ranks
        self._inputs: Sequence[Inputs] = ()  # of the running step; empty between steps
        self._num_calls = [0] * len(model_chunks)
        # From the last schedule call; the next step most likely uses the same ones.
        self._iterators: list[Any] = []
        self._undo = ExitStack()
        for c, chunk in enumerate(model_chunks):
            hook = chunk.register_forward_pre_hook(self._hook_of(c), with_kwargs=True)
            self._undo.callback(hook.remove)
        if tensor_ranks is not None:
            self._undo.callback(tensor_ranks.close)

    @abstractmethod
    def _begin(
        self, read: Microbatches, kwargs: dict[str, Any]
    ) -> tuple[Microbatches, Sequence[Inputs], dict[str, Any]]:
        """Begin a step.

        Args:
            read: The microbatches that the forward step would read.
            kwargs: Keywords of the schedule.

        Returns:
            The microbatches for the forward step, the inputs of its calls, and keywords that
            replace the schedule's.
        """

    def announce_next(self, num_microbatches: int) -> None:  # noqa: B027 - nothing by default
        """Announce the documents of the next training step, if they are known in advance.

        All ranks must call this together, between two training steps. Documents that ranks share
        are not known: their schedule needs those of the other ranks.
        """

    def wrap(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the schedule of a training or evaluation step, already wrapped by the graphs."""

        def read_ahead(**kwargs: Any) -> Any:
            if kwargs.get("forward_only", False):
                return forward_backward(**kwargs)
            iterators = kwargs["data_iterator"]
            is_list = isinstance(iterators, (list, tuple))
            self._iterators = list(iterators) if is_list else [iterators]
            num_microbatches = kwargs["num_microbatches"]
            read = [
                None if one is None else deque([next(one) for _ in range(num_microbatches)])
                for one in self._iterators
            ]
            batches, self._inputs, keywords = self._begin(read, kwargs)
            feeds = [None if one is None else _drain(one) for one in batches]
            self.begin_run()
            try:
                result = forward_backward(
                    **{**kwargs, **keywords, "data_iterator": feeds if is_list else feeds[0]}
                )
            finally:
                self._inputs = ()
            if any(batches):  # without chunk graphs, the next step would read the rest
                raise ConfigError(
                    f"rank {self._rank}: the forward step left microbatches of its step unread. "
                    "With --cuda-graph-max-packed-seqs it reads one for each call, on every "
                    "pipeline stage, as pretrain_gpt.py does with --sft."
                )
            return result

        return read_ahead

    def begin_run(self) -> None:
        """Count microbatches from 0: the schedule is about to run a step, or to run it again."""
        self._num_calls = [0] * len(self._num_calls)

    def close(self) -> None:
        """Remove the hooks from the model, and release process groups."""
        self._undo.close()

    def _hook_of(self, c: int) -> Callable[..., Any]:
        """Return a pre-forward hook of a model chunk that replaces the script's offsets."""

        def hook(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if not self._inputs:
                return None
            number = self._num_calls[c]
            self._num_calls[c] += 1
            where = f"rank {self._rank}, microbatch {number}, chunk {c}"
            params = kwargs.get(ARGUMENT)
            if params is None:
                raise ConfigError(
                    f"{where}: the forward step calls its model without {ARGUMENT}=. With "
                    "--cuda-graph-max-packed-seqs it must pass it by name on every stage, as "
                    "pretrain_gpt.py does with --sft."
                )
            if number >= len(self._inputs):
                raise ConfigError(
                    f"{where}: the data of the step has no such microbatch. The forward step must "
                    "read one for each call of its model, in order."
                )
            return args, {**kwargs, **self._inputs[number](params)}

        return hook

    def _documents_of(
        self, read: Microbatches, seq_length: int, multiple_of: int = 1
    ) -> list[Documents] | None:
        """Return the documents of each microbatch, the same for all chunks; None if not read here.

        Raises:
            ConfigError: See `documents_of`.
        """
        batches = next((one for one in read if one is not None), None)
        if batches is None:
            return None
        return [
            documents_of(batch, seq_length, self._where(i), multiple_of)
            for i, batch in enumerate(batches)
        ]

    def _where(self, microbatch: int) -> str:
        return f"rank {self._rank}, microbatch {microbatch}"

    def _required(self, shared: _Value | None) -> _Value:
        """Return a value of the first tensor-parallel rank.

        Raises:
            ConfigError: No rank reads data.
        """
        if shared is None:
            raise ConfigError(
                f"rank {self._rank}: its stage has no data iterator. With packed sequences every "
                "stage reads where documents begin; the script's data set provider must build "
                "the data set on all stages, as pretrain_gpt.py does with --sft."
            )
        return shared


def _drain(batches: deque[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each microbatch, and keep no reference to it."""
    while batches:
        yield batches.popleft()


class OwnDocuments(PackedSteps):
    """Passes on the documents of a rank's own samples, with a fixed context-parallel size.

    Args:
        graphs: Graphs attached with ``packing``, which receive the documents of each step.
        model_chunks: See `PackedSteps`.
        rank: The rank, for errors.
        tensor_ranks: See `PackedSteps`.
    """

    def __init__(
        self,
        graphs: MegatronChunkGraphs,
        model_chunks: Sequence[nn.Module],
        rank: int,
        tensor_ranks: Exchange | None = None,
    ) -> None:
        super().__init__(model_chunks, rank, tensor_ranks)
        self._graphs = graphs
        self._seq_length = 0  # of the last step
        self._next_count: int | None = None  # microbatches of the step of `announce_next`
        self._announced: list[Documents] | None = None

    def announce_next(self, num_microbatches: int) -> None:
        """Announce the documents of the next training step; see `PackedSteps`.

        Announce nothing if the step's data cannot be inspected, end early, or are wrong; the step
        reports wrong data when it begins.
        """
        if not self._seq_length:
            return
        self._next_count = num_microbatches
        read = look_ahead(self._iterators, num_microbatches)
        documents: list[Documents] | None = None
        with suppress(ConfigError, PackingError):
            documents = None if read is None else self._own_documents(read)
        self._announced = self._shared(documents)
        if self._announced is not None:
            try:
                self._graphs.announce([d.lengths for d in self._fit(self._announced)])
            except (ConfigError, PackingError):
                self._announced = None

    def _begin(
        self, read: Microbatches, kwargs: dict[str, Any]
    ) -> tuple[Microbatches, Sequence[Inputs], dict[str, Any]]:
        """Begin a step; check its documents against the announced ones."""
        self._seq_length = kwargs["seq_length"]
        expected, self._next_count = self._next_count, None
        announced, self._announced = self._announced, None
        if expected not in (None, kwargs["num_microbatches"]):
            # The loop runs a different step than expected; all ranks run the same loop.
            self._graphs.withdraw()
            announced = None
        local = self._own_documents(read)
        if announced is None:
            documents = self._required(self._shared(local))
        elif local in (None, announced):
            documents = announced
        else:
            raise ConfigError(
                f"rank {self._rank}: the documents of the step differ from those that were "
                "announced to the other ranks. Between two steps, do not read from the data "
                "iterators and do not replace them."
            )
        fitted = self._fit(documents)
        keywords: dict[str, Any] = {"packings": [d.lengths for d in fitted]}
        for i, (whole, short) in enumerate(zip(documents, fitted, strict=True)):
            if short.num_rows == whole.num_rows:
                continue
            # Activations between stages have the length of the longest shape.
            keywords["seq_length"] = max(self._graphs.buckets)
            for batches in read:
                if batches is not None:
                    batches[i] = cut(batches[i], short.num_rows, self._where(i))
        return read, [partial(self._fixed, d) for d in fitted], keywords

    def _fixed(self, documents: Documents, params: Any) -> dict[str, Any]:
        """Pack documents into the smallest shape that holds them; without one the step is eager."""
        shape = smallest_that_fits(documents.lengths, self._graphs.packed_shapes)
        if shape is None:
            return {ARGUMENT: params}
        return {ARGUMENT: fixed_params(params, pack(documents.lengths, shape))}

    def _shared(self, documents: list[Documents] | None) -> list[Documents] | None:
        """Return the documents of the first tensor-parallel rank, as plain values in between."""
        if self._tensor_ranks is None:
            return documents
        plain = None if documents is None else [(d.offsets, d.num_needed) for d in documents]
        shared = self._tensor_ranks.share(plain)
        return None if shared is None else [Documents(*values) for values in shared]

    def _own_documents(self, read: Microbatches) -> list[Documents] | None:
        multiple = next(iter(self._graphs.buckets.values())).document_multiple
        return self._documents_of(read, self._seq_length, multiple)

    def _fit(self, documents: Sequence[Documents]) -> list[Documents]:
        """Cut each microbatch to the rows of the smallest shape that holds its needed rows.

        Keep all rows of the step if a microbatch needs more than the longest shape has.
        """
        shapes = self._graphs.buckets
        most = max(shapes)
        if any(whole.num_needed > most for whole in documents):
            return list(documents)
        fitted = []
        for whole in documents:
            rows = min(length for length in shapes if length >= whole.num_needed)
            if smallest_that_fits(whole.up_to(rows).lengths, shapes.values()) is None:
                rows = most  # too many documents: stages expect the longest shape if none fits
            fitted.append(whole if rows == whole.num_rows else whole.up_to(rows))
        return fitted


_Document = dict[str, torch.Tensor]
"""Rows of a document by the data set's name of the field."""


class SpreadDocuments(PackedSteps):
    """Schedules the documents of all ranks; a group of ranks shares each microbatch.

    Args:
        banks: Banks of this rank.
        model_chunks: See `PackedSteps`.
        rank: The rank, for errors.
        device: Device of this rank.
        data_ranks: Exchange of the data-parallel ranks; None for a single one.
        tensor_ranks: See `PackedSteps`.
        has_experts: Whether the model has experts, on any rank; the model then receives a mask of
            the padding rows, which are not routed to experts.
    """

    def __init__(  # arguments that the hooks know independently of each other
        self,
        banks: PackedBanks,
        model_chunks: Sequence[nn.Module],
        rank: int,
        *,
        device: torch.device,
        data_ranks: Exchange | None,
        tensor_ranks: Exchange | None = None,
        has_experts: bool = False,
    ) -> None:
        super().__init__(model_chunks, rank, tensor_ranks)
        assert banks.limits is not None
        assert banks.groups is not None
        self._banks, self._limits, self._groups = banks, banks.limits, banks.groups
        self._device = device
        self._data_ranks = data_ranks
        self._has_experts = has_experts
        if data_ranks is not None:
            self._undo.callback(data_ranks.close)

    def _begin(
        self, read: Microbatches, kwargs: dict[str, Any]
    ) -> tuple[Microbatches, Sequence[Inputs], dict[str, Any]]:
        """Begin a step with the schedule that all ranks compute."""
        of_ranks = self._gathered(read, kwargs["seq_length"])
        local_lengths = None if of_ranks is None else [len(d["tokens"]) for d in of_ranks]
        if self._tensor_ranks is not None:
            local_lengths = self._tensor_ranks.share(local_lengths)
        lengths = self._required(local_lengths)
        schedule = schedule_contexts(lengths, self._limits, SmallestSizes())
        banks = self._banks.of_schedule(schedule, lengths)
        if self._has_experts:
            num_requested = kwargs["num_microbatches"]
            # Fillers add nothing to the metrics.
            num_filled = schedule.mean_filled_microbatches, schedule.num_filled_rounds
            self.metrics_scales = num_requested / num_filled[0], num_requested / num_filled[1]
        share: list[dict[str, torch.Tensor]] = []
        inputs: list[Inputs] = []
        for microbatch, bank in zip(schedule.of_rank(self._groups.rank), banks, strict=True):
            # A filler forwards one token, whose loss does not count.
            packed = pack([lengths[d] for d in microbatch.documents] or [1], bank.shape)
            rows = packed.rows_of_rank(self._groups.rank % bank.size)
            is_filler = not microbatch.documents
            padding_mask = (packed.padding_mask | is_filler)[rows][None]
            inputs.append(partial(self._placed, packed, bank, padding_mask))
            if of_ranks is not None:
                filler = {name: torch.zeros_like(v[:1]) for name, v in of_ranks[0].items()}
                documents = [of_ranks[d] for d in microbatch.documents] or [filler]
                share.append(self._batch(documents, packed, rows, kwargs["seq_length"] + 1))
        keywords = {
            "contexts": banks,
            "num_microbatches": schedule.num_microbatches,
            # Activations between stages have as many rows as a rank.
            "seq_length": self._limits.max_tokens_per_rank,
        }
        # Each chunk has its own dictionaries.
        of_chunks = [None if one is None else deque(map(dict, share)) for one in read]
        return of_chunks, inputs, keywords

    def _placed(
        self, packed: PackedSequences, bank: PackedBank, padding_mask: NDArray[Any], _params: Any
    ) -> dict[str, Any]:
        params = make_params(packed, self._device)
        params.cp_group, params.local_cp_size = bank.group, bank.size
        if not self._has_experts:
            return {ARGUMENT: params}
        return {ARGUMENT: params, PADDING_MASK: to_device(padding_mask, self._device)}

    def _gathered(self, read: Microbatches, seq_length: int) -> list[_Document] | None:
        """Return the documents of all data-parallel ranks; None if another rank reads them."""
        by_batch = self._documents_of(read, seq_length)
        if by_batch is None:
            return None
        batches = next(batches for batches in read if batches is not None)
        local = [
            document
            for batch, documents in zip(batches, by_batch, strict=True)
            for document in _split(batch, documents)
        ]
        if self._data_ranks is None:
            return local
        return [document for of_rank in self._data_ranks.gather(local) for document in of_rank]

    def _batch(
        self,
        documents: Sequence[_Document],
        packed: PackedSequences,
        rows: NDArray[Any],
        width: int,
    ) -> dict[str, torch.Tensor]:
        """Return this rank's rows, as a sample of one document that fills them all."""
        offsets = np.full((1, width), len(rows), dtype=np.int32)
        offsets[0, 0] = 0
        values = {
            name: packed.place(torch.cat([d[name] for d in documents]).numpy())[rows][None]
            for name in documents[0]
        }
        values["cu_seqlens"] = offsets
        values["max_seqlen"] = np.array([len(rows)], dtype=np.int32)
        batch = {name: torch.from_numpy(value) for name, value in values.items()}
        if self._device.type == "cuda":  # as from a data loader
            batch = {name: value.pin_memory() for name, value in batch.items()}
        return batch


def _split(batch: dict[str, Any], documents: Documents) -> list[_Document]:
    """Return the documents of a sample, without rows at its end that no loss needs."""
    rows = {name: batch[name][0].numpy() for name in ROWS if batch.get(name) is not None}
    needed = documents.up_to(documents.num_needed)
    ends = np.cumsum(needed.lengths)
    return [
        {name: torch.from_numpy(values[end - length : end]) for name, values in rows.items()}
        for length, end in zip(needed.lengths, ends, strict=True)
    ]
