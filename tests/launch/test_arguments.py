"""Megatron's arguments under ``--cuda-graph-granularity chunk``, without its training program."""

from __future__ import annotations

import argparse
import importlib.util
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from launch_arguments import arguments

from chunkgraph.errors import ConfigError
from chunkgraph.launch import hooks
from chunkgraph.launch.arguments import settle_arguments
from chunkgraph.launch.flags import GraphFlags, add_flags, read_flags
from chunkgraph.megatron.cpu.pretrain import cpu_flags
from chunkgraph.megatron.features.packing.script import packing_options
from chunkgraph.packing import ContextLimits, PackedShape
from chunkgraph.schedules import build_schedule


@pytest.mark.parametrize("implementation", ["local", "none"])
def test_megatron_builds_no_graphs(implementation: str) -> None:
    args = arguments(cuda_graph_impl=implementation)
    flags = settle_arguments(args, on_cpu=True)
    assert flags is not None
    assert args.cuda_graph_impl == "none"
    assert args.te_rng_tracker is False
    # Megatron parses its command line more than once; the settled values stay.
    assert settle_arguments(args, on_cpu=True) == flags


def test_chunk_graphs_replace_megatrons_graphs_of_parts_of_a_layer() -> None:
    args = arguments(cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn"])
    flags = settle_arguments(args, on_cpu=True)
    assert flags is not None
    assert (args.cuda_graph_impl, args.cuda_graph_modules) == ("none", [])
    assert len(flags.turned_off) == 1
    assert "--cuda-graph-modules" in flags.turned_off[0]


def test_layer_leaves_all_arguments_alone() -> None:
    args = arguments(cuda_graph_granularity="layer", cuda_graph_modules=["attn"], fp8="hybrid")
    before = dict(vars(args))
    assert settle_arguments(args, on_cpu=False) is None
    assert vars(args) == before


PACKED = {"sft": True, "seq_length": 16, "micro_batch_size": 1, "cuda_graph_max_packed_seqs": 4}
CHANGING = {**PACKED, "cuda_graph_cp_sizes": [2, 1], "calculate_per_token_loss": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl full_iteration: "),
        ({"inference_cuda_graph_scope": "block"}, "--inference-cuda-graph-scope: "),
        (
            {
                "fp8": "hybrid",
                "fp8_recipe": "delayed",
                "pipeline_schedule": "zb-h1",
                "pipeline_model_parallel_size": 2,
                "cuda_graph_verify": "shadow",
            },
            "--cuda-graph-verify shadow with --pipeline-schedule zb-h1",
        ),
        ({"cuda_graph_stash": "true"}, "--cuda-graph-stash without --num-experts"),
        ({"sft": True}, "--sft: packed sequences change their offsets"),
        ({"cuda_graph_max_packed_seqs": 9}, "--cuda-graph-max-packed-seqs 9: without --sft"),
        ({"cuda_graph_max_packed_tokens": 9}, "-packed-tokens 9 with --cuda-graph-max-packed-seq"),
        ({"yaml_cfg": "x.yaml"}, "--yaml-cfg: "),
        ({"kitchen_recipe_number": 0}, "--kitchen-recipe-number: whether a layer renews its"),
        (
            {
                **PACKED,
                "context_parallel_size": 2,
                "sft": False,
                "dataloader_inter_document_masking": True,
            },
            "seqs 4 with --context-parallel-size 2 and --dataloader-inter-document-masking: ",
        ),
        (
            {**PACKED, "num_experts": 4, "cuda_graph_max_packed_tokens": 8},
            "seqs 4 with --num-experts 4: routers count every row",
        ),
        ({**PACKED, "cuda_graph_max_packed_tokens": 17}, "tokens 17: a microbatch has 16 rows"),
        (
            {**PACKED, "cuda_graph_packed_buckets": [0.5], "context_parallel_size": 2},
            "seqs 4 with --context-parallel-size 2: ",
        ),
        (
            {**CHANGING, "sft": False, "dataloader_inter_document_masking": True},
            "1 2 without --sft: ",
        ),
        (
            {**CHANGING, "calculate_per_token_loss": False},
            "1 2 without --calculate-per-token-loss: ",
        ),
        ({**CHANGING, "mtp_num_layers": 1}, " with --mtp-num-layers 1: multi-token prediction"),
        (
            {**CHANGING, "cuda_graph_max_packed_tokens": 6},
            "tokens 6: 2 ranks hold 12 rows, and documents",
        ),
        (
            {**CHANGING, "cuda_graph_max_packed_tokens": 8, "tensor_model_parallel_size": 2},
            "tokens 8 and --tensor-model-parallel-size 2: the script's other",
        ),
        (
            {**CHANGING, "hybrid_layer_pattern": "M*"},
            "1 2 with --hybrid-layer-pattern M*: a Mamba mixer",
        ),
    ],
)
def test_what_cannot_go_together_is_named(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "cuda_graph_cp_sizes" in changes:
        monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="chunk does not support") as error:
        settle_arguments(arguments(**changes, perform_rl_step=True), on_cpu=True)
    assert message in str(error.value)
    assert "--perform-rl-step: " in str(error.value)  # all problems at once


