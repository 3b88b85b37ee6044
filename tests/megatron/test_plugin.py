"""Attaching to a model in this process: refusals, detaching, and eager steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping
from in_process import attach, block_of
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.errors import ConfigError, SlotError
from chunkgraph.megatron import attachment as plugin
from chunkgraph.megatron.features.contexts import ContextGroups
from chunkgraph.megatron.features.contexts.feature import _follows
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.packing import ContextLimits, PackedShape
from chunkgraph.settings import Config, StashConfig
from chunkgraph.trainer.compare import run_training
from chunkgraph.trainer.model import build_model

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

MakeConfig = Callable[..., dict[str, Any]]


def _inputs(requires_grad: bool = True) -> dict[str, Any]:
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), diagonal=1)
    hidden = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1))
    return {"hidden_states": hidden.requires_grad_(requires_grad), "attention_mask": mask}


def _of_the_model(chunk: nn.Module) -> list[Any]:
    """Return the parts of the model and of Megatron that attaching changes."""
    from megatron.core.transformer.moe import router

    objects: list[Any] = []
    for module in chunk.modules():
        objects += [module, getattr(module, "token_dispatcher", None)]
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return [
        (sorted(vars(one)), [len(vars(one).get(name, ())) for name in hooks])
        for one in objects
        if one is not None
    ] + [torch.distributed.destroy_process_group, router.apply_router_token_dropping]


@pytest.mark.parametrize(
    "failing",
    [
        *("features.stash.Saving", "attachment.SlotReceiver"),
        "features.packing.feature.StepPlans",
        *("attachment.ChunkGraphs", "features.rerun.StepState"),
        "features.experts.capacity.CapacityExperts.install",
    ],
)
def test_a_failure_half_way_leaves_the_model_as_it_was(
    one_rank: Any, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_expert_capacity_factor": 2.0}
    model = {"swiglu": True, "normalization": "RMSNorm"}
    (chunk,) = build_model(config_from_mapping(make_config(model=model, moe=experts)), one_rank)
    options: dict[str, Any] = {
        "packing": PackedShape(4, 16),
        "stash": StashConfig(enabled=True),
        "token_drops": "rerun",
    }
    before = _of_the_model(chunk)
    with monkeypatch.context() as patch:

        def fails(*_args: Any, **_options: Any) -> None:
            raise MemoryError("half way")

        patch.setattr(f"chunkgraph.megatron.{failing}", fails)
        with pytest.raises(MemoryError, match="half way"):
            plugin.attach([chunk], **options)
    assert _of_the_model(chunk) == before
    graphs = plugin.attach([chunk], **options)
    assert _of_the_model(chunk) != before
    graphs.detach()
    assert _of_the_model(chunk) == before


def test_groups_are_not_closed_under_their_graphs(
    chunks: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ContextLimits(world_size=1, max_tokens_per_rank=8, max_packed_seqs=3)
    banks = PackedBanks.of_limits(limits, ContextGroups([0], {1: None}))
    graphs = attach(chunks, packing=banks)
    assert _follows(chunks, banks.groups)
    banks.groups.close()  # there are no graphs yet
    with monkeypatch.context() as patch:
        patch.setattr(ChunkGraphs, "report", "there are graphs")
        with pytest.raises(ConfigError, match=r"NCCL would wait forever.*detach\(\)"):
            banks.groups.close()
    graphs.detach()
    assert not _follows(chunks, banks.groups)
    banks.groups.close()


def test_attach_twice_is_refused_and_detach_puts_all_back(chunks: list[nn.Module]) -> None:
    block = block_of(chunks)
    before = dict(block.__dict__)
    names = list(chunks[0].state_dict())
    for _ in range(2):
        graphs = attach(chunks)
        assert list(chunks[0].state_dict()) == names
        with pytest.raises(ConfigError, match="detach"):
            attach(chunks)
        graphs.detach()
        assert block.__dict__.keys() == before.keys()
        assert block.forward.__func__ is type(block).forward


def test_training_outside_a_step_names_the_chunk(chunks: list[nn.Module]) -> None:
    attach(chunks, scope="block")
    with pytest.raises(SlotError, match="rank 0, pipeline stage 0, chunk 0"):
        block_of(chunks)(**_inputs())


def test_evaluation_and_no_grad_run_eagerly_anywhere(chunks: list[nn.Module]) -> None:
    block = block_of(chunks)
    block.eval()
    expected = block(**_inputs())
    graphs = attach(chunks)
    assert torch.equal(block(**_inputs()), expected)
    block.train()
    with torch.no_grad():
        block(**_inputs(requires_grad=False))
    assert graphs.counters.replays == 0


def _reductions(
    config: Config, device: torch.device, *, use_graphs: bool
) -> list[tuple[int, int, int]]:
    """Return each step's ready signals of last microbatches, their reductions, and all of these."""
    from megatron.core.distributed import param_and_grad_buffer

    group_class = param_and_grad_buffer._ParamAndGradBucketGroup
    register, start = group_class.register_grad_ready, group_class.start_grad_sync
    steps: list[tuple[int, int, int]] = []
    now = {"ready": 0, "early": 0, "all": 0}
    inside = [False]

    def counting_register(self: Any, *args: Any, **kwargs: Any) -> Any:
        now["ready"] += self.is_last_microbatch
        inside[0] = True
        try:
            return register(self, *args, **kwargs)
        finally:
            inside[0] = False

    def counting_start(self: Any, *args: Any, **kwargs: Any) -> Any:
        now["all"] += 1
        now["early"] += inside[0]
        return start(self, *args, **kwargs)

    def next_step(record: object) -> None:
        steps.append((now["ready"], now["early"], now["all"]))
        now.update(ready=0, early=0, all=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_class, "register_grad_ready", counting_register)
        patch.setattr(group_class, "start_grad_sync", counting_start)
        options = {"bucket_size": 4000}
        run_training(config, device, use_graphs=use_graphs, ddp_options=options, on_step=next_step)
    return steps


def test_gradient_ready_signals_are_those_of_eager_training(
    one_rank: torch.device, make_config: MakeConfig
) -> None:
    train = {"num_microbatches": [2, 3, 1, 2], "overlap_grad_reduce": True}
    config = config_from_mapping(make_config(train=train))
    eager = _reductions(config, one_rank, use_graphs=False)
    chunk = _reductions(config, one_rank, use_graphs=True)
    assert chunk == eager
    num_ready, num_early, num_all = chunk[-1]
    assert num_ready > 20  # each parameter once, in the last microbatch alone
    assert num_early == num_all > 2  # several buckets, all of them reduced during the backward
