"""Documents of one row know nothing of each other, nor of what lies behind them; on any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from chunkgraph.megatron.batches import packed_shape
from chunkgraph.megatron.loop import capture_options
from chunkgraph.megatron.model import build_model
from chunkgraph.megatron.packed import make_params
from chunkgraph.megatron.plugin import attach, config_of
from chunkgraph.megatron.processes import seed_everything
from chunkgraph.packing import PackedShape, pack

Results = dict[str, torch.Tensor]


def run(config: Any, device: torch.device, case: dict[str, Any]) -> dict[str, Any]:
    """What changes in the replay of one microbatch when one document, or the tail, is another.

    Args:
        config: the run; one process.
        device: of the model.
        case: ``lengths`` of the documents, ``changed``, which of them.

    Returns:
        ``equal_losses``: by document, whether its losses stay when another text stands in the
        changed one. ``changed_gradients``: by document, how many gradients of its losses change
        then. ``poisoned``: the names of what is not the same to the last bit, or not finite, when
        attention gets NaN in the rows behind all documents. ``replays``.
    """
    seed_everything(config.train.seed, device)
    (chunk,) = build_model(config, device, transformer_options=case.get("transformer_options"))
    shape = packed_shape(config, config_of(chunk))
    assert shape is not None
    lengths, changed = case["lengths"], case["changed"]
    poison = torch.zeros((), device=device)
    _poison_tails(chunk, sum(lengths), poison)
    graphs = attach(
        [chunk],
        scope=config.capture.scope,
        options=capture_options(config),
        packing=shape,
        num_slots=[1],
    )
    ends = np.cumsum(lengths).tolist()
    rows = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]

    def step(*, other: bool = False, counted: slice | None = None) -> Results:
        batch = _batch(lengths, shape, device, rows[changed] if other else None)
        is_counted = torch.zeros(1, shape.max_packed_tokens, dtype=torch.bool, device=device)
        is_counted[0, slice(0, ends[-1]) if counted is None else counted] = True
        wrapped = graphs.wrap_forward_backward(lambda **_: _pass(chunk, batch, is_counted))
        found: Results = wrapped(num_microbatches=1, packings=[lengths])
        return found

    try:
        step()  # eager, before the capture
        before, after = step(), step(other=True)
        equal_losses = [torch.equal(before["losses"][0, r], after["losses"][0, r]) for r in rows]
        changed_gradients = [
            len(_differing(step(counted=r), step(other=True, counted=r))) for r in rows
        ]
        poison.fill_(float("nan"))
        with_poison = step()
        tail = slice(ends[-1], None)
        for found in (before, with_poison):
            found["losses"] = found["losses"].clone()
            found["losses"][0, tail] = 0.0
        return {
            "equal_losses": equal_losses,
            "changed_gradients": changed_gradients,
            "poisoned": [
                name
                for name, value in with_poison.items()
                if not (value.isfinite().all() and torch.equal(value, before[name]))
            ],
            "replays": graphs.counters.replays,
        }
    finally:
        graphs.detach()


def _poison_tails(chunk: nn.Module, num_tokens: int, poison: torch.Tensor) -> None:
    """From now on attention gets ``poison`` more in every row behind the documents."""

    def poisoned(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        mixed = []
        for t in args[:3]:  # query, key and value: [rows, heads, width]
            is_tail = torch.arange(t.size(0), device=t.device) >= num_tokens
            mixed.append(torch.where(is_tail[:, None, None], t + poison.to(t.dtype), t))
        return (*mixed, *args[3:])

    found = [m for name, m in chunk.named_modules() if name.endswith(".core_attention")]
    assert found
    for module in found:
        module.register_forward_pre_hook(poisoned)


def _batch(
    lengths: list[int], shape: PackedShape, device: torch.device, other: slice | None
) -> dict[str, Any]:
    packed = pack(lengths, shape)
    tokens = np.random.default_rng(1).integers(1, 200, packed.num_valid_tokens)
    labels = np.random.default_rng(2).integers(1, 200, packed.num_valid_tokens)
    if other is not None:
        tokens[other] += 1
        labels[other] += 1
    rows = {
        "input_ids": packed.place(tokens),
        "labels": packed.place(labels),
        "position_ids": packed.position_ids,
    }
    return {
        **{name: torch.from_numpy(values)[None].to(device) for name, values in rows.items()},
        "attention_mask": None,
        "packed_seq_params": make_params(packed, device),
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