def _parsed(*arguments: str) -> Any:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_flags(parser.parse_args(["--cuda-graph-granularity", "chunk", *arguments]))


def packed_shape(flags: GraphFlags, args: argparse.Namespace) -> PackedShape | None:
    options = packing_options(flags.packing, args)
    return None if options is None else options.shape


def test_the_shape_of_packed_sequences() -> None:
    args = arguments(**PACKED)
    flags = settle_arguments(args, on_cpu=True)
    assert flags is not None
    assert packed_shape(flags, args) == PackedShape(4, 16)
    args = arguments(**{**PACKED, "micro_batch_size": 2})
    assert packed_shape(flags, args) == PackedShape(4, 32)
    args = arguments(**PACKED, context_parallel_size=2)
    flags = settle_arguments(args, on_cpu=True)
    assert flags is not None
    assert packed_shape(flags, args) == PackedShape(4, 16, 2, counts_padding=True)
    args = arguments(**PACKED, cuda_graph_max_packed_tokens=12, cuda_graph_packed_buckets=[0.5])
    flags = settle_arguments(args, on_cpu=True)
    assert flags is not None
    assert packed_shape(flags, args) == PackedShape(4, 12)
    args = arguments(**{**PACKED, "sft": False}, dataloader_inter_document_masking=True)
    assert settle_arguments(args, on_cpu=True) is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cuda-graph-max-packed-seqs", "-1"], "packed-seqs is -1; it must be greater"),
        (
            ["--cuda-graph-max-packed-seqs", "--cuda-graph-packed-buckets", "0.5", "0"],
            r"--cuda-graph-packed-buckets\[1\] is 0.0; it must be greater than 0",
        ),
        (
            ["--cuda-graph-granularity", "layer", "--cuda-graph-max-packed-seqs"],
            "--cuda-graph-max-packed-seqs 50 has no effect",
        ),
    ],
)
def test_impossible_flags_of_packed_sequences(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _parsed(*arguments)


def limits_of(flags: GraphFlags, args: argparse.Namespace) -> ContextLimits:
    """Return the limits of two model chunks in groups of two microbatches, on four ranks."""
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda **_: 4)
    stand_ins: dict[str, Any] = {
        "import_megatron": lambda _: ranks,
        "config_of": lambda _: None,
        "PipelinePlace": SimpleNamespace(current=lambda *_: SimpleNamespace(group_size=2)),
        "ContextGroups": mock.Mock(),
        "follow_groups": mock.Mock(),
        "PackedBanks": SimpleNamespace(of_limits=lambda limits, *_, **__: limits),
    }
    with mock.patch.multiple(hooks, **stand_ins), ExitStack() as undo:
        limits: Any = hooks.ChunkGraphsInPretrain()._contexts(flags, args, [None, None], undo)
    assert isinstance(limits, ContextLimits)
    return limits


def test_context_sizes_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    args = arguments(
        **{**CHANGING, "cuda_graph_cp_sizes": [4, 2, 1]},
        cuda_graph_max_packed_tokens=4,
        pipeline_model_parallel_size=2,
    )
    flags = settle_arguments(args, on_cpu=True)
    assert flags is not None
    assert flags.packing.context_parallel_sizes == (4, 2, 1)
    assert packed_shape(flags, args) is None
    limits = limits_of(flags, args)
    experts = {"num_experts": 4, "moe_token_dispatcher_type": "alltoall"}
    experts |= {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}
    assert settle_arguments(arguments(**{**vars(args), **experts}), on_cpu=True) == flags
    unused = {"recompute_granularity": None, "recompute_modules": ["moe"]}
    assert settle_arguments(arguments(**{**vars(args), **unused}), on_cpu=True) == flags
    assert (limits.group_sizes, limits.max_tokens_per_rank, limits.multiple_of) == ((4, 2, 1), 4, 2)
    assert not limits.counts_padding
    args.group_query_attention, args.num_query_groups, args.num_attention_heads = True, 2, 4
    assert limits_of(flags, args).counts_padding


