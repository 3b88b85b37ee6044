"""Chunk graphs in slime's Megatron actor; see docs/rl.md."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from chunkgraph.engine import CaptureOptions
from chunkgraph.integrations.attached import AttachedModels, Keywords, Packing, refuse

_BACKEND = "slime.backends.megatron_utils"


def install(args: Any, packing: Packing, options: CaptureOptions | None = None) -> AttachedModels:
    """Let the models of this process replay graphs, which sleep when slime pauses its memory.

    Args:
        args: Slime's arguments.
        packing: See `attach`. Rows hold ``max_tokens_per_gpu`` times the context-parallel size,
            and padding up to ``data_pad_size_multiplier`` times the tensor-parallel size.
        options: See `AttachedModels`.

    Raises:
        ConfigError: Context-parallel ranks cut whole rows, or experts are replayed.
    """
    settings = {
        "--allgather-cp": args.allgather_cp,
        "--use-routing-replay": args.use_routing_replay,
    }
    refuse("slime", settings)
    multiple = args.tensor_model_parallel_size * args.data_pad_size_multiplier

    def with_packings(keywords: Keywords) -> Keywords:
        data = keywords["data_iterator"][0]
        indices = data.micro_batch_indices[data.offset :][: keywords["num_microbatches"]]
        tokens, size = data.rollout_data["tokens"], args.context_parallel_size
        packings = [_packed([len(tokens[i]) for i in own], multiple, size) for own in indices]
        return {**keywords, "packings": packings}

    # By then slime has destroyed process groups: graphs that hold them are dropped.
    offload = import_module(f"{_BACKEND}.actor").torch_memory_saver, "pause"
    steps = import_module(f"{_BACKEND}.model")
    return AttachedModels(steps, offload, with_packings, packing, options)


def _packed(lengths: list[int], multiple: int, size: int) -> list[int]:
    """Return rows of documents with these lengths in tokens, and of their padding.

    Each rank has a multiple of ``multiple`` rows; ``size`` context-parallel ranks each hold two
    pieces of a document.
    """
    own = [length if size == 1 else -(-length // (2 * size)) * 2 for length in lengths]
    return [rows * size for rows in (*own, -sum(own) % multiple) if rows]
