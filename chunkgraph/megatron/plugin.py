"""Attach chunk graphs to the model chunks of an unmodified Megatron-core model.

::

    graphs = attach(model_chunks)
    forward_backward = graphs.wrap_forward_backward(get_forward_backward_func())
    ...                               # train as before, with any number of microbatches
    graphs.detach()

An instance of a block or model gets a ``forward`` of its own; nothing of Megatron is replaced.
Megatron's own ``cuda_graph_impl`` stays ``none``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.engine.decision import StepMode
from chunkgraph.errors import ChunkGraphError, ConfigError
from chunkgraph.megatron import compat
from chunkgraph.megatron.experts import Experts, TokenDrops
from chunkgraph.megatron.moe_support import stash_refusals
from chunkgraph.megatron.overflow import OverflowGuard
from chunkgraph.megatron.receive import SlotReceiver, waits_for_sends
from chunkgraph.megatron.rewind import StepState
from chunkgraph.megatron.scope import CapturedPart, Scope, new_part, refuse_for_scope
from chunkgraph.megatron.stash import ExpertStash
from chunkgraph.megatron.step_packings import Packings, StepPackings
from chunkgraph.megatron.support import refuse_unsupported
from chunkgraph.megatron.surroundings import (
    capturing,
    following,
    fp8_state,
    predicts_tokens,
    preserving,
    running_beside,
)
from chunkgraph.megatron.tables import CachedTables
from chunkgraph.megatron.topology import Maximum, PipelinePlace, agree_by_maximum
from chunkgraph.memory.stash import StashOptions

if TYPE_CHECKING:
    from chunkgraph.engine.session import OnCapture
    from chunkgraph.graphs import GraphBackend
    from chunkgraph.packing import PackedShape

__all__ = ["MegatronChunkGraphs", "attach"]


def attach(
    model_chunks: nn.Module | Sequence[nn.Module],
    *,
    scope: Scope = "block",
    options: CaptureOptions | None = None,
    num_slots: Sequence[int] | None = None,
    zero_copy: bool = True,
    packing: PackedShape | None = None,
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
        scope: ``block`` captures the transformer blocks, ``chunk`` all of GPTModel's forward:
            embedding, output layer and the loss of each token with them.
        options: when and how to capture; default ``CaptureOptions()``.
        num_slots: slots of each chunk; default what this rank's place in the pipeline needs for
            any number of microbatches.
        zero_copy: receive from other stages straight into slots, and send input gradients from
            them, where that is safe; False copies them, with the same numbers.
        packing: the fixed shape of packed sequences, the same on every rank. Every training step is
            then told the documents of its microbatches (`MegatronChunkGraphs.wrap_forward_backward`
            says how); a step with a microbatch that does not fit runs eagerly on all ranks.
        token_drops: what is done about tokens that an expert has no room for, which Megatron drops:
            ``count`` them (`MegatronChunkGraphs.dropped_tokens`); count them and ``warn`` at the
            first, with capacity factors below 1 refused; or ``raise`` TokenDropError on all ranks
            at the end of the step's schedule, for which the host then waits; or ``rerun`` such a
            step eagerly with room for all, on all ranks, and capture anew with more room, at most
            ``stash.max_recaptures`` times (2 without ``stash``).
        stash: what experts save for the backward in pages, only rows that hold a token; measured in
            the eager steps before the capture. A step in which pages ran out is run anew eagerly:
            it must begin without gradients, and its ``forward_step_func`` keep no state of its own.
        backend: graphs to use; default by the parameters' device.
        progress: called after every captured graph with graphs captured, all graphs of this rank
            and bytes left on the device (None: unknown).

    Raises:
        ConfigError: the model uses something a chunk graph cannot hold, no block was found, or
            ``packing`` differs between ranks.
    """
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    compat.refuse_other_releases()
    if not chunks:
        raise ConfigError("attach() got no model chunk. Pass what the schedule gets as `model`.")
    config = _config_of(chunks[0])
    place = PipelinePlace.current(len(chunks), config)
    refuse_unsupported(config, chunks, _device_of(chunks[0]), token_drops)
    refuse_for_scope(config, scope)
    parts = [new_part(scope, chunk, place.label(index)) for index, chunk in enumerate(chunks)]
    tables = CachedTables(module for part in parts for module in part.modules)
    predictions = compat.TokenPrediction() if predicts_tokens(parts) else None
    fp8 = fp8_state(config, parts, _device_of(chunks[0]))
    experts: Experts | None = None
    if getattr(config, "num_moe_experts", None):
        if packing is not None:
            raise ConfigError(
                f"num_moe_experts={config.num_moe_experts} with packing: the rows behind packed "
                "documents would be routed to experts and take the room of tokens. Leave packing "
                "out."
            )
        experts = Experts(chunks, parts, token_drops, marks_padding=stash is not None)
    slots = tuple(num_slots) if num_slots is not None else place.num_slots()
    pages: ExpertStash | None = None
    if stash is not None:
        if refused := stash_refusals(config):
            raise ConfigError("Experts cannot stash in this model:\n  " + "\n  ".join(refused))
        pages = ExpertStash(chunks, slots, stash, _device_of(chunks[0]))
    agree = agree_by_maximum()
    packings = StepPackings(packing, place.rank, agree) if packing is not None else None
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
        options=options if options is not None else CaptureOptions(),
        backend=backend,
        agree=agree,
        capture_scope=lambda: capturing(tables, predictions, fp8, experts, pages),
        preserve=lambda: preserving(fp8),
        generators=compat.graph_safe_generators,
        verify_scope=lambda: running_beside(fp8, predictions, pages),
        is_told_of_misfits=packings is not None,
        progress=progress,
    )
    receiver = SlotReceiver(engine, place, config, wanted=zero_copy, lends_input_grads=lends)
    for part, call in zip(parts, receiver.calls(engine.callables), strict=True):
        part.divert_to(call)
    names = [f"stage {place.stage(c)} chunk {c}" for c in range(len(parts))]
    held = (tables,) if fp8 is None else (tables, fp8)
    graphs = MegatronChunkGraphs(
        engine, parts, slots, held, receiver, names, experts, packings, pages, agree=agree
    )
    if experts is not None and (pages is not None or experts.reruns):
        graphs.guard = OverflowGuard(
            StepState(chunks, experts.tensors),
            experts,
            pages,
            agree=agree_by_maximum(),
            release=graphs.release,
            counters=engine.counters,
            max_recaptures=(stash or StashOptions()).max_recaptures,
            rank=place.rank,
        )
    return graphs


