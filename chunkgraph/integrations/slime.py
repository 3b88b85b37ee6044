"""Chunk graphs in slime's Megatron actor.

A function of your own, named by ``--custom-megatron-init-path``::

    from chunkgraph.integrations import slime
    from chunkgraph.megatron import PackingOptions
    from chunkgraph.packing import PackedShape

    def init(args):
        shape = PackedShape(64, args.max_tokens_per_gpu + 128)
        slime.install(args, PackingOptions(shape, buckets=[0.25, 0.5]))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chunkgraph.errors import ConfigError
from chunkgraph.integrations.attached import AttachedModels, Keywords, call_before

if TYPE_CHECKING:
    from chunkgraph.engine import CaptureOptions
    from chunkgraph.megatron.features.packing.bank import PackingOptions
    from chunkgraph.packing import PackedShape

_BACKEND = "slime.backends.megatron_utils"


def install(
    args: Any, packing: PackedShape | PackingOptions, options: CaptureOptions | None = None
) -> AttachedModels:
    """Let the actor, critic and reference of this process replay graphs, which sleep as it does.

    Args:
        args: Slime's arguments.
        packing: See `attach`. Rows hold ``max_tokens_per_gpu`` times the context-parallel size,
            and padding up to ``data_pad_size_multiplier`` times the tensor-parallel size.
        options: See `AttachedModels`.

    Returns:
        The graphs of the model, by its first chunk.

    Raises:
        ConfigError: Context-parallel ranks cut the whole row (``allgather_cp``).
    """
    if args.allgather_cp:
        raise ConfigError(
            "Chunk graphs in slime need the documents of every context-parallel rank in the same "
            "rows. Leave --allgather-cp out, or install()."
        )
    multiple = args.tensor_model_parallel_size * args.data_pad_size_multiplier
    size = args.context_parallel_size

    def with_packings(keywords: Keywords) -> Keywords:
        data = keywords["data_iterator"]
        batches = data[0] if isinstance(data, (list, tuple)) else data
        following = batches.micro_batch_indices[batches.offset :][: keywords["num_microbatches"]]
        tokens = batches.rollout_data["tokens"]
        packings = [
            _packed([tokens[i].size(0) for i in indices], multiple, size) for indices in following
        ]
        return {**keywords, "packings": packings}

    models = AttachedModels(import_module(f"{_BACKEND}.model"), with_packings, packing, options)

    def sleep(*_: Any) -> None:
        models.sleep()

    actor = import_module(f"{_BACKEND}.actor").MegatronTrainRayActor
    call_before(actor, "sleep", sleep)
    return models


def _packed(lengths: list[int], multiple: int, size: int) -> list[int]:
    """Return the rows of the documents of a microbatch, the last of which is padding.

    Args:
        lengths: Tokens of each document.
        multiple: Each rank's rows are padded to a multiple of this number.
        size: Number of context-parallel ranks, each of which holds two pieces of a document.
    """
    own = [length if size == 1 else -(-length // (2 * size)) * 2 for length in lengths]
    padding = -sum(own) % multiple
    return [rows * size for rows in (*own, padding) if rows]
