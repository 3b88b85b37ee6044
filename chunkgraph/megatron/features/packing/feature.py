"""Packed sequences: a bank for each context-parallel size, length and number of sequences."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from chunkgraph.engine import Chunk
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.feature import Feature, Step, Work
from chunkgraph.megatron.features.packing.params import (
    ARGUMENT,
    is_packed,
    join_params,
    refuse_other_context,
    refuse_rows_after_offsets,
    split_params,
)
from chunkgraph.megatron.features.packing.rope import forget_rope_rows, packed_rope
from chunkgraph.megatron.features.packing.steps import StepPlans
from chunkgraph.megatron.model_part import Call, ModelPart
from chunkgraph.megatron.site import Site, new_agreement

if TYPE_CHECKING:
    from chunkgraph.engine import ChunkGraphs
    from chunkgraph.megatron.attachment import MegatronChunkGraphs
    from chunkgraph.megatron.features.packing.banks import PackedBanks


class Packing(Feature):
    """Microbatches of documents; every training step receives their lengths or banks.

    The n-th call of a chunk is microbatch n. A caller may create all offsets for the most
    sequences: entries after a microbatch's documents are empty sequences, and the microbatch
    replays graphs for fewer. Eager steps get the same cut offsets, because kernels may be chosen by
    the number of sequences. Steps before a capture check on the device that the cut loses no
    document.

    Args:
        site: The site of a model with packed shapes.

    Attributes:
        plans: The plans of this rank's steps.
    """

    plans: StepPlans

    def __init__(self, site: Site) -> None:
        banks: PackedBanks = site.feature_options["packing"]
        self._banks = banks
        self._engine: ChunkGraphs | None = None
        self._banks_of_run: Sequence[Hashable] = ()
        self._num_calls = [0] * len(site.parts)
        has_experts = bool(getattr(site.config, "num_moe_experts", None))
        self.plans = StepPlans(
            banks,
            site.place.rank,
            missing_graphs=self._missing_graphs,
            pins_rows=bool(getattr(site.config, "variable_seq_lengths", False)),
            needs_buckets=has_experts and site.shares_experts,
        )

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return whether sequences are packed, and how."""
        banks = site.feature_options["packing"]
        return {
            "packed": banks is not None,
            "changes_size": banks is not None and banks.groups is not None,
            "pads_rows": banks is not None and not banks.fills_rows,
        }

    @classmethod
    def prepare(cls, site: Site, _undo: ExitStack) -> None:
        """Refuse shapes that the model's ranks do not support."""
        banks = site.feature_options["packing"]
        if banks is not None and banks.groups is None:
            refuse_other_context(banks.largest_shape, site.config)

    @classmethod
    def of(cls, site: Site, undo: ExitStack) -> Self | None:
        """Return the feature for attachments with packed shapes."""
        if site.feature_options["packing"] is None:
            return None
        packing = cls(site)
        if packing.plans.has_lengths:
            # Not the engine's: it communicates ahead of steps, and not on all ranks at once.
            site.meet()
            packing.plans.agree_on_rows = new_agreement(undo)
        return packing

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Use the engine to check offsets only before a capture; let it know of padded rows."""
        self._engine = graphs.engine
        graphs.engine.forward_only.needs_banks |= self.plans.pins_rows

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Start counting calls at the first microbatch."""
        self._banks_of_run, self._is_training = step.plan.cut_for, step.is_training
        self._num_calls = [0] * len(self._num_calls)
        yield

    def call(self, part: ModelPart, call: Call) -> Call:
        """Cut the offsets of each microbatch to the sequences of its bank."""
        if not self._banks.has_fewer_sequences:
            return call
        cut, label, index = self._banks.with_offsets_of, part.label, part.index

        def with_cut_offsets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._is_training and not torch.is_grad_enabled():
                return call(args, kwargs)  # a pass besides those of the schedule
            number = self._num_calls[index]
            self._num_calls[index] += 1
            if number < len(self._banks_of_run):
                uncut = kwargs
                kwargs = cut(self._banks_of_run[number], uncut)
                engine = self._engine
                assert engine is not None
                may_wait = engine.report is None and engine.failure is None
                if kwargs is not uncut and may_wait:  # for the device
                    self._refuse_lost(uncut, kwargs, f"{label}, microbatch {number}")
            return call(args, kwargs)

        return with_cut_offsets

    def _refuse_lost(self, uncut: dict[str, Any], cut: dict[str, Any], where: str) -> None:
        """Refuse offsets with more documents than the step's inputs; read the device."""
        for name, offsets in cut.items():
            if not isinstance(offsets, torch.Tensor) or offsets is uncut[name]:
                continue
            num_seqs = offsets.numel() - 1
            joined = uncut[name][num_seqs - 1 :].diff()  # merged into the last sequence
            if int(joined.count_nonzero()) > 1:
                raise ConfigError(
                    f"{where}: {name} has more than the {num_seqs - 1} documents that graphs of "
                    f"{num_seqs} sequences support, although the inputs of the step listed no "
                    "more. Pass every document (packings=...), or attach with seq_buckets=()."
                )

    def _missing_graphs(self, banks: Sequence[Hashable]) -> str:
        assert self._engine is not None
        return self._engine.misfit_of(banks)


class PackedCalls(Feature):
    """Support for calls with ``packed_seq_params``, in any model.

    The engine receives the tensors and constants separately; the chunk reassembles them.
    """

    def call(self, part: ModelPart, call: Call) -> Call:  # noqa: ARG002
        """Split the parameters of packed sequences."""

        def with_split_params(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            packed = kwargs.pop(ARGUMENT, None)
            if packed is not None:
                kwargs |= split_params(packed)
            return call(args, kwargs)

        return with_split_params

    def wrap(self, part: ModelPart, chunk: Chunk) -> Chunk:
        """Reassemble the parameters, and check offsets before a capture."""
        run = chunk.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            join_params(kwargs)
            result = run(*args, **kwargs)
            if (packed := kwargs.get(ARGUMENT)) is not None:
                forget_rope_rows(packed)
            return result

        check = partial(_check_sample, part, chunk.check_sample)
        return replace(chunk, forward=forward, check_sample=check)

    def around(self, work: Work) -> AbstractContextManager[None]:
        """Compute rotary embeddings of packed rows on the device only."""
        return packed_rope() if work == "capture" else nullcontext()


def _check_sample(
    part: ModelPart, check: Callable[..., None] | None, first: Any, *args: Any, **kwargs: Any
) -> None:
    """Refuse offsets of packed sequences that do not reach the last row."""
    if check is not None:
        check(first, *args, **kwargs)
    if not is_packed(kwargs):
        return
    config = part.config
    hidden = first if isinstance(first, torch.Tensor) else kwargs.get("decoder_input")
    if hidden is None:  # token numbers, which all tensor ranks have
        rows = kwargs["input_ids"].shape[1]
    else:
        rows = hidden.shape[0]
        if getattr(config, "sequence_parallel", False):
            rows *= config.tensor_model_parallel_size
    size = getattr(config, "context_parallel_size", 1) or 1
    refuse_rows_after_offsets(kwargs, rows, size, part.label)
