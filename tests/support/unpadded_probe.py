"""A case of `run_cases`: padded graphs against plain eager training on rows without padding.

Both have the same documents and begin every step from the same parameters. Without padding there
are as many rows as tokens and as many sequences as documents, and no separate offsets of rows.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from chunkgraph.data import Documents, read_documents
from chunkgraph.megatron.features.packing.params import make_params
from chunkgraph.packing import PackedShape, pack
from chunkgraph.trainer.batches import PackedBatches, to_device
from chunkgraph.trainer.model import zero_gradients
from chunkgraph.trainer.trained_model import TrainedModel, forward_step

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass
class _Step:
    """Parameters before a step, and its results, on the CPU."""

    parameters: Tensors
    gradients: Tensors
    losses: list[float]


def _run_step(
    model: TrainedModel, batches: Iterator[dict[str, Any]], count: int, **options: Any
) -> _Step:
    """Run a step of one chunk; return losses and gradients before the optimizer."""

    def copied(of: Callable[[Any], torch.Tensor]) -> Tensors:
        named = model.chunks[0].named_parameters()
        return {n: of(p).detach().to("cpu", copy=True) for n, p in named}

    zero_gradients(model.chunks, model.optimizer)
    before = copied(lambda p: p)
    entries = model.schedule(
        forward_step_func=forward_step,
        data_iterator=[batches],
        model=model.chunks,
        num_microbatches=count,
        seq_length=model.config.tokens_per_sequence,
        micro_batch_size=1,
        forward_only=False,
        **options,
    )
    losses = [float(entry["lm loss"]) for entry in entries]
    return _Step(before, copied(lambda p: p.main_grad), losses)


def run(config: Any, device: torch.device, case: dict[str, Any]) -> dict[str, Any]:
    """Return the largest differences over all steps, of losses and of each parameter's gradient."""
    options = case.get("transformer_options")
    # Fewer tokens than rows, so that even the longest document leaves many rows.
    num_drawn = case.get("num_drawn", config.tokens_per_sequence)
    text = read_documents(config.data.path)
    documents = Documents(text, num_tokens=num_drawn, seed=config.train.seed)
    padded = _with_graphs(config, device, options, documents)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model = TrainedModel(config, device, transformer_options=options)
    losses: list[float] = []
    gradients: dict[str, float] = {}
    num_equal_losses = 0
    for number, (count, expected) in enumerate(
        zip(config.train.num_microbatches, padded["steps"], strict=True)
    ):
        with torch.no_grad():
            for name, parameter in model.chunks[0].named_parameters():
                parameter.copy_(expected.parameters[name])
        plain = _without_padding(config, device, documents, number, count)
        result = _run_step(model, plain, count)
        assert all((result.parameters[n] == p).all() for n, p in expected.parameters.items())
        for a, b in zip(result.losses, expected.losses, strict=True):
            losses.append(abs(a - b) / abs(a))
            num_equal_losses += a.hex() == b.hex()
        for name, gradient in result.gradients.items():
            error = _relative(gradient, expected.gradients[name])
            gradients[name] = max(error, gradients.get(name, 0.0))
    return {
        "replays": padded["replays"],
        "padding": padded["padding"],
        "num_losses": len(losses),
        "num_equal_losses": num_equal_losses,
        "loss_error": max(losses),
        "gradient_errors": gradients,
    }


def _with_graphs(
    config: Any, device: torch.device, options: Any, documents: Documents
) -> dict[str, Any]:
    model = TrainedModel(config, device, transformer_options=options)
    batches = model.batches
    assert isinstance(batches, PackedBatches)
    batches.documents = documents
    graphs = model.attach_graphs()
    num_rows = config.tokens_per_sequence
    steps, padding = [], []
    try:
        for number, count in enumerate(config.train.num_microbatches):
            packings = batches.schedule_options(number, count)["packings"]
            padding += [num_rows - sum(lengths) for lengths in packings]
            steps.append(_run_step(model, batches.step(number, count), count, packings=packings))
            model.optimizer.step()
        return {"steps": steps, "replays": graphs.counters.replays, "padding": padding}
    finally:
        model.close()


def _without_padding(
    config: Any, device: torch.device, documents: Documents, step: int, count: int
) -> Iterator[dict[str, Any]]:
    """Yield the step's microbatches with as many rows as tokens."""
    for microbatch in range(count):
        row = documents.row(step, microbatch)
        # A shape always has a dummy, which has no rows here; drop it.
        packed = pack(row.lengths, PackedShape(len(row.lengths) + 1, len(row.tokens)))
        packed = dataclasses.replace(
            packed,
            cu_seqlens=packed.cu_seqlens[:-1],
            cu_seqlens_padded=packed.cu_seqlens_padded[:-1],
            max_seqlen=max(row.lengths),
        )
        has_states = config.model.hybrid_layer_pattern is not None
        params = make_params(packed, device, with_seq_idx=has_states)
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = None
        if hasattr(params, "pad_between_seqs"):
            params.pad_between_seqs = False
        values = {
            "tokens": row.tokens,
            "labels": row.labels,
            "position_ids": packed.position_ids,
            "is_counted": ~packed.padding_mask,
        }
        batch: dict[str, Any] = {n: to_device(v[None], device) for n, v in values.items()}
        yield {**batch, "packed_seq_params": params}


def _relative(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the difference relative to the norm of the expected gradient."""
    expected, actual = expected.double(), actual.double()
    length = expected.norm().item()
    apart = (actual - expected).norm().item()
    return apart / length if length else apart