class MegatronChunkGraphs:
    """Chunk graphs of one rank's model, made by :func:`attach`.

    Attributes:
        engine: the chunk graphs themselves.
        num_slots: slots of each chunk.
        receiver: counts what was received into slots, and says why if nothing is.
        guard: runs steps anew in which something had no room, or None.
        stash: of the experts, or None.
    """

    def __init__(
        self,
        engine: ChunkGraphs,
        parts: Sequence[CapturedPart],
        num_slots: tuple[int, ...],
        held: Sequence[CachedTables | compat.Fp8State],
        receiver: SlotReceiver,
        names: Sequence[str],
        experts: Experts | None = None,
        packings: StepPackings | None = None,
        stash: ExpertStash | None = None,
        *,
        agree: Maximum | None = None,
    ) -> None:
        self.engine = engine
        self.guard: OverflowGuard | None = None
        self.stash = stash
        self.num_slots = num_slots
        self.receiver = receiver
        self._parts = tuple(parts)
        self._held = tuple(held)
        self._names = tuple(names)
        self._experts = experts
        self._packings = packings
        self._agree = agree

    @property
    def counters(self) -> Any:
        """Captures, replays and eager fallbacks so far."""
        return self.engine.counters

    def dropped_tokens(self, *, wait: bool = False) -> dict[int, int]:
        """How often an expert had no room for a token that chose it, so far, on this rank.

        A token that found no room at two of its experts counts twice. Forwards without gradients
        are not counted.

        Args:
            wait: for the device, so that the last step is in it; by default the count is as of the
                last step whose count has arrived.

        Returns:
            Layer number, from 1, -> count; empty where there are no experts.
        """
        return self._experts.dropped_tokens(wait=wait) if self._experts is not None else {}

    def wrap_forward_backward(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what ``get_forward_backward_func()`` returned; call it with the same keywords.

        One call is one step: graphs are captured, and replay or eager is decided, at its start.

        Attached with ``packing``, it takes two more keywords for training steps: ``packings``, the
        lengths of the documents of each microbatch of this rank's data; and ``misfit``, why the
        step is not to be replayed for reasons that only the caller knows (default "": none). Both
        may be left out of a step that was announced (`announce`). The caller passes
        ``packed_seq_params`` to the model on every pipeline stage, as without chunk graphs.
        """

        def chunk_graph_forward_backward(
            *, packings: Packings | None = None, misfit: str = "", **kwargs: Any
        ) -> Any:
            told = None
            if self._packings is not None:
                if not kwargs.get("forward_only", False):
                    told = self._packings.begin(packings, misfit, kwargs["num_microbatches"])
            elif packings is not None or misfit:
                raise ConfigError(
                    "The step was given packings, but the chunk graphs know of no packing. Give "
                    "attach() the shape: attach(..., packing=PackedShape(...))."
                )
            shape_key = tuple(
                kwargs.get(name)
                for name in ("seq_length", "micro_batch_size", "decoder_seq_length")
            )

            def run(kwargs: dict[str, Any], eager: bool) -> tuple[Any, StepMode]:
                return self._run_step(forward_backward, kwargs, shape_key, told, eager=eager)

            if self.guard is None or kwargs.get("forward_only"):
                return run(kwargs, False)[0]
            return self.guard.run(run, kwargs)

        return chunk_graph_forward_backward

    def _run_step(
        self,
        forward_backward: Callable[..., Any],
        kwargs: dict[str, Any],
        shape_key: tuple[Any, ...],
        told: str | None,
        *,
        eager: bool,
    ) -> tuple[Any, StepMode]:
        """One call of the schedule: its result, and how it ran."""
        forward_only = bool(kwargs.get("forward_only", False))
        with self.engine.step(
            kwargs["num_microbatches"],
            forward_only=forward_only,
            shape_key=shape_key,
            eager=eager,
            misfit=told,
        ) as mode:
            if self._experts is not None and mode is StepMode.REPLAY:
                self._experts.begin_replays()
            with self._stashing(mode, forward_only=forward_only):
                given = self.receiver.begin_step(mode, forward_backward, kwargs)
                result = forward_backward(**given)
        if self._experts is not None and not forward_only:
            self._experts.end_step()
        return result, mode

    @contextmanager
    def _stashing(self, mode: StepMode, *, forward_only: bool) -> Iterator[None]:
        if self.stash is None or forward_only:
            yield
        elif mode is StepMode.REPLAY:
            self.stash.begin_replays()
            yield
            self.stash.end_replays()
        else:
            with self.stash.eager_step(is_captured=self.engine.report is not None):
                yield

    def announce(self, packings: Packings, misfit: str = "") -> None:
        """Say what the next training step holds, so that the ranks agree while this one runs.

        Call it during the step before, or after it. Without it they agree when the step begins,
        for which the device waits. What is announced binds: a rank whose step then turns out to be
        another one stops with an error, since the others follow what they were told. Ranks need
        not all announce, nor at the same time: one that does not is waited for.

        Args:
            packings: lengths of the documents of each microbatch of the step.
            misfit: why the step is not to be replayed whatever its packings, or "".

        Raises:
            SlotError: the next step was announced already.
            ConfigError: attached without ``packing``.
            PackingError: a microbatch without documents, or a document without tokens.
        """
        if self._packings is None:
            raise ConfigError("Steps are announced to chunk graphs attached with `packing`.")
        self.engine.announce(self._packings.announced(packings, misfit))

    def name_replays(self) -> None:
        """Name every replay in profiles by stage, chunk, action and microbatch."""
        self.engine.name_replays(self._names)

    def release(self) -> None:
        """Drop graphs and their memory; the model stays attached, eager until captured again."""
        self.engine.release()
        if self.stash is not None:
            self.stash.release()
        for memory in self._held:
            memory.release()

    def detach(self) -> None:
        """Release the graphs and give every module its own forward back.

        Whatever goes wrong in one of the two, the other is done. Detaching again does nothing.
        """
        with ExitStack() as stack:  # from the last to the first
            if self._agree is not None:
                stack.callback(self._agree.close)
            if self.guard is not None:
                stack.callback(self.guard.close)
            if self._experts is not None:
                stack.callback(self._experts.detach)
            if self.stash is not None:
                stack.callback(self.stash.detach)
            for part in self._parts:
                stack.callback(part.restore)
            stack.callback(self.release)


def _config_of(chunk: nn.Module) -> Any:
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
