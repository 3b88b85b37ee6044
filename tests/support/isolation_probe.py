"""A case of `run_cases`: documents in one row, and rows after them, do not affect each other."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from mamba_poison import Poison
from torch import nn

from chunkgraph.megatron.attachment import attach, config_of
from chunkgraph.megatron.features.packing.params import make_params
from chunkgraph.packing import PackedShape, pack
from chunkgraph.trainer.batches import packed_shape
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import seed_everything
from chunkgraph.trainer.trained_model import capture_options

Results = dict[str, torch.Tensor]


def run(config: Any, device: torch.device, case: dict[str, Any]) -> dict[str, Any]:
    """Compare replays of a microbatch with another document, or with another tail.

    Args:
        config: configuration of the run, in one process.
        device: device of the model.
        case: ``lengths`` of the documents; ``changed``: the index of the changed one;
            ``one_state``: Mamba layers treat all rows as one document.

    Returns:
        By document, with other tokens in the changed one: ``equal_losses``: whether its losses
        stay; ``changed_gradients``: how many gradients of its losses change; ``moved_losses`` and
        ``moved_gradients``: the largest changes, as a share of the largest loss or of the
        parameter's largest gradient. ``poisoned``: the names of values that are not equal to the
        last bit, or not finite, with NaN in the rows after all documents. ``replays``: their
        number.
    """
    seed_everything(config.train.seed, device)
    (chunk,) = build_model(config, device, transformer_options=case.get("transformer_options"))
    shape = packed_shape(config, config_of(chunk))
    assert shape is not None
    lengths, changed = case["lengths"], case["changed"]
    has_states = "M" in (config.model.hybrid_layer_pattern or "")
    packed = pack(lengths, shape)
    begins = packed.cu_seqlens_padded[: len(lengths)].tolist()
    rows = [slice(begin, begin + n) for begin, n in zip(begins, lengths, strict=True)]
    end = int(packed.cu_seqlens_padded[len(lengths)])
    poison = torch.zeros((), device=device)
    _poison_tails(chunk, end, poison, has_states=has_states)
    graphs = attach(
        [chunk],
        scope=config.capture.scope,
        options=capture_options(config),
        packing=shape,
        num_slots=[1],
    )

    def step(*, other: bool = False, counted: slice | None = None) -> Results:
        batch = _batch(lengths, shape, device, changed if other else None, with_seq_idx=has_states)
        if case.get("one_state"):
            batch["packed_seq_params"].seq_idx.zero_()
        is_counted = torch.zeros(1, shape.max_packed_tokens, dtype=torch.bool, device=device)
        for own in rows if counted is None else [counted]:
            is_counted[0, own] = True
        wrapped = graphs.wrap_forward_backward(lambda **_: _pass(chunk, batch, is_counted))
        results: Results = wrapped(num_microbatches=1, packings=[lengths])
        return results

    try:
        step()  # eager, before the capture
        before, after = step()["losses"][0], step(other=True)["losses"][0]
        counted = [(step(counted=r), step(other=True, counted=r)) for r in rows]
        whole = step()
        poison.fill_(float("nan"))
        with_poison = step()
        for results in (whole, with_poison):
            results["losses"] = results["losses"].clone()
            results["losses"][0, end:] = 0.0
        return {
            "equal_losses": [torch.equal(before[r], after[r]) for r in rows],
            "changed_gradients": [len(_differing(*pair)) for pair in counted],
            "moved_losses": [_moved(before[r], after[r]) for r in rows],
            "moved_gradients": [
                max(_moved(a[name], b[name]) for name in a if name != "losses") for a, b in counted
            ],
            "poisoned": [
                name
                for name, value in with_poison.items()
                if not (value.isfinite().all() and torch.equal(value, whole[name]))
            ],
            "replays": graphs.counters.replays,
        }
    finally:
        graphs.detach()


def _poison_tails(
    chunk: nn.Module, num_rows: int, poison: torch.Tensor, *, has_states: bool
) -> None:
    """Add ``poison`` to the inputs of attention in every row after the documents.

    Mamba layers and their gradients get it instead of their values.
    """

    def poisoned(forward: Any, *args: Any, **kwargs: Any) -> Any:
        mixed = []
        for t in args[:3]:  # query, key and value: [rows, heads, width]
            is_tail = torch.arange(t.size(0), device=t.device) >= num_rows
            mixed.append(torch.where(is_tail[:, None, None], t + poison.to(t.dtype), t))
        return forward(*mixed, *args[3:], **kwargs)

    modules = [m for name, m in chunk.named_modules() if name.endswith(".core_attention")]
    assert modules or has_states
    for module in modules:
        module.forward = functools.partial(poisoned, module.forward)
    if has_states:
        Poison(chunk).value = poison


def _batch(
    lengths: list[int],
    shape: PackedShape,
    device: torch.device,
    other: int | None,
    *,
    with_seq_idx: bool,
) -> dict[str, Any]:
    packed = pack(lengths, shape)
    tokens = np.random.default_rng(1).integers(1, 200, packed.num_valid_tokens)
    labels = np.random.default_rng(2).integers(1, 200, packed.num_valid_tokens)
    if other is not None:
        end = sum(lengths[: other + 1])
        own = slice(end - lengths[other], end)
        tokens[own] += 1
        labels[own] += 1
    rows = {
        "input_ids": packed.place(tokens),
        "labels": packed.place(labels),
        "position_ids": packed.position_ids,
    }
    return {
        **{name: torch.from_numpy(values)[None].to(device) for name, values in rows.items()},
        "attention_mask": None,
        "packed_seq_params": make_params(packed, device, with_seq_idx=with_seq_idx),
    }


def _pass(chunk: nn.Module, batch: dict[str, Any], is_counted: torch.Tensor) -> Results:
    for parameter in chunk.parameters():
        parameter.main_grad.zero_()
    output = chunk(**batch)
    losses = output.detach().clone()
    torch.where(is_counted, output, 0.0).sum().backward()
    gradients = {n: p.main_grad.clone() for n, p in chunk.named_parameters()}
    return {"losses": losses, **gradients}


def _differing(a: Results, b: Results) -> list[str]:
    return [name for name in a if name != "losses" and not torch.equal(a[name], b[name])]


def _moved(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest value; 0 for unchanged zeros."""
    largest = a.abs().max().item()
    difference = (a - b).abs().max().item()
    return difference / largest if largest else difference
