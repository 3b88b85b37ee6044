"""Pass parameters of packed sequences to the engine as tensors and constants."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from chunkgraph.engine import Chunk
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.captured_part import Call, CapturedPart
from chunkgraph.megatron.feature import Feature, Work
from chunkgraph.megatron.features.packing.params import (
    ARGUMENT,
    is_packed,
    join_params,
    refuse_rows_after_offsets,
    split_params,
)
from chunkgraph.megatron.features.packing.rope import forget_rope_rows, packed_rope

__all__ = ["PackedCalls"]


class PackedCalls(Feature):
    """Support for calls with ``packed_seq_params``, in any model.

    The engine receives the tensors and constants separately; the chunk reassembles them.
    """

    def call(self, part: CapturedPart, call: Call) -> Call:
        """Split the parameters of packed sequences."""
        label, predicts_tokens = part.label, part.predicts_tokens

        def with_split_params(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            packed = kwargs.pop(ARGUMENT, None)
            if packed is not None:
                if predicts_tokens:
                    raise ConfigError(
                        f"{label} predicts several tokens from packed sequences: Megatron then "
                        "reads the offsets on the host. Train without multi-token prediction, or "
                        "with scope='block'."
                    )
                kwargs |= split_params(packed, label)
            return call(args, kwargs)

        return with_split_params

    def wrap(self, part: CapturedPart, chunk: Chunk) -> Chunk:
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
    part: CapturedPart, check: Callable[..., None] | None, first: Any, *args: Any, **kwargs: Any
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
