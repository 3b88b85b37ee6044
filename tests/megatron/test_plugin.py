"""Attaching to a model in this process: what is refused, what is put back, when it stays eager."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from refused import refused
from torch import nn

from chunkgraph.errors import ConfigError, SlotError
from chunkgraph.megatron.refusals import MODEL_RULES
from chunkgraph.settings import Config, config_from_mapping

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(60)]

MakeConfig = Callable[..., dict[str, Any]]


def _block(chunks: list[nn.Module]) -> Any:
    return next(
        m for m in chunks[0].modules() if hasattr(m, "set_input_tensor") and hasattr(m, "layers")
    )


def _inputs(requires_grad: bool = True) -> dict[str, Any]:
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), diagonal=1)
    hidden = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1))
    return {"hidden_states": hidden.requires_grad_(requires_grad), "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp4", "e2m1"),
        ("distribute_saved_activations", True),
        ("cpu_offloading", True),
        ("fine_grained_activation_offloading", True),
        ("overlap_moe_expert_parallel_comm", True),
        ("delay_wgrad_compute", True),
        ("hybrid_context_parallel", True),
        ("variable_seq_lengths", True),
        ("enable_autocast", True),
        ("num_microbatches_with_partial_activation_checkpoints", 1),
        ("gtp_weight_remat_size", 2),
        ("expert_gtp_weight_remat_size", 2),
        ("experimental_attention_variant", "dsa"),
        ("overlap_dispatch_backward_with_experts_wgrad", True),
        ("use_transformer_engine_op_fuser", True),
        ("cuda_graph_impl", "local"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    chunks: list[nn.Module], name: str, value: object
) -> None:
    from chunkgraph.megatron.attachment import attach

    setattr(chunks[0].config, name, value)
    with pytest.raises(ConfigError, match=rf"{name}={value!r}"):
        attach(chunks)
    assert "forward" not in _block(chunks).__dict__


def _of_the_model(chunk: nn.Module) -> list[Any]:
    """What attaching changes of it."""
    objects: list[Any] = []
    for module in chunk.modules():
        objects += [module, getattr(module, "token_dispatcher", None)]
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return [
        (sorted(vars(one)), [len(vars(one).get(name, ())) for name in hooks])
        for one in objects
        if one is not None
    ] + [torch.distributed.destroy_process_group]


@pytest.mark.parametrize(
    "failing",
    [
        *("features.stash.feature.Saving", "attachment.SlotReceiver"),
        "features.packing.feature.StepPlans",
        *("attachment.ChunkGraphs", "features.rerun.guard.StepState"),
        "features.experts.drops.TokenDrops.install",
    ],
)
def test_a_failure_half_way_leaves_the_model_as_it_was(
    one_rank: Any, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    from chunkgraph.megatron import attachment as plugin
    from chunkgraph.memory.stash import StashOptions
    from chunkgraph.packing import PackedShape
    from chunkgraph.trainer.model import build_model

    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_expert_capacity_factor": 2.0}
    model = {"swiglu": True, "normalization": "RMSNorm"}
    (chunk,) = build_model(config_from_mapping(make_config(model=model, moe=experts)), one_rank)
    options: dict[str, Any] = {
        "packing": PackedShape(4, 16),
        "stash": StashOptions(),
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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fp8_param", True, "fp8_param=True: the optimizer writes FP8 weights"),
        ("fp8_dot_product_attention", True, "fp8_dot_product_attention=True"),
        ("fp8_recipe", "mxfp8", "fp8_recipe='mxfp8': its quantizers are untested"),
        (
            "use_transformer_engine_op_fuser",
            True,
            "use_transformer_engine_op_fuser=True with fp8=",
        ),
        ("recompute_granularity", "full", "recompute_granularity='full' with fp8='e4m3'"),
    ],
)
def test_what_does_not_go_with_fp8_is_refused(
    chunks: list[nn.Module], name: str, value: object, message: str
) -> None:
    from chunkgraph.megatron.features.fp8.feature import Fp8State

    config = chunks[0].config
    rules = (*MODEL_RULES, *Fp8State.rules)
    facts = {"is_rng_graph_safe": True, "has_transformer_engine": True}
    config.fp8, config.fp8_recipe = "e4m3", "tensorwise"
    assert refused(rules, vars(config), **facts) == []
    setattr(config, name, value)
    (found,) = refused(rules, vars(config), **facts)
    assert found.startswith(message)


def test_only_one_update_of_delayed_scales_fits_in_a_backward() -> None:
    from chunkgraph.megatron.scope_choice import SCOPE_RULES

    settings = {"fp8": "e4m3", "fp8_recipe": "delayed", "mtp_num_layers": 1}
    (found,) = refused(SCOPE_RULES, settings, scope="chunk")
    assert found.startswith("scope='chunk' with fp8_recipe='delayed' and mtp_num_layers: ")
    assert refused(SCOPE_RULES, settings, scope="block") == []
    assert refused(SCOPE_RULES, {**settings, "fp8_recipe": "tensorwise"}, scope="chunk") == []


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="Transformer Engine is installed",
)
def test_fp8_needs_transformer_engine(chunks: list[nn.Module]) -> None:
    from chunkgraph.megatron.attachment import attach

    chunks[0].config.fp8, chunks[0].config.fp8_recipe = "e4m3", "delayed"
    with pytest.raises(ConfigError, match=r"fp8='e4m3': it needs Transformer Engine.*\[te\]"):
        attach(chunks)


def test_several_refusals_are_told_at_once(chunks: list[nn.Module]) -> None:
    from chunkgraph.megatron.attachment import attach

    chunks[0].config.cpu_offloading = True
    chunks[0].config.num_moe_experts = 2
    chunks[0].config.moe_shared_expert_overlap = True
    with pytest.raises(ConfigError, match=r"(?s)cpu_offloading.*moe_shared_expert_overlap"):
        attach(chunks)


def test_rows_of_several_lengths_of_contexts_are_refused(
    chunks: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages would receive all microbatches with the rows of the longest, and so would experts."""
    from chunkgraph.megatron import attach
    from chunkgraph.megatron.features.contexts import ContextGroups, follow_groups
    from chunkgraph.megatron.features.packing.banks import PackedBanks
    from chunkgraph.megatron.topology import PipelinePlace
    from chunkgraph.packing import ContextLimits

    limits = ContextLimits(world_size=1, max_tokens_per_rank=8, max_packed_seqs=3)
    banks = PackedBanks.of_limits(limits, ContextGroups([0], {1: None}), buckets=[4])
    with pytest.raises(ConfigError, match=r"self_attention of model chunk 0 .*follow_groups"):
        attach(chunks, packing=banks)
    undo = follow_groups(chunks)
    attach(chunks, packing=banks).detach()
    banks.groups.close()
    chunks[0].config.expert_model_parallel_size = 2
    with pytest.raises(ConfigError, match=r"\(buckets=...\) and experts on several ranks"):
        attach(chunks, packing=banks)
    chunks[0].config.expert_model_parallel_size = 1
    place = PipelinePlace(rank=0, pipeline_rank=0, pipeline_size=2, num_chunks=1, group_size=2)
    monkeypatch.setattr(PipelinePlace, "current", lambda *_: place)
    with pytest.raises(ConfigError, match=r"lengths \(buckets=...\) in a pipeline"):
        attach(chunks, packing=banks)
    undo()
    with pytest.raises(ConfigError, match="follow_groups"):
        attach(chunks, packing=PackedBanks.of_limits(limits, banks.groups))


