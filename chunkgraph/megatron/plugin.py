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

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.engine.decision import StepMode
from chunkgraph.errors import ChunkGraphError, ConfigError
from chunkgraph.megatron import compat
from chunkgraph.megatron.buckets import Buckets
from chunkgraph.megatron.experts import Experts, TokenDrops, both
from chunkgraph.megatron.receive import SlotReceiver, waits_for_sends
from chunkgraph.megatron.scope import CapturedPart, Scope, new_part, refuse_for_scope
from chunkgraph.megatron.step_packings import Packings, StepPackings
from chunkgraph.megatron.support import refuse_unsupported
from chunkgraph.megatron.surroundings import capturing, preserving, running_beside
from chunkgraph.megatron.tables import CachedTables
from chunkgraph.megatron.topology import Maximum, PipelinePlace, agree_by_maximum
from chunkgraph.packing import bucket_shapes

if TYPE_CHECKING:
    from chunkgraph.engine.session import OnCapture
    from chunkgraph.graphs import GraphBackend
    from chunkgraph.packing import PackedShape

__all__ = ["MegatronChunkGraphs", "attach", "config_of"]


def attach(
    model_chunks: nn.Module | Sequence[nn.Module],
    *,
    scope: Scope = "block",
    options: CaptureOptions | None = None,
    num_slots: Sequence[int] | None = None,
    zero_copy: bool = True,
    packing: PackedShape | None = None,
    buckets: Sequence[float] = (),
    token_drops: TokenDrops = "warn",
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
        buckets: shorter lengths than that of ``packing`` that are captured too, as parts of it or
            in tokens, the same on every rank. A microbatch is then given the rows of the smallest
            that holds it (`MegatronChunkGraphs.buckets`), in eager steps too.
        token_drops: what is done about tokens that an expert has no room for, which Megatron drops:
            ``count`` them (`MegatronChunkGraphs.dropped_tokens`); count them and ``warn`` at the
            first, with capacity factors below 1 refused; or ``raise`` TokenDropError on all ranks
            at the end of the step's schedule, for which the host then waits.
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
    config = config_of(chunks[0])
    place = PipelinePlace.current(len(chunks), config)
    refuse_unsupported(config, chunks, _device_of(chunks[0]), token_drops)
    refuse_for_scope(config, scope)
    parts = [new_part(scope, chunk, place.label(index)) for index, chunk in enumerate(chunks)]
    tables = CachedTables(module for part in parts for module in part.modules)
    predictions = compat.TokenPrediction() if _predicts_tokens(parts) else None
    fp8 = _fp8_state(config, parts)
    experts: Experts | None = None
    if getattr(config, "num_moe_experts", None):
        experts = Experts(chunks, parts, token_drops, None if packing is None else config)
    slots = tuple(num_slots) if num_slots is not None else place.num_slots()
    agree = agree_by_maximum()
    packings: StepPackings | None = None
    if packing is not None:
        multiple = packing.context_parallel_size
        if getattr(config, "sequence_parallel", False):
            multiple *= getattr(config, "tensor_model_parallel_size", 1)
        packings = StepPackings(
            Buckets(bucket_shapes(packing, buckets, multiple_of=multiple)),
            place.rank,
            agree,
            needs_buckets=experts is not None
            and (getattr(config, "expert_model_parallel_size", 1) or 1) > 1,
        )
    if buckets and (packings is None or fp8 is not None):
        why = "with FP8, whose scales were not tried with several graphs of one slot"
        why = why if fp8 is not None else "without packing: only packed sequences have them"
        raise ConfigError(f"buckets={list(buckets)} {why}. Leave them out.")
    # Stage 0 sends no gradient; its input's gradient may go anywhere.
    lends = [
        zero_copy and waits_for_sends(config) and place.stage(c) > 0 for c in range(len(parts))
    ]
    engine = ChunkGraphs(
        [
            replace(_following(c, part, predictions, fp8, experts), keeps_input_grads=not lends[c])
            for c, part in enumerate(parts)
        ],
        slots,
        options=options if options is not None else CaptureOptions(),
        backend=backend,
        agree=agree,
        capture_scope=lambda: capturing(tables, predictions, fp8, experts),
        preserve=lambda: preserving(fp8),
        generators=compat.graph_safe_generators,
        verify_scope=lambda: running_beside(fp8, predictions),
        is_told_of_misfits=packings is not None,
        banks=(None,) if packings is None else packings.buckets.keys,
        derive_sample=None if packings is None else packings.buckets.derive,
        progress=progress,
    )
    receiver = SlotReceiver(
        engine,
        place,
        config,
        wanted=zero_copy,
        lends_input_grads=lends,
        device=_device_of(chunks[0]),
    )
    for part, call in zip(parts, receiver.calls(engine.callables), strict=True):
        part.divert_to(call)
    names = [f"stage {place.stage(c)} chunk {c}" for c in range(len(parts))]
    held = (tables,) if fp8 is None else (tables, fp8)
    others = (experts, packings)
    return MegatronChunkGraphs(engine, parts, slots, held, receiver, names, *others, agree=agree)


class MegatronChunkGraphs:
    """Chunk graphs of one rank's model, made by :func:`attach`.

    Attributes:
        engine: the chunk graphs themselves.
        num_slots: slots of each chunk.
        receiver: counts what was received into slots, and says why if nothing is.
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
        *,
        agree: Maximum | None = None,
    ) -> None:
        self.engine = engine
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

        Attached with ``packing``, it takes more keywords for training steps: ``packings``, the
        lengths of the documents of each microbatch of this rank's data; ``misfit``, why the step is
        not to be replayed for reasons that only the caller knows (default "": none); and
        ``buckets``, the rows of each microbatch where they are not those of the smallest bucket
        that holds it. With buckets, ``seq_length`` is that of the longest. All of them
        may be left out of a step that was announced (`announce`). The caller passes
        ``packed_seq_params`` to the model on every pipeline stage, as without chunk graphs.
        """

        def chunk_graph_forward_backward(
            *,
            packings: Packings | None = None,
            misfit: str = "",
            buckets: Sequence[int] | None = None,
            **kwargs: Any,
        ) -> Any:
            told = keys = None
            if self._packings is not None:
                if not kwargs.get("forward_only", False):
                    count = kwargs["num_microbatches"]
                    told = self._packings.begin(packings, misfit, count, buckets)
                    if len(self._packings.buckets.keys) > 1:
                        keys = self._packings.keys
            elif packings is not None or misfit or buckets is not None:
                raise ConfigError(
                    "The step was given packings, but the chunk graphs know of no packing. Give "
                    "attach() the shape: attach(..., packing=PackedShape(...))."
                )
            shape_key = tuple(
                kwargs.get(name)
                for name in ("seq_length", "micro_batch_size", "decoder_seq_length")
            )
            with self.engine.step(
                kwargs["num_microbatches"],
                forward_only=bool(kwargs.get("forward_only", False)),
                shape_key=shape_key,
                misfit=told,
                banks=keys,
            ) as mode:
                if self._experts is not None and mode is StepMode.REPLAY:
                    self._experts.begin_replays()
                rows = keys
                if told and buckets is None and kwargs.get("seq_length") not in self.buckets:
                    rows = None  # what fits no bucket has a length of its own: the schedule's
                given = self.receiver.begin_step(mode, forward_backward, kwargs, rows)
                result = forward_backward(**given)
            if self._experts is not None and not kwargs.get("forward_only"):
                self._experts.end_step()
            return result

        return chunk_graph_forward_backward

    @property
    def buckets(self) -> Mapping[int, PackedShape]:
        """By its rows, each shape that is captured, largest first; empty without packing."""
        return {} if self._packings is None else self._packings.buckets.shapes

    def agree_on_buckets(self, packings: Packings) -> list[int]:
        """Rows of each microbatch of a step, the same on all ranks; all of them call it together.

        For ranks that share experts, whose microbatches go through a chunk together.
        """
        if self._packings is None:
            raise ConfigError("There are buckets in chunk graphs attached with `packing`.")
        return self._packings.buckets.choose(packings, self._agree)

    def announce(
        self, packings: Packings, misfit: str = "", buckets: Sequence[int] | None = None
    ) -> None:
        """Say what the next training step holds, so that the ranks agree while this one runs.

        Call it during the step before, or after it. Without it they agree when the step begins,
        for which the device waits. What is announced binds: a rank whose step then turns out to be
        another one stops with an error, since the others follow what they were told. Ranks need
        not all announce, nor at the same time: one that does not is waited for.

        Args:
            packings: lengths of the documents of each microbatch of the step.
            misfit: why the step is not to be replayed whatever its packings, or "".
            buckets: see `wrap_forward_backward`.

        Raises:
            SlotError: the next step was announced already.
            ConfigError: attached without ``packing``.
            PackingError: a microbatch without documents, or a document without tokens.
        """
        if self._packings is None:
            raise ConfigError("Steps are announced to chunk graphs attached with `packing`.")
        self.engine.announce(self._packings.announced(packings, misfit, buckets))

    def name_replays(self) -> None:
        """Name every replay in profiles by stage, chunk, action and microbatch."""
        self.engine.name_replays(self._names)

    def release(self) -> None:
        """Drop graphs and their memory; the model stays attached, eager until captured again."""
        self.engine.release()
        for memory in self._held:
            memory.release()

    def detach(self) -> None:
        """Release the graphs and give every module its own forward back.

        Whatever goes wrong in one of the two, the other is done. Detaching again does nothing.
        """
        with ExitStack() as stack:  # from the last to the first
            if self._agree is not None:
                stack.callback(self._agree.close)
            if self._experts is not None:
                stack.callback(self._experts.detach)
            for part in self._parts:
                stack.callback(part.restore)
            stack.callback(self.release)


def _predicts_tokens(parts: Sequence[CapturedPart]) -> bool:
    return any(getattr(part.module, "mtp_process", False) for part in parts)


def _fp8_state(config: Any, parts: Sequence[CapturedPart]) -> compat.Fp8State | None:
    recipe = compat.fp8_recipe(config)
    if recipe is None:
        return None
    return compat.Fp8State(
        [part.modules for part in parts],
        [part.label for part in parts],
        _device_of(parts[0].module),
        is_delayed=recipe == "delayed",
    )


def _following(
    index: int,
    part: CapturedPart,
    predictions: compat.TokenPrediction | None,
    fp8: compat.Fp8State | None,
    experts: Experts | None,
) -> Chunk:
    """Chunk ``index``, following what Megatron and Transformer Engine keep in Python."""
    chunk = _following_megatron(part, predictions, experts)
    return chunk if fp8 is None else fp8.follow(index, chunk)


def _following_megatron(
    part: CapturedPart, predictions: compat.TokenPrediction | None, experts: Experts | None
) -> Chunk:
    """The part's chunk; it follows Megatron's state of experts and of the tokens it predicts."""
    chunk = part.chunk()
    if experts is not None:
        chunk = experts.following(part, chunk)
    if predictions is None or not getattr(part.module, "mtp_process", False):
        return chunk
    return replace(
        chunk,
        before_forward=both(chunk.before_forward, predictions.before_forward),
        before_backward=both(chunk.before_backward, predictions.before_backward),
    )


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
