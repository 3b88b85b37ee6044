"""Attach chunk graphs to the TransformerBlocks of an unmodified Megatron-core model.

::

    graphs = attach(model_chunks)
    forward_backward = graphs.wrap_forward_backward(get_forward_backward_func())
    ...                               # train as before, with any number of microbatches
    graphs.detach()

A block's instance gets a ``forward`` of its own; nothing of Megatron is replaced. Megatron's own
``cuda_graph_impl`` stays ``none``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.errors import ChunkGraphError, ConfigError
from chunkgraph.megatron import compat
from chunkgraph.megatron.support import refuse_unsupported
from chunkgraph.megatron.topology import PipelinePlace, agree_by_maximum

if TYPE_CHECKING:
    from chunkgraph.graphs import GraphBackend

__all__ = ["MegatronChunkGraphs", "attach"]

_BLOCK_ATTRIBUTES = ("layers", "set_input_tensor", "input_tensor", "pre_process")


def attach(
    model_chunks: nn.Module | Sequence[nn.Module],
    *,
    options: CaptureOptions | None = None,
    num_slots: Sequence[int] | None = None,
    backend: GraphBackend | None = None,
) -> MegatronChunkGraphs:
    """Give every transformer block of ``model_chunks`` chunk graphs.

    Call it on every rank, after DDP has wrapped the model and a checkpoint is loaded; the model
    parallel groups must be set up. Blocks are recognised by their attributes, so any module with
    ``layers``, ``input_tensor``, ``set_input_tensor`` and ``pre_process`` is one.

    Args:
        model_chunks: what is given to the schedule as ``model``.
        options: when and how to capture; default ``CaptureOptions()``.
        num_slots: slots of each chunk; default what this rank's place in the pipeline needs for
            any number of microbatches.
        backend: graphs to use; default by the parameters' device.

    Raises:
        ConfigError: the model uses something a chunk graph cannot hold, or no block was found.
    """
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    if not chunks:
        raise ConfigError("attach() got no model chunk. Pass what the schedule gets as `model`.")
    config = _config_of(chunks[0])
    place = PipelinePlace.current(len(chunks), config)
    refuse_unsupported(config, chunks, _device_of(chunks[0]))
    blocks = [_AttachedBlock(chunk, place.label(index)) for index, chunk in enumerate(chunks)]
    slots = tuple(num_slots) if num_slots is not None else place.num_slots()
    engine = ChunkGraphs(
        [block.chunk() for block in blocks],
        slots,
        options=options if options is not None else CaptureOptions(),
        backend=backend,
        agree=agree_by_maximum(),
        capture_scope=compat.capture_flag,
        preserve=compat.preserve_rng,
        generators=compat.graph_safe_generators,
    )
    for block, call in zip(blocks, engine.callables, strict=True):
        block.divert_to(call)
    return MegatronChunkGraphs(engine, blocks, slots)


class MegatronChunkGraphs:
    """Chunk graphs of one rank's model, made by :func:`attach`.

    Attributes:
        engine: the chunk graphs themselves.
        num_slots: slots of each chunk.
    """

    def __init__(
        self, engine: ChunkGraphs, blocks: Sequence[_AttachedBlock], num_slots: tuple[int, ...]
    ) -> None:
        self.engine = engine
        self.num_slots = num_slots
        self._blocks = tuple(blocks)

    @property
    def counters(self) -> Any:
        """Captures, replays and eager fallbacks so far."""
        return self.engine.counters

    def wrap_forward_backward(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what ``get_forward_backward_func()`` returned; call it with the same keywords.

        One call is one step: graphs are captured, and replay or eager is decided, at its start.
        """

        def chunk_graph_forward_backward(**kwargs: Any) -> Any:
            shape_key = tuple(
                kwargs.get(name)
                for name in ("seq_length", "micro_batch_size", "decoder_seq_length")
            )
            with self.engine.step(
                kwargs["num_microbatches"],
                forward_only=bool(kwargs.get("forward_only", False)),
                shape_key=shape_key,
            ):
                return forward_backward(**kwargs)

        return chunk_graph_forward_backward

    def release(self) -> None:
        """Drop graphs and their memory; the blocks stay attached and run eagerly until captured."""
        self.engine.release()

    def detach(self) -> None:
        """Release the graphs and give every block its own forward back."""
        self.engine.release()
        for block in self._blocks:
            block.restore()


class _AttachedBlock:
    """One transformer block, its eager forward as a chunk, and the way back."""

    def __init__(self, model_chunk: nn.Module, label: str) -> None:
        self.label = label
        self.block: Any = _find_block(model_chunk, label)
        if "forward" in self.block.__dict__:
            raise ConfigError(
                f"The transformer block of {label} has a forward of its own already; detach() what "
                "was attached before."
            )
        self.ddp = compat.unwrap_ddp(model_chunk)
        self.parameters = tuple(p for p in self.block.parameters() if p.requires_grad)
        self._eager = type(self.block).forward
        self._modules = tuple(self.block.modules())

    def chunk(self) -> Chunk:
        """What the engine captures."""
        before = after = None
        if self.ddp is not None:
            before = self._gather_parameters
            after = compat.grad_ready_signal(self.ddp, self.parameters)
        return Chunk(
            forward=self._run,
            parameters=self.parameters,
            label=self.label,
            module=self.block,
            buffers=tuple(self.block.buffers()),
            before_forward=before,
            after_backward=after,
        )

    def divert_to(self, call: Callable[..., Any]) -> None:
        """Send the block's training forwards to the engine."""
        block = self.block

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (block.training and torch.is_grad_enabled()):
                return self._eager(block, *args, **kwargs)
            hidden, *others = args or (kwargs.pop("hidden_states"),)
            if not block.pre_process:
                hidden = block.input_tensor
            return call(_unwrapped(hidden), *others, **kwargs)

        block.forward = forward

    def restore(self) -> None:
        """Give the block the forward of its class back."""
        self.block.__dict__.pop("forward", None)

    def _run(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward, from its input alone.

        Stages after the first read it from an attribute, which is put back.
        """
        block = self.block
        if block.pre_process:
            return self._eager(block, hidden_states, *args, **kwargs)
        given = block.input_tensor
        block.input_tensor = hidden_states
        try:
            return self._eager(block, hidden_states, *args, **kwargs)
        finally:
            block.input_tensor = given

    def _gather_parameters(self) -> None:
        compat.call_parameter_gather_hooks(self._modules)


def _find_block(model_chunk: nn.Module, label: str) -> nn.Module:
    blocks = [
        module
        for module in model_chunk.modules()
        if all(hasattr(module, name) for name in _BLOCK_ATTRIBUTES)
    ]
    if len(blocks) != 1:
        raise ConfigError(
            f"{label}: found {len(blocks)} transformer blocks in {type(model_chunk).__name__}, "
            f"expected one (a module with {', '.join(_BLOCK_ATTRIBUTES)}). Encoder-decoder models "
            "and other layouts are not supported."
        )
    return blocks[0]


def _unwrapped(hidden: Any) -> Any:
    """Megatron passes a one-use wrapper in inference code paths; take the tensor out of it."""
    unwrap = getattr(hidden, "unwrap", None)
    return unwrap() if callable(unwrap) else hidden


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
