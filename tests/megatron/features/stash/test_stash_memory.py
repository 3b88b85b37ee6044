"""Memory of the stash, compared with what experts of dropless eager training save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

# Not for each release: Megatron has no part in the bytes of stash and tensors.
pytestmark = [pytest.mark.megatron, pytest.mark.timeout(120)]

_SEQUENCE, _ROWS = 384, 2


def _config(make_config: Callable[..., dict[str, Any]]) -> Any:
    from extended_config import config_from_mapping

    return config_from_mapping(
        make_config(
            model={"num_layers": 3, "swiglu": True, "hidden_dropout": 0.0, "seq_length": _SEQUENCE},
            moe={
                "num_moe_experts": 8,
                "moe_router_topk": 2,
                "moe_ffn_hidden_size": 48,
                "moe_aux_loss_coeff": 0.1,
                "moe_expert_capacity_factor": 2.5,
                "moe_pad_expert_input_to_capacity": True,
                "token_drops": "count",
            },
            train={"num_microbatches": [1], "micro_batch_size": _ROWS},
        )
    )


def _microbatch(config: Any, device: Any) -> Any:
    from chunkgraph.data import PackedText
    from chunkgraph.trainer.batches import sequence_batches as microbatches

    text = PackedText.from_file(None, seq_length=_SEQUENCE, seed=1)
    return microbatches(config, text, 0, 1, device)


def _train(config: Any, chunks: Any, device: Any, wrap: Callable[[Any], Any]) -> None:
    from chunkgraph.megatron.core.access import import_megatron
    from chunkgraph.trainer.forward_step import forward_step

    schedule = import_megatron("megatron.core.pipeline_parallel")
    for chunk in chunks:
        chunk.zero_grad_buffer()
    wrap(schedule.get_forward_backward_func())(
        forward_step_func=forward_step,
        data_iterator=[_microbatch(config, device)],
        model=chunks,
        num_microbatches=1,
        seq_length=_SEQUENCE,
        micro_batch_size=_ROWS,
        forward_only=False,
    )


def _built(config: Any, device: Any) -> Any:
    from extended_config import build_model

    from chunkgraph.megatron.features.experts.state import forget_expert_metrics
    from chunkgraph.trainer.setup import seed_everything

    forget_expert_metrics()
    seed_everything(1, device)
    return build_model(config, device)


def _saved_without_drops(config: Any, device: Any) -> int:
    """Return the bytes that autograd saves inside one microbatch's experts without a capacity."""
    from chunkgraph.megatron.attachment import config_of

    chunks = _built(config, device)
    for chunk in chunks:
        experts = config_of(chunk)
        experts.moe_expert_capacity_factor = None
        experts.moe_pad_expert_input_to_capacity = False
        for module in chunk.modules():
            if hasattr(module, "token_dispatcher"):
                module.token_dispatcher.drop_and_pad = False
    parameters = {p.untyped_storage().data_ptr() for c in chunks for p in c.parameters()}
    saved: dict[int, int] = {}
    kept: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no other tensor gets its address
        return tensor

    with ExitStack() as hooks:
        entered: list[Any] = []

        def enter(*_: Any) -> None:
            entered.append(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
            entered[-1].__enter__()

        def leave(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        layers = [m for c in chunks for m in c.modules() if hasattr(m, "experts")]
        assert len(layers) == 3
        for layer in layers:
            hooks.callback(layer.experts.register_forward_pre_hook(enter).remove)
            hooks.callback(layer.experts.register_forward_hook(leave).remove)
        _train(config, chunks, device, lambda schedule: schedule)
    return sum(saved.values())


def test_the_stash_takes_little_more_than_dropless_training_saves(
    one_rank: Any, make_config: Callable[..., dict[str, Any]]
) -> None:
    """At most 15% more for the same tokens, with room for 2.5 times an expert's share."""
    from chunkgraph.megatron import attach
    from chunkgraph.memory.stash import StashOptions

    config = _config(make_config)
    dropless = _saved_without_drops(config, one_rank)
    chunks = _built(config, one_rank)
    graphs = attach(chunks, stash=StashOptions(page_bytes=1536))
    try:
        for _ in range(3):
            _train(config, chunks, one_rank, graphs.wrap_forward_backward)
        assert graphs.counters.replayed_steps >= 1
        assert not graphs.counters.overflow_reruns
        size = graphs.stash.size
        assert size is not None
        assert sum(graphs.dropped_tokens(wait=True).values()) == 0
        # Otherwise it could not hold all saved tensors.
        assert dropless < size.device_bytes <= 1.15 * dropless
        assert graphs.stash.full_bytes() > 1.6 * dropless
    finally:
        graphs.detach()
