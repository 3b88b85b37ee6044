"""``chunkgraph launch --plan`` plans the command line of a pretrain script."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from training_needs import NEEDS_TRAINING

from chunkgraph.cli.__main__ import main
from chunkgraph.cli.launch import request_of_arguments
from chunkgraph.cli.plan_tables import as_json, print_rows, rows_of
from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import GraphFlags
from chunkgraph.schedules import build_schedule
from chunkgraph.settings import PackingConfig

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"
MIXTRAL = shlex.split("""
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16
    --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity --moe-grouped-gemm
    --expert-model-parallel-size 8 --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 4 --use-distributed-optimizer
    --micro-batch-size 1 --global-batch-size 256 --train-iters 10 --lr 1e-4
    --mock-data --tokenizer-type NullTokenizer --vocab-size 32000
""")


def arguments(**changes: Any) -> argparse.Namespace:
    values = {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "group_query_attention": True,
        "kv_channels": 128,
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
        "seq_length": 8192,
        "micro_batch_size": 1,
        "global_batch_size": 128,
        "data_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "use_distributed_optimizer": True,
        "bf16": True,
        "transformer_impl": "transformer_engine",
        "padded_vocab_size": None,
        "vocab_size": 128256,
    }
    return argparse.Namespace(**{**values, **changes})


def test_arguments_become_sizes() -> None:
    request = request_of_arguments(arguments(), GraphFlags(), gpu_bytes=80)
    assert (request.schedule, request.num_ranks, request.num_chunks) == ("1f1b", 2, 1)
    assert request.num_microbatches == 64
    assert (request.gpu_bytes, request.omissions, request.notes) == (80, (), ())
    model = request.model
    assert model is not None
    assert model.num_query_groups == 8
    assert model.has_sequence_parallel
    assert model.has_flash_attention
    assert (model.num_optimizer_shards, model.optimizer_bytes_per_parameter) == (2, 12)
    float_model = request_of_arguments(arguments(bf16=False), GraphFlags()).model
    assert float_model is not None
    assert (float_model.bytes_per_element, float_model.optimizer_bytes_per_parameter) == (4, 8)


def test_the_largest_step_of_a_schedule_of_batch_sizes_is_planned() -> None:
    """Megatron's --global-batch-size is one row a rank then."""
    steps = arguments(global_batch_size=2, step_batch_size_schedule="0:64 1B:256 5B:128")
    assert request_of_arguments(steps, GraphFlags()).num_microbatches == 128


def test_flags_of_graphs_count() -> None:
    packing = PackingConfig(max_packed_seqs=8, max_packed_tokens=4096)
    flags = GraphFlags(packing=packing, schedule="zb-h1")
    request = request_of_arguments(arguments(context_parallel_size=2), flags)
    assert request.schedule == "zb-h1"
    assert request.model is not None
    assert request.model.seq_length == 2048