def test_graph_safe_random_numbers_are_chosen_for_the_user(monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    for changes in (
        {"attention_dropout": 0.1},
        {"transformer_impl": "transformer_engine"},
        {"moe_router_force_load_balancing": True},
    ):
        args = arguments(**changes)
        settle_arguments(args, on_cpu=False)
        assert args.te_rng_tracker is True
    args = arguments()
    settle_arguments(args, on_cpu=False)
    assert args.te_rng_tracker is False


def test_a_cpu_run_gets_the_flags_it_needs() -> None:
    added = cpu_flags(["--num-layers", "2", "--no-rope-fusion", "--transformer-impl=local"])
    assert added[:2] == ["--distributed-backend", "gloo"]
    assert "--no-rope-fusion" not in added
    assert "--transformer-impl" not in added
    with pytest.raises(ConfigError, match="--transformer-impl transformer_engine needs a GPU"):
        cpu_flags(["--transformer-impl", "transformer_engine"])


# ``--pipeline-schedule`` among Megatron's arguments, without its training program.


class _AttachedError(Exception):
    """Ends a test at the point where graphs would be attached."""


@pytest.fixture
def in_folder_of_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write ``mine.csv``, a schedule with split backwards, to the current folder."""
    monkeypatch.chdir(tmp_path)
    schedule = build_schedule("zb-h1", num_ranks=2, num_microbatches=4)
    Path("mine.csv").write_text(schedule.to_csv())


@pytest.mark.usefixtures("in_folder_of_schedule")
@pytest.mark.parametrize("name", ["auto", "zb-h1", "mine.csv"])
def test_the_schedule_reaches_attach(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = None if name == "auto" else name
    args = arguments(pipeline_schedule=schedule, pipeline_model_parallel_size=2)
    attached: dict[str, Any] = {}

    def attach(model: Any, **options: Any) -> None:
        attached.update(options)
        raise _AttachedError

    monkeypatch.setattr(hooks, "pretrain_arguments", lambda: args)
    monkeypatch.setattr(hooks, "attach", attach)
    graphs = hooks.ChunkGraphsInPretrain(on_cpu=True)
    graphs.parsed(args)
    assert graphs.flags is not None
    assert graphs.flags.schedule == name
    with pytest.raises(_AttachedError), graphs.training([]):
        pass
    assert attached["schedule"] == name


@pytest.mark.usefixtures("in_folder_of_schedule")
@pytest.mark.parametrize("name", ["zb-h1", "mine.csv"])
def test_weight_gradients_are_delayed_by_schedules_that_split_backwards(name: str) -> None:
    args = arguments(
        pipeline_schedule=name, delay_wgrad_compute=True, pipeline_model_parallel_size=2
    )
    flags = settle_arguments(args, on_cpu=True)
    assert flags is not None
    with pytest.raises(ConfigError, match="--delay-wgrad-compute: weight gradients would"):
        settle_arguments(arguments(pipeline_schedule="1f1b", delay_wgrad_compute=True), on_cpu=True)


def test_delayed_weight_gradients_without_graphs_and_schedule_are_left_to_megatron() -> None:
    args = arguments(
        cuda_graph_granularity="layer", cuda_graph_impl="none", delay_wgrad_compute=True
    )
    assert settle_arguments(args, on_cpu=True) is None
    assert args.delay_wgrad_compute


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_schedule": "none.csv"}, "none.csv: cannot read the schedule"),
        ({"pipeline_schedule": "zb-h2"}, "--pipeline-schedule zb-h2: there is no such schedule"),
        ({"pipeline_schedule": "zb-v"}, "--pipeline-schedule zb-v: it places stages in a V"),
        (
            {"pipeline_schedule": "zb-h1", "use_ring_exchange_p2p": True},
            "--use-ring-exchange-p2p with --pipeline-schedule zb-h1: only Megatron's own",
        ),
    ],
)
def test_schedules_that_cannot_run_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        settle_arguments(arguments(**changes), on_cpu=True)


def test_masks_that_no_kernel_reads_are_not_made() -> None:
    engine = {"transformer_impl": "transformer_engine", "create_attention_mask_in_dataloader": True}
    args = arguments(**engine)
    flags = settle_arguments(args, on_cpu=False)
    assert flags is not None
    assert not args.create_attention_mask_in_dataloader
    assert "--no-create-attention-mask-in-dataloader" in flags.turned_off[-1]
    for changes in ({"transformer_impl": "local"}, {"reset_attention_mask": True}):
        args = arguments(**{**engine, **changes})
        settle_arguments(args, on_cpu=False)
        assert args.create_attention_mask_in_dataloader


def test_megatrons_flag_for_a_graph_of_the_optimizer_is_taken_over() -> None:
    args = arguments(optimizer_cuda_graph=True)
    flags = settle_arguments(args, on_cpu=True)
    assert flags is not None
    assert flags.capture.captures_optimizer
    assert not args.optimizer_cuda_graph
    args = arguments(optimizer_cuda_graph=True, cuda_graph_chunk_scope="chunk")
    with pytest.raises(ConfigError, match=r"--optimizer-cuda-graph with .*chunk-scope chunk: use"):
        settle_arguments(args, on_cpu=True)
    args = arguments(cuda_graph_chunk_scope="chunk")
    flags = settle_arguments(args, on_cpu=True)
    assert flags is not None
    assert not flags.capture.captures_optimizer
