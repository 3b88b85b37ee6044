"""Settings of context-parallel sizes that change between microbatches."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkgraph.errors import ChunkGraphError, ConfigError, TopologyError
from chunkgraph.settings import load_config

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "gpu" / "gpt_pp2_gpu.yaml"
GOOD = (
    "train.micro_batch_size=1",
    "pipeline.data_parallel_size=4",
    "packing.max_packed_seqs=8",
    "packing.max_packed_tokens=256",
    "packing.context_parallel_sizes=[1,2,4]",
    "packing.captured_context_parallel_sizes=[4]",
)


def test_sizes_that_go_together() -> None:
    packing = load_config(CONFIG, GOOD).packing
    assert packing.context_parallel_sizes == (1, 2, 4)
    assert packing.context_parallel_schedule == "smallest"
    assert packing.captured_context_parallel_sizes == (4,)
    # These settings have no effect on a run without such sizes.
    assert load_config(CONFIG).packing.context_parallel_sizes == ()


_EXPERTS = ("moe.num_moe_experts=4", "moe.moe_expert_capacity_factor=2")


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (["packing.context_parallel_sizes=[1,3]"], TopologyError, "3 is not a power of two"),
        (
            ["pipeline.data_parallel_size=6"],
            TopologyError,
            "data_parallel_size=6: .* need a power of two",
        ),
        (["model.fp8=hybrid"], ConfigError, "model.fp8=hybrid"),
        (["data.document_counts=[1,2,3,4]"], ConfigError, r"data.document_counts=\[1, 2, 3"),
        (
            [*_EXPERTS, "pipeline.tensor_model_parallel_size=2"],
            TopologyError,
            "only with sequence parallelism",
        ),
        (
            ["model.position_embedding_type=learned_absolute", "model.seq_length=512"],
            ConfigError,
            r"1024 tokens, and learned positions end at model.seq_length=512",
        ),
        (
            ["packing.context_parallel_sizes=[]"],
            ConfigError,
            r"captured_context_parallel_sizes is \[4\]",
        ),
        (
            [
                "packing.context_parallel_sizes=[]",
                "packing.captured_context_parallel_sizes=[]",
                "packing.context_parallel_schedule=random",
            ],
            ConfigError,
            "context_parallel_schedule is random",
        ),
    ],
)
def test_sizes_that_do_not(changes: list[str], kind: type[ChunkGraphError], message: str) -> None:
    with pytest.raises(kind, match=message):
        load_config(CONFIG, [*GOOD, *changes])
