"""Runs microbatches of packed documents through one chunk, with and without graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from chunkgraph.packing import PackedShape, pack

SHAPE = PackedShape(6, 32)
# Two microbatches each; graphs are captured with the first pair.
PACKINGS = [
    [[10, 8, 6], [32]],
    [[5, 5, 5, 5, 5], [1, 30]],
    [[1], [16, 16]],
    [[3, 1, 1, 1, 26], [31]],
]


def packed_batch(
    lengths: Sequence[int], seed: int = 1, shape: PackedShape = SHAPE, **options: Any
) -> dict[str, Any]:
    """Make a microbatch of random tokens, and a mask of the rows that count.

    Args:
        lengths: tokens of each document.
        seed: of the tokens and labels.
        shape: room of the microbatch.
        **options: of `make_params`.
    """
    from chunkgraph.megatron.features.packing.params import make_params

    packed = pack(list(lengths), shape)
    tokens = np.random.default_rng(seed).integers(1, 256, packed.num_valid_tokens)
    labels = np.random.default_rng(seed + 100).integers(1, 256, packed.num_valid_tokens)

    def row(values: Any) -> torch.Tensor:
        return torch.from_numpy(values)[None]

    return {
        "input_ids": row(packed.place(tokens)),
        "labels": row(packed.place(labels)),
        "position_ids": row(packed.position_ids),
        "attention_mask": None,
        "packed_seq_params": make_params(packed, torch.device("cpu"), **options),
        "is_counted": row(~packed.padding_mask),
    }


def run_flight(chunk: nn.Module, batches: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Run all forwards, then all backwards; return losses of rows and all gradients."""
    for parameter in chunk.parameters():
        parameter.main_grad.zero_()
    results = {}
    outputs = []
    for number, batch in enumerate(batches):
        inputs = {name: value for name, value in batch.items() if name != "is_counted"}
        output = chunk(**inputs)
        results[f"losses {number}"] = output.detach().clone()
        outputs.append(torch.where(batch["is_counted"], output, 0.0).sum())
    for output in outputs:
        output.backward()
    results.update({n: p.main_grad.clone() for n, p in chunk.named_parameters()})
    return results


def run_step(
    graphs: Any,
    chunk: nn.Module,
    packings: list[list[int]],
    shape: PackedShape = SHAPE,
    **keywords: Any,
) -> Any:
    batches = [packed_batch(lengths, seed, shape) for seed, lengths in enumerate(packings)]
    wrapped = graphs.wrap_forward_backward(lambda **_: run_flight(chunk, batches))
    return wrapped(num_microbatches=len(packings), packings=packings, **keywords)


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(a[name], b[name])]


def run_eager(
    chunk: nn.Module,
    graphs: Any,
    packings: Sequence[Sequence[int]],
    shape: PackedShape = SHAPE,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Run the same step without graphs."""
    batches = [
        packed_batch(lengths, seed, shape, **options) for seed, lengths in enumerate(packings)
    ]
    saved = [part.module.__dict__.pop("forward") for part in graphs.site.parts]
    try:
        return run_flight(chunk, batches)
    finally:
        for part, forward in zip(graphs.site.parts, saved, strict=True):
            part.module.forward = forward
