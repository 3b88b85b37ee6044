"""Memory of the stash, compared with what experts of dropless eager training save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping
from in_process import Trained

from chunkgraph.megatron.attachment import config_of
from chunkgraph.megatron.features.experts.feature import dropped_tokens
from chunkgraph.megatron.features.stash import ExpertStash
from chunkgraph.settings import StashConfig

# Not for each release: Megatron has no part in the bytes of stash and tensors.
pytestmark = [pytest.mark.megatron, pytest.mark.timeout(120)]

_SEQUENCE, _ROWS = 384, 2


def _config(make_config: Callable[..., dict[str, Any]]) -> Any:
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


def _saved_without_drops(config: Any, device: Any) -> int:
    """Return the bytes that autograd saves inside one microbatch's experts without a capacity."""
    model = Trained(device, config, None)
    chunks = model.chunks
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
        model.step(0, 1)
    return sum(saved.values())


@pytest.mark.slow
def test_the_stash_takes_little_more_than_dropless_training_saves(
    one_rank: Any, make_config: Callable[..., dict[str, Any]]
) -> None:
    """At most 15% more for the same tokens, with room for 2.5 times an expert's share."""
    config = _config(make_config)
    dropless = _saved_without_drops(config, one_rank)
    model = Trained(one_rank, config, {"stash": StashConfig(enabled=True)})
    graphs = model.graphs
    for _ in range(3):
        model.step(0, 1)
    assert graphs.counters.replayed_steps >= 1
    assert not graphs.counters.overflow_reruns
    num_bytes = graphs.find(ExpertStash).num_bytes()
    assert sum(dropped_tokens(graphs, wait=True).values()) == 0
    # Otherwise it could not hold all saved tensors.
    assert dropless < num_bytes <= 1.15 * dropless
    assert graphs.find(ExpertStash).full_bytes() > 1.6 * dropless
