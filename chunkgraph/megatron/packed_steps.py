"""Steps of a pretrain script on packed sequences: what its forward step reads is read before.

The ranks decide before a step whether it replays, for which they need its documents. So a step's
microbatches are taken from the script's data iterators when the step begins, as many and in the
order in which the forward step reads them, and handed to it one by one. Nothing of the next step is
read: a rerun, a save or an exit finds the iterators as they are without chunk graphs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.packed import ARGUMENT, fixed_params
from chunkgraph.megatron.rank_graphs import MegatronChunkGraphs
from chunkgraph.megatron.sft_data import Documents, cut, documents_of
from chunkgraph.megatron.topology import Share
from chunkgraph.packing import PackedSequences, PackedShape, pack, smallest_that_fits

__all__ = ["PackedSteps"]


class PackedSteps:
    """Tells chunk graphs the documents of each step, and gives the model offsets of fixed shape.

    Args:
        graphs: attached with ``packing``.
        model_chunks: what the schedule is given as ``model``.
        rank: named in errors.
        share: gives a value of the first tensor-parallel rank, which reads data, to all of them;
            None where there is one.
    """

    def __init__(
        self,
        graphs: MegatronChunkGraphs,
        model_chunks: Sequence[nn.Module],
        rank: int,
        share: Share | None = None,
    ) -> None:
        self._graphs = graphs
        self._rank = rank
        self._share = share
        # Of the step that runs: its documents, packed where a shape holds them, and how many
        # microbatches each chunk has seen. Empty between steps.
        self._step: list[tuple[Documents, PackedSequences | None]] = []
        self._turns = [0] * len(model_chunks)
        self._hooks = [
            chunk.register_forward_pre_hook(self._hook_of(c), with_kwargs=True)
            for c, chunk in enumerate(model_chunks)
        ]

    def wrap(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """A step of training or evaluation; ``forward_backward`` is that of the graphs."""

        def packed_forward_backward(**kwargs: Any) -> Any:
            if kwargs.get("forward_only", False):
                return forward_backward(**kwargs)
            return self._train(forward_backward, kwargs)

        return packed_forward_backward

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        if self._share is not None:
            self._share.close()

    # -- a step --------------------------------------------------------------------------------

    def _train(self, forward_backward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        iterators = kwargs["data_iterator"]
        several = list(iterators) if isinstance(iterators, (list, tuple)) else [iterators]
        read = self._read(several, kwargs["num_microbatches"])
        shapes = self._graphs.buckets
        rows = kwargs["seq_length"] * kwargs["micro_batch_size"]
        most = next(iter(shapes))
        may_be_cut = len(shapes) > 1 or most < rows
        documents = self._documents(read, kwargs["seq_length"], may_be_cut=may_be_cut)
        if may_be_cut and all(d.num_needed <= most for d in documents):
            documents = self._cut(read, documents)
            # What stages exchange is as long as the longest of the shapes.
            kwargs = {**kwargs, "seq_length": most}
        step = [(d, _packed(d, shapes.values())) for d in documents]
        handed = [None if batches is None else _Handed(batches, self._rank) for batches in read]
        kwargs["data_iterator"] = handed if isinstance(iterators, (list, tuple)) else handed[0]
        with self._running(step):
            result = forward_backward(**kwargs, packings=[d.lengths for d in documents])
        for left in handed:
            if left is not None:
                left.refuse_rest()
        return result

    def _read(
        self, iterators: Sequence[Any], num_microbatches: int
    ) -> list[deque[dict[str, Any]] | None]:
        """The step's microbatches of each chunk; None where another rank reads them."""
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

    def _documents(
        self, read: Sequence[deque[dict[str, Any]] | None], seq_length: int, *, may_be_cut: bool
    ) -> list[Documents]:
        """The documents of each microbatch, the same for all chunks."""
        multiple = next(iter(self._graphs.buckets.values())).document_multiple
        found = [
            [
                documents_of(
                    batch,
                    seq_length,
                    self._where(i),
                    may_be_cut=may_be_cut,
                    multiple_of=multiple,
                )
                for i, batch in enumerate(batches)
            ]
            for batches in read
            if batches is not None
        ]
        if any(documents != found[0] for documents in found):
            raise ConfigError(
                f"rank {self._rank}: the data iterators of its model chunks give other documents "
                "for the same microbatch. They have to read the same samples."
            )
        own = found[0] if found else None
        shared = self._share(own) if self._share is not None else own
        if shared is None:
            raise ConfigError(
                f"rank {self._rank}: its stage has no data iterator. With packed sequences every "
                "stage reads where documents begin; the script's data set provider has to build "
                "the data set on all of them, as pretrain_gpt.py does with --sft."
            )
        return shared

    def _cut(
        self, read: Sequence[deque[dict[str, Any]] | None], documents: Sequence[Documents]
    ) -> list[Documents]:
        """Give each microbatch the rows of the smallest shape that holds those it needs."""
        made = list(documents)
        shapes = self._graphs.buckets
        most = max(shapes)
        for i, own in enumerate(documents):
            rows = min(length for length in shapes if length >= own.num_needed)
            if smallest_that_fits(own.up_to(rows).lengths, shapes.values()) is None:
                rows = most  # too many documents: as the stages expect of what does not fit
            if rows == own.num_rows:
                continue
            made[i] = own.up_to(rows)
            for batches in read:
                if batches is not None:
                    batches[i] = cut(batches[i], rows, self._where(i))
        return made

    @contextmanager
    def _running(self, step: list[tuple[Documents, PackedSequences | None]]) -> Iterator[None]:
        self._step = step
        self._turns = [0] * len(self._turns)
        try:
            yield
        finally:
            self._step = []

    # -- the model -----------------------------------------------------------------------------

    def _hook_of(self, c: int) -> Callable[..., Any]:
        """Run before a model chunk; puts offsets of fixed shape in the place of the script's."""

        def hook(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if not self._step:
                return None
            where = f"{self._where(self._turns[c])}, chunk {c}"
            if self._turns[c] == len(self._step):
                raise ConfigError(f"{where}: the forward step calls its model more than once.")
            documents, packed = self._step[self._turns[c]]
            self._turns[c] += 1
            params = kwargs.get(ARGUMENT)
            if params is None:
                raise ConfigError(
                    f"{where}: the forward step calls its model without {ARGUMENT}=. With "
                    "--cuda-graph-max-packed-seqs it gives them by name on every stage, as "
                    "pretrain_gpt.py does with --sft."
                )
            if params.cu_seqlens_q.numel() != len(documents.offsets):
                raise ConfigError(
                    f"{where}: the forward step made {params.cu_seqlens_q.numel()} offsets of a "
                    f"microbatch whose data have {len(documents.offsets)}. It has to read one "
                    "microbatch for each call, in their order, and to leave their documents alone."
                )
            if packed is None:
                return None
            return args, {**kwargs, ARGUMENT: fixed_params(params, packed)}

        return hook

    def _where(self, microbatch: int) -> str:
        return f"rank {self._rank}, microbatch {microbatch}"


def _packed(documents: Documents, shapes: Collection[PackedShape]) -> PackedSequences | None:
    """The documents in the smallest shape that holds them; None: the step is eager."""
    shape = smallest_that_fits(documents.lengths, shapes)
    return None if shape is None else pack(documents.lengths, shape)


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