def test_padding_that_is_not_counted_is_told_where_sizes_change(
    chunks: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where heads share keys; `test_attention_limits` says which these are."""
    from chunkgraph.megatron import attach
    from chunkgraph.megatron.features.contexts import ContextGroups, feature, follow_groups
    from chunkgraph.megatron.features.packing.banks import PackedBanks
    from chunkgraph.packing import ContextLimits

    monkeypatch.setattr(
        feature,
        "needs_tokens_in_pieces",
        lambda _, __, limits=None: not limits.counts_padding,
    )
    limits = ContextLimits(world_size=1, max_tokens_per_rank=8, max_packed_seqs=3)
    undo = follow_groups(chunks)
    with pytest.warns(UserWarning, match=r"rank 0: heads share keys.*counts_padding=True") as told:
        attach(
            chunks, packing=PackedBanks.of_limits(limits, ContextGroups([0], {1: None}))
        ).detach()
    assert told[0].filename == __file__
    banks = PackedBanks.of_limits(
        replace(limits, counts_padding=True), ContextGroups([0], {1: None})
    )
    assert banks.keys[0].shape.counts_padding
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(chunks, packing=banks).detach()
    undo()


@pytest.mark.parametrize(
    ("name", "successor"),
    [
        (
            "buckets",
            r"packing=PackingOptions\(shape, buckets=...\), or PackedBanks.of_limits\(..., buckets",
        ),
        ("seq_buckets", r"packing=PackingOptions\(shape, seq_buckets=...\), or PackedBanks"),
        ("fills_rows", r"packing=PackingOptions\(shape, fills_rows=...\)"),
        ("contexts", r"packing=PackedBanks.of_limits\(...\)"),
        ("sequences", None),
    ],
)
def test_a_keyword_of_before_names_its_successor(
    chunks: list[nn.Module], name: str, successor: str | None
) -> None:
    from chunkgraph.megatron import attach

    instead = rf"\. Use {successor}.*" if successor else ""
    with pytest.raises(ConfigError, match=rf"^attach\(\) takes no {name}=\.\.\.{instead}"):
        attach(chunks, **{name: [4]})  # type: ignore[arg-type]


def test_groups_are_not_closed_under_their_graphs(
    chunks: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    from chunkgraph.engine import ChunkGraphs
    from chunkgraph.megatron import attach
    from chunkgraph.megatron.features.contexts import ContextGroups, follow_groups
    from chunkgraph.megatron.features.packing.banks import PackedBanks
    from chunkgraph.packing import ContextLimits

    limits = ContextLimits(world_size=1, max_tokens_per_rank=8, max_packed_seqs=3)
    banks = PackedBanks.of_limits(limits, ContextGroups([0], {1: None}))
    undo = follow_groups(chunks)
    graphs = attach(chunks, packing=banks)
    banks.groups.close()  # there are none yet
    with monkeypatch.context() as patch:
        patch.setattr(ChunkGraphs, "report", "there are graphs")
        with pytest.raises(ConfigError, match=r"NCCL would wait for ever.*detach\(\)"):
            banks.groups.close()
    graphs.detach()
    banks.groups.close()
    undo()


def test_fully_sharded_parameters_are_refused(chunks: list[nn.Module]) -> None:
    from chunkgraph.megatron.attachment import attach

    class FullyShardedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    with pytest.raises(ConfigError, match="FSDP"):
        attach([FullyShardedDataParallel(chunks[0])])


def test_swapped_messages_between_two_ranks_are_refused(chunks: list[nn.Module]) -> None:
    config = chunks[0].config
    config.pipeline_model_parallel_size, config.batch_p2p_comm = 2, True
    facts = {"is_rng_graph_safe": True, "num_model_chunks": 2}
    (refusal,) = refused(MODEL_RULES, vars(config), **facts)
    assert "overlap_p2p_comm=True" in refusal
    config.overlap_p2p_comm = True
    assert refused(MODEL_RULES, vars(config), **facts) == []


def test_dropout_needs_a_graph_safe_tracker(
    chunks: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from chunkgraph.megatron.attachment import attach

    monkeypatch.setattr(get_cuda_rng_tracker(), "use_cudagraphable_rng", False)
    with pytest.raises(ConfigError, match="graph-safe"):
        attach(chunks)
    chunks[0].config.hidden_dropout = 0.0
    attach(chunks).detach()


def test_other_modules_are_refused(one_rank: torch.device) -> None:
    from chunkgraph.megatron.attachment import attach

    with pytest.raises(ConfigError, match="not a Megatron-core model"):
        attach([nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match="no model chunk"):
        attach([])


def test_attach_twice_is_refused_and_detach_puts_all_back(chunks: list[nn.Module]) -> None:
    from chunkgraph.megatron.attachment import attach

    block = _block(chunks)
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
    from chunkgraph.megatron.attachment import attach

    graphs = attach(chunks, scope="block")
    try:
        with pytest.raises(SlotError, match="rank 0, pipeline stage 0, chunk 0"):
            _block(chunks)(**_inputs())
    finally:
        graphs.detach()


def test_evaluation_and_no_grad_run_eagerly_anywhere(chunks: list[nn.Module]) -> None:
    from chunkgraph.megatron.attachment import attach

    block = _block(chunks)
    block.eval()
    expected = block(**_inputs())
    graphs = attach(chunks)
    try:
        assert torch.equal(block(**_inputs()), expected)
        block.train()
        with torch.no_grad():
            block(**_inputs(requires_grad=False))
        assert graphs.counters.replays == 0
    finally:
        graphs.detach()


def _reductions(
    config: Config, device: torch.device, *, use_graphs: bool
) -> list[tuple[int, int, int]]:
    """For each step: ready signals of last microbatches, reductions that they started, all."""
    from megatron.core.distributed import param_and_grad_buffer

    from chunkgraph.trainer.loop import run_training

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


def test_a_schedule_is_wrapped_with_its_keywords(chunks: list[nn.Module]) -> None:
    """Evaluation steps are counted as such, and the schedule's result comes back."""
    from chunkgraph.megatron.attachment import attach

    graphs = attach(chunks)
    try:
        seen: list[dict[str, Any]] = []

        def schedule(**kwargs: Any) -> str:
            seen.append(kwargs)
            return "losses"

        keywords = {"num_microbatches": 3, "seq_length": 16, "forward_only": True}
        assert graphs.wrap_forward_backward(schedule)(**keywords) == "losses"
        assert seen == [keywords]
        assert graphs.counters.fallbacks == {"forward only": 1}
    finally:
        graphs.detach()


def test_another_sequence_length_runs_eagerly_and_equal(
    one_rank: torch.device, config: Config, chunks: list[nn.Module]
) -> None:
    """A step of other shapes between replayed ones falls back as a whole."""
    from chunkgraph.megatron.attachment import attach

    block = _block(chunks)

    def schedule(**kwargs: Any) -> torch.Tensor:
        length = kwargs["seq_length"]
        hidden = torch.ones(length, 2, 32, requires_grad=True)
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
        out = block(hidden_states=hidden, attention_mask=mask)
        out.sum().backward()
        return out.detach().clone()

    torch.manual_seed(3)
    keywords = [{"num_microbatches": 1, "seq_length": n} for n in (16, 16, 8, 16)]
    state = torch.get_rng_state()
    expected = [schedule(**k) for k in keywords]
    graphs = attach(chunks, scope="block")
    try:
        torch.set_rng_state(state)
        wrapped = graphs.wrap_forward_backward(schedule)
        got = [wrapped(**k) for k in keywords]
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert graphs.counters.fallbacks == {"capture warmup": 1, "input shapes differ": 1}
        assert graphs.counters.replays == 2
        with graphs.counters.expect(captures=0, capture_sessions=0):
            wrapped(**keywords[0])
    finally:
        graphs.detach()


def test_a_later_stage_reads_its_input_and_keeps_it(chunks: list[nn.Module]) -> None:
    """Neither capture nor replay leaves a static buffer in the block."""
    from chunkgraph.megatron.attachment import attach

    given = _inputs()
    block = _block(chunks)
    block.pre_process = False
    graphs = attach(chunks, scope="block")

    def schedule(**_: Any) -> torch.Tensor:
        torch.manual_seed(5)  # the same dropout in every step
        received = given["hidden_states"].detach().clone().requires_grad_()
        block.set_input_tensor(received)
        out = block(hidden_states=None, attention_mask=given["attention_mask"])
        out.sum().backward()
        assert block.input_tensor is received
        assert received.grad is not None
        return out.detach().clone()

    try:
        wrapped = graphs.wrap_forward_backward(schedule)
        first, *others = [wrapped(num_microbatches=1) for _ in range(3)]
        assert graphs.counters.replays == 2
        assert all(torch.equal(out, first) for out in others)
    finally:
        graphs.detach()
