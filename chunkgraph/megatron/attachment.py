"""Attach chunk graphs to the model chunks of an unmodified Megatron-core model.

::

    graphs = attach(model_chunks)
    forward_backward = graphs.wrap_forward_backward(get_forward_backward_func())
    ...                               # train as before, with any number of microbatches
    graphs.detach()                   # before process groups end

An instance of a block or model gets a ``forward`` of its own; nothing of Megatron is replaced.
Megatron's own ``cuda_graph_impl`` stays ``none``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from chunkgraph.engine import Banks, CaptureOptions, ChunkGraphs, Host
from chunkgraph.engine.defaults import check_counts
from chunkgraph.errors import ChunkGraphError, ConfigError
from chunkgraph.megatron.attach_checks import refuse_for_attach
from chunkgraph.megatron.attached import MegatronChunkGraphs
from chunkgraph.megatron.captured_part import Scope, new_part
from chunkgraph.megatron.core.access import refuse_other_releases
from chunkgraph.megatron.core.cached_tables import CachedTables
from chunkgraph.megatron.core.collectives import agree_by_maximum
from chunkgraph.megatron.core.gloo_agreement import Maximum
from chunkgraph.megatron.core.random_state import graph_safe_generators
from chunkgraph.megatron.features.contexts import ContextBanks, StepContexts
from chunkgraph.megatron.features.contexts.groups import HeldGroups, capturing_banks
from chunkgraph.megatron.features.experts.feature import Experts, TokenDrops
from chunkgraph.megatron.features.experts.refusals import idle_settings
from chunkgraph.megatron.features.packing.attention_limits import needs_tokens_in_pieces
from chunkgraph.megatron.features.packing.banks import Buckets
from chunkgraph.megatron.features.packing.offset_cutter import OffsetCutter
from chunkgraph.megatron.features.packing.steps import StepPackings
from chunkgraph.megatron.features.prediction.feature import TokenPrediction
from chunkgraph.megatron.features.rerun.guard import OverflowGuard
from chunkgraph.megatron.features.rerun.rewind import StepState
from chunkgraph.megatron.features.stash.feature import ExpertStash
from chunkgraph.megatron.module_hooks import refuse_hooks
from chunkgraph.megatron.receive import SlotReceiver, waits_for_sends
from chunkgraph.megatron.scope_choice import choose_scope
from chunkgraph.megatron.surroundings import (
    capturing,
    following,
    fp8_state,
    predicts_tokens,
    preserving,
    running_beside,
)
from chunkgraph.megatron.topology import PipelinePlace
from chunkgraph.memory.stash import StashOptions
from chunkgraph.packing.seq_counts import default_seq_buckets

if TYPE_CHECKING:
    from chunkgraph.engine.options import OnCapture
    from chunkgraph.graphs import GraphBackend
    from chunkgraph.packing import PackedShape

__all__ = ["MegatronChunkGraphs", "attach", "config_of"]

_log = logging.getLogger(__name__)


def attach(
    model_chunks: nn.Module | Sequence[nn.Module],
    *,
    scope: Scope = "auto",
    options: CaptureOptions | None = None,
    num_slots: Sequence[int] | None = None,
    zero_copy: bool = True,
    packing: PackedShape | None = None,
    buckets: Sequence[float] = (),
    seq_buckets: Sequence[int] | None = None,
    fills_rows: bool = False,
    contexts: ContextBanks | None = None,
    token_drops: TokenDrops = "warn",
    stash: StashOptions | None = None,
    backend: GraphBackend | None = None,
    progress: OnCapture | None = None,
) -> MegatronChunkGraphs:
    """Give every one of ``model_chunks`` chunk graphs.

    Call it on every rank, after DDP has wrapped the model and a checkpoint is loaded; the model
    parallel groups must be set up. Blocks are recognised by their attributes, so any module with
    ``layers``, ``input_tensor``, ``set_input_tensor`` and ``pre_process`` is one.

    Args:
        model_chunks: what is given to the schedule as ``model``.
        scope: ``block`` captures the transformer blocks (of a hybrid model: its stacks), ``chunk``
            all of the model's forward: embedding, output layer and the loss of each token with
            them; ``auto`` as much of that as can be captured (`MegatronChunkGraphs.scope`).
        options: when and how to capture; default ``CaptureOptions()``.
        num_slots: slots of each chunk; default what this rank's place in the pipeline needs for
            any number of microbatches.
        zero_copy: receive from other stages straight into slots, and send input gradients from
            them, where that is safe; False copies them, with the same numbers.
        packing: the fixed shape of packed sequences, the same on every rank. Every training step is
            then told all documents of its microbatches (`MegatronChunkGraphs.wrap_forward_backward`
            says how); a step with a microbatch that does not fit runs eagerly on all ranks.
        buckets: shorter lengths than that of ``packing`` that are captured too, as parts of it or
            in tokens, the same on every rank. A microbatch is then given the rows of the smallest
            that holds it (`MegatronChunkGraphs.buckets`), in eager steps too.
        seq_buckets: fewer sequences than those of ``packing`` that are captured too, the same on
            every rank; for every length. A microbatch replays the graphs of the fewest that hold
            its documents: its offsets may be made for these (`MegatronChunkGraphs.packed_shapes`),
            or for all, and are then cut, in eager training steps too. None: by
            `default_seq_buckets`. Of ``contexts`` it is `ContextBanks` that is given them.
        fills_rows: with ``packing``, whether documents fill all rows of every microbatch, as
            Megatron's data sets make them. Experts then take every row, as they do without chunk
            graphs; a step that fits and has rows left over is an error (of one that does not fit,
            and runs eagerly, the rows are the caller's). Otherwise rows behind the documents are
            kept from experts (`keep_padding_from_experts`), and the model takes ``padding_mask``.
        contexts: the banks of context-parallel sizes, where each microbatch of packed sequences has
            one of its own; not with ``packing``. Every training step is then told the bank of each
            microbatch, and its ``packed_seq_params`` say ``cp_group`` and ``local_cp_size``. The
            model is built with a static context-parallel size of 1, and `contexts.follow_groups`
            tells its attention. A step with a size that is not captured runs eagerly on all ranks.
        token_drops: what is done about tokens that an expert has no room for, which Megatron drops:
            ``count`` them (`MegatronChunkGraphs.dropped_tokens`); count them and ``warn`` at the
            first, with capacity factors below 1 refused; or ``raise`` TokenDropError on all ranks
            at the end of the step's schedule, for which the host then waits; or ``rerun`` such a
            step eagerly with room for all, on all ranks, and capture anew with more room, at most
            ``stash.max_recaptures`` times (2 without ``stash``). With DeepEP and a
            budget of each rank only ``raise`` and ``rerun``: it tells no more than that a rank was
            over its budget.
        stash: what experts save for the backward in pages, only rows that hold a token; measured in
            the eager steps before the capture. A step in which pages ran out is run anew eagerly:
            it must begin without gradients, and its ``forward_step_func`` keep no state of its own.
        backend: graphs to use; default by the parameters' device.
        progress: called after every captured graph with graphs captured, all graphs of this rank
            and bytes left on the device (None: unknown).

    Raises:
        ConfigError: the model uses something a chunk graph cannot hold, no block was found, or
            ``packing`` differs between ranks.
        PackingError: there are no lengths such as ``buckets`` asks for.
        MissingDependencyError: the model dispatches through DeepEP, and something that a graph
            of it needs is not there.
    """
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    refuse_other_releases()
    if not chunks:
        raise ConfigError("attach() got no model chunk. Pass what the schedule gets as `model`.")
    config = config_of(chunks[0])
    place = PipelinePlace.current(len(chunks), config)
    device = _device_of(chunks[0])
    options = options if options is not None else CaptureOptions()
    if seq_buckets is None:
        seq_buckets = (
            ()
            if packing is None
            else default_seq_buckets(
                packing.max_packed_seqs,
                packing.max_packed_tokens,
                packing.context_parallel_size,
                buckets,
            )
        )
    refuse_for_attach(
        chunks,
        config,
        place,
        device,
        scope=scope,
        options=options,
        packing=packing,
        buckets=buckets,
        seq_buckets=seq_buckets,
        fills_rows=fills_rows,
        contexts=contexts,
        token_drops=token_drops,
        stash=stash,
    )
    for idle in idle_settings(config) if place.rank == 0 else ():
        _log.warning("%s.", idle)
    is_packed = packing is not None or contexts is not None
    with ExitStack() as undo:
        agree = _agree(undo)
        chosen = choose_scope(scope, config, chunks, is_packed=is_packed, agree=agree)
        parts = [
            new_part(chosen.scope, chunk, place.label(index)) for index, chunk in enumerate(chunks)
        ]
        for part in parts:
            refuse_hooks(part.inner_modules, part.label)
        tables = CachedTables(module for part in parts for module in part.modules)
        predictions = TokenPrediction() if predicts_tokens(parts) else None
        fp8 = fp8_state(config, parts, device)
        slots = (
            tuple(num_slots)
            if num_slots is not None
            else place.num_slots(are_shared=options.shared_slots)
        )
        held_groups = None
        if contexts is not None:
            held_groups = HeldGroups([part.module for part in parts])
            slots = contexts.limits.num_slots(slots)
        check_counts(len(parts), slots)
        packed_buckets: Buckets | None = None
        if packing is not None:
            packed_buckets = Buckets.of_model(packing, buckets, seq_buckets, config)
        # From here on the model's own objects are changed; what follows may fail.
        experts: Experts | None = None
        if getattr(config, "num_moe_experts", None):
            experts = Experts(
                chunks,
                parts,
                token_drops,
                config,
                keeps_padding=is_packed and not fills_rows,
                marks_padding=stash is not None,
            )
            undo.callback(experts.detach)
        pages: ExpertStash | None = None
        if stash is not None:
            pages = ExpertStash(
                chunks,
                slots,
                stash,
                device,
                # Shared whether slots are or not. Of slots that were given, any may be used.
                most_in_flight=place.num_slots(are_shared=True)[0] if num_slots is None else None,
                are_shared=options.shared_slots,
            )
            undo.callback(pages.detach)
        packings: StepPackings | None = None
        if packed_buckets is not None:
            packings = StepPackings(
                packed_buckets,
                place.rank,
                agree,
                needs_buckets=experts is not None
                and (getattr(config, "expert_model_parallel_size", 1) or 1) > 1,
                fills_rows=fills_rows,
                needs_tokens=needs_tokens_in_pieces(chunks, config),
            )
        engine_banks = Banks()
        if packings is not None:
            engine_banks = Banks(packings.buckets.banks, packings.buckets.derive)
        elif contexts is not None:
            engine_banks = Banks(contexts.keys, contexts.derive, drops_failed=True)

        class EngineHost(Host):
            @contextmanager
            def capturing(self) -> Iterator[None]:
                with ExitStack() as stack:
                    if contexts is not None:
                        assert held_groups is not None
                        stack.enter_context(
                            capturing_banks(
                                contexts.groups,
                                held_groups,
                                device,
                                are_used_before=bool(engine.num_warmup_passes),
                            )
                        )
                    stack.enter_context(capturing(tables, predictions, fp8, experts, pages))
                    yield

            def preserving(self) -> AbstractContextManager[None]:
                return preserving(fp8)

            def beside(self) -> AbstractContextManager[None]:
                return running_beside(fp8, predictions, pages)

            def generators(self) -> Sequence[torch.Generator]:
                return graph_safe_generators()

            def progress(self, num_done: int, num_graphs: int, free_bytes: int | None) -> None:
                if progress is not None:
                    progress(num_done, num_graphs, free_bytes)

        # Stage 0 sends no gradient; its input's gradient may go anywhere.
        lends = [
            zero_copy and waits_for_sends(config) and place.stage(c) > 0 for c in range(len(parts))
        ]
        engine = ChunkGraphs(
            [
                replace(
                    following(c, part, predictions, fp8, experts, pages),
                    keeps_input_grads=not lends[c],
                )
                for c, part in enumerate(parts)
            ],
            slots,
            options=options,
            backend=backend,
            agree=agree,
            host=EngineHost(),
            takes_misfits=packings is not None or contexts is not None,
            banks=engine_banks,
        )
        if contexts is not None:
            contexts.groups.hold(engine)
        receiver = SlotReceiver(
            engine,
            place,
            config,
            wanted=zero_copy,
            lends_input_grads=lends,
            device=device,
        )
        cutter: OffsetCutter | None = None
        banks = packed_buckets if contexts is None else contexts
        if banks is not None and banks.has_fewer_sequences:
            cutter = OffsetCutter(
                banks,
                receiver.call,
                [part.label for part in parts],
                # In what comes before a capture: neither in replays nor in training without any.
                may_wait=lambda: engine.report is None and engine.failure is None,
            )
        call = receiver.call if cutter is None else cutter.call
        for c, part in enumerate(parts):
            undo.callback(part.restore)
            part.divert_to(partial(call, c), may_hold_padding=not fills_rows)
        names = [f"stage {place.stage(c)} chunk {c}" for c in range(len(parts))]
        held = (tables,) if fp8 is None else (tables, fp8)
        graphs = MegatronChunkGraphs(
            engine,
            parts,
            chosen,
            slots,
            held,
            receiver,
            names,
            experts,
            packings,
            pages,
            contexts=None
            if contexts is None
            else StepContexts(contexts, engine.misfit_of, place.rank, agree),
            held_groups=held_groups,
            cutter=cutter,
            agree=agree,
            # Not the engine's: it asks ahead of steps, on some ranks earlier than on others.
            agree_on_buckets=_agree(undo) if packings is not None and buckets else None,
        )
        undo.callback(graphs.detach)
        if experts is not None:
            engine.watch_memory(
                experts.is_memory_replaced, partial(_release_replaced, graphs, place)
            )
        if experts is not None and (pages is not None or experts.reruns):
            graphs.guard = OverflowGuard(
                StepState(chunks, experts.tensors),
                experts,
                pages,
                agree=_agree(undo),
                release=graphs.release,
                has_graphs=lambda: engine.report is not None,
                counters=engine.counters,
                max_recaptures=(stash or StashOptions()).max_recaptures,
                rank=place.rank,
            )
        undo.pop_all()
    return graphs


def _agree(undo: ExitStack) -> Maximum | None:
    """`agree_by_maximum`, whose process group ends if the rest fails."""
    agree = agree_by_maximum()
    if agree is not None:
        undo.callback(agree.close)
    return agree


def _release_replaced(graphs: MegatronChunkGraphs, place: PipelinePlace) -> None:
    _log.warning(
        "rank %d: memory that graphs work in was replaced on some rank (DeepEP's buffer, by a pass "
        "with more tokens); this step runs eagerly, and graphs are captured anew.",
        place.rank,
    )
    graphs.release()


def config_of(chunk: nn.Module) -> Any:
    """Megatron's TransformerConfig of a model chunk, through its wrappers.

    Raises:
        ConfigError: it has none.
    """
    module: Any = chunk
    while isinstance(module, nn.Module):
        if getattr(module, "config", None) is not None:
            return module.config
        module = getattr(module, "module", None)
    raise ConfigError(
        f"{type(chunk).__name__} has no config: it is not a Megatron-core model. For other models "
        "use chunkgraph.ChunkGraphs itself."
    )


def _device_of(chunk: nn.Module) -> torch.device:
    parameter = next(chunk.parameters(), None)
    if parameter is None:
        raise ChunkGraphError(f"{type(chunk).__name__} has no parameters; nothing to capture.")
    return parameter.device