def test_a_schedule_file_is_planned_and_compared_with_the_arguments(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(build_schedule("zb-h1", num_ranks=2, num_microbatches=64).to_csv())
    flags = GraphFlags(schedule=str(path))
    request = request_of_arguments(arguments(), flags)
    named = request_of_arguments(arguments(), GraphFlags(schedule="zb-h1"))
    assert [request.plan(rank).slots_per_chunk for rank in (0, 1)] == [(2,), (2,)]
    rows = [rows_of(one) for one in (request, named)]
    assert [as_json(row) for row in rows[0]] == [as_json(row) for row in rows[1]]
    with pytest.raises(ConfigError, match=r"but a step has 32\. Change --global-batch-size"):
        request_of_arguments(arguments(global_batch_size=64), flags)
    with pytest.raises(ConfigError, match="has 2 ranks of 1 chunk"):
        request_of_arguments(arguments(pipeline_model_parallel_size=4), flags)


def test_what_memory_leaves_out_is_a_note() -> None:
    changes = {"num_layers": 61, "vocab_size": None, "mtp_num_layers": 1}
    request = request_of_arguments(arguments(**changes), GraphFlags())
    assert request.model is not None
    assert request.model.num_layers == 62
    assert request.notes[0].startswith("Memory counts 31 layers in every chunk; 61 layers are not")
    assert [text.split(",")[0] for text in request.omissions] == [
        "Memory leaves out embedding and output layer",
    ]
    hybrid = arguments(hybrid_layer_pattern="M*")
    assert request_of_arguments(hybrid, GraphFlags()).model is None
    with pytest.raises(ConfigError, match="memory is not estimated for hybrid models"):
        request_of_arguments(hybrid, GraphFlags(), gpu_bytes=1)


def test_gpu_memory_needs_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--gpu-memory", "80GiB", str(SCRIPT)]) == 2
    assert "add --plan" in capsys.readouterr().err


@pytest.fixture
def plan(run_script: Callable[..., tuple[list[int], str]]) -> Callable[..., tuple[int, str]]:
    """Return a runner of ``chunkgraph launch --plan``: exit code and output."""

    def plan(*args: str) -> tuple[int, str]:
        command = ("-m", "chunkgraph.cli", "launch", "--plan", *args)
        (code,), output = run_script(*command, num_ranks=0, host="pretrain")
        return code, output

    return plan


@pytest.mark.slow
@pytest.mark.megatron
@NEEDS_TRAINING
def test_a_command_line_is_planned_without_a_gpu(plan: Callable[..., tuple[int, str]]) -> None:
    code, out = plan("--nproc-per-node", "64", "--gpu-memory", "80GiB", str(SCRIPT), *MIXTRAL)
    assert code == 0, out
    assert "on 64 processes (data 16, pipeline 4, expert 8): all flags are compatible" in out
    assert "interleaved: slots for any legal number of microbatches" in out
    assert " 8 4 " in out  # rank 0
    assert "Fits in 80.0 GiB" in out


SMALL = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 2
    --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --bf16
""")
TWICE = """
import argparse
import torch.distributed as dist
from megatron.training.arguments import parse_args

def own(parser):
    parser.add_argument("--my-data", type=int)
    return parser

parse_args(ignore_unknown_args=True)
parse_args(extra_args_provider=own)
"""
IGNORES = """
import argparse
import torch.distributed as dist
from megatron.training.arguments import parse_args

own = argparse.ArgumentParser(allow_abbrev=False)
own.add_argument("--my-data", type=int)
own.parse_known_args()
parse_args(ignore_unknown_args=True)
dist.init_process_group("nccl")
"""


@pytest.mark.megatron
@NEEDS_TRAINING
@pytest.mark.parametrize(("script", "of_unknown"), [(TWICE, 2), (IGNORES, 0)])
def test_unknown_flags_are_refused_and_own_ones_known_in_a_script_that_ignores_some(
    plan: Callable[..., tuple[int, str]], tmp_path: Path, script: str, of_unknown: int
) -> None:
    path = tmp_path / "pretrain.py"
    path.write_text(script)
    assert plan(str(path), *SMALL, "--no-such-flag")[0] == of_unknown
    code, out = plan(str(path), *SMALL, "--my-data", "3")
    assert code == 0, out
    assert "all flags are compatible" in out
    code, out = plan(str(path), *SMALL, "--cuda-graph-granularty", "chunk", "--my-data", "3")
    assert code == 2
    assert "Did you mean '--cuda-graph-granularity'?" in out
    assert "Traceback" not in out


@pytest.mark.megatron
@NEEDS_TRAINING
def test_a_layout_that_megatron_cannot_form_is_refused(
    plan: Callable[..., tuple[int, str]],
) -> None:
    code, out = plan("--nproc-per-node", "8", str(SCRIPT), *MIXTRAL)
    assert code == 2
    assert "8 processes: the products pipeline x tensor" in out
    assert "Start a multiple of 32" in out


def test_what_is_not_counted_is_listed_and_may_fit(capsys: pytest.CaptureFixture[str]) -> None:
    request = request_of_arguments(arguments(moe_token_dispatcher_type="flex"), GraphFlags(), 2**50)
    print_rows(Console(highlight=False, markup=False), request, rows_of(request))
    out = " ".join(capsys.readouterr().out.split())
    assert "Memory does not count: DeepEP's buffers." in out
    assert "May fit in 1024.0 TiB" in out


@pytest.mark.megatron
@NEEDS_TRAINING
def test_refusals_are_those_of_the_run(plan: Callable[..., tuple[int, str]]) -> None:
    code, out = plan(str(SCRIPT), *MIXTRAL, "--use-torch-fsdp2", "--rl-training-cuda-graphs")
    assert code == 2
    assert "--use-torch-fsdp2: chunk graphs do not support it" in out
    assert "--rl-training-cuda-graphs: " in out
    assert "Traceback" not in out


@pytest.mark.megatron
@NEEDS_TRAINING
def test_a_script_that_ends_before_its_plan_is_one_line(
    plan: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    path = tmp_path / "pretrain.py"
    path.write_text("raise SystemExit(0)")
    code, out = plan(str(path))
    assert code == 2
    why = "SystemExit: 0. Run it without --plan"
    assert f"error: pretrain.py ended before its plan: {why}" in out
    assert "Traceback" not in out
