"""Recipes with experts in the style of Megatron-LM are taken, or refused with a reason."""

from __future__ import annotations

import argparse

import pytest
from launch_arguments import megatron_parser
from training_needs import NEEDS_TRAINING

from chunkgraph.errors import ConfigError
from chunkgraph.launch.arguments import settle_arguments

pytestmark = [pytest.mark.megatron, NEEDS_TRAINING]

_GRAPHS = "--cuda-graph-granularity chunk --te-rng-tracker --hidden-dropout 0 --attention-dropout 0"
_BASE = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 32 --bf16 "
    "--transformer-impl local --use-mcore-models --no-gradient-accumulation-fusion "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --untie-embeddings-"
    "and-output-weights"
)
_MIXTRAL = (
    "--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --swiglu "
    "--moe-router-load-balancing-type aux_loss --disable-bias-linear --normalization RMSNorm "
    "--group-query-attention --num-query-groups 4 --position-embedding-type rope"
)
_DEEPSEEK = (
    "--num-experts 32 --moe-router-topk 4 --moe-grouped-gemm --moe-ffn-hidden-size 256 --swiglu "
    "--moe-layer-freq ([0]*3+[1]*9) --moe-router-score-function sigmoid --moe-router-dtype fp32 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
    "--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 "
    "--moe-shared-expert-intermediate-size 256 --disable-bias-linear --normalization RMSNorm "
    "--multi-latent-attention --q-lora-rank 128 --kv-lora-rank 64 --qk-head-dim 32 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 32 --position-embedding-type rope"
)
_QWEN = (
    "--num-experts 128 --moe-router-topk 8 --moe-grouped-gemm --moe-ffn-hidden-size 96 --swiglu "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --qk-layernorm "
    "--disable-bias-linear --normalization RMSNorm --group-query-attention --num-query-groups 4 "
    "--position-embedding-type rope"
)
_ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"
_ALL_GATHER = "--moe-token-dispatcher-type allgather"
_HYBRIDEP = (
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-router-dtype "
    "fp32 --moe-permute-fusion"
)
_ROOM = "--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity"
_EP2 = "--expert-model-parallel-size 2"
_TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
_OVERLAP = "--overlap-moe-expert-parallel-comm"
_PP2 = "--pipeline-model-parallel-size 2"

_TAKEN = (
    (_MIXTRAL, _ALL_TO_ALL),
    (_MIXTRAL, _ALL_GATHER),
    (_MIXTRAL, f"{_ALL_TO_ALL} {_EP2} {_PP2} --moe-permute-fusion"),
    (_MIXTRAL, f"{_ALL_TO_ALL} {_TP2} --expert-tensor-parallel-size 1"),
    (_MIXTRAL, f"{_ALL_TO_ALL} --recompute-granularity selective --recompute-modules moe_act"),
    (_MIXTRAL, f"{_ALL_TO_ALL} --recompute-granularity selective --recompute-modules moe"),
    (_MIXTRAL, f"{_ALL_TO_ALL} --moe-router-pre-softmax --moe-z-loss-coeff 1e-3"),
    (_MIXTRAL, f"{_ALL_TO_ALL} --moe-router-force-load-balancing"),
    (_MIXTRAL, f"{_ALL_TO_ALL} {_ROOM}"),
    (
        _MIXTRAL,
        f"{_ALL_GATHER} {_EP2} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0",
    ),
    (_DEEPSEEK, f"{_ALL_TO_ALL} {_EP2} {_PP2} --moe-permute-fusion"),
    (_DEEPSEEK, f"{_ALL_TO_ALL} --mtp-num-layers 1"),
    (_DEEPSEEK, f"{_ALL_GATHER} {_TP2}"),
    (
        _DEEPSEEK,
        f"{_ALL_TO_ALL} --recompute-granularity selective --recompute-modules shared_experts",
    ),
    (_DEEPSEEK, f"{_HYBRIDEP} {_EP2} {_TP2} --expert-tensor-parallel-size 1 --mtp-num-layers 1"),
    (_DEEPSEEK, f"{_ALL_TO_ALL} {_EP2} {_PP2} {_OVERLAP} --mtp-num-layers 1"),
    (_QWEN, f"{_ALL_GATHER} {_EP2}"),
    (_QWEN, f"{_ALL_GATHER} --use-transformer-engine-op-fuser"),
    (_QWEN, f"{_ALL_TO_ALL} --moe-router-load-balancing-type global_aux_loss"),
)
_REFUSED = (
    (
        _MIXTRAL,
        f"{_ALL_TO_ALL} {_ROOM} --moe-router-load-balancing-type sinkhorn",
        "sinkhorn: sinkhorn iterates until a value that it reads on the host is small",
    ),
    (
        _DEEPSEEK,
        f"{_ALL_TO_ALL} {_EP2} {_OVERLAP} --mtp-num-layers 1",
        f"{_OVERLAP}: graphs train without it",
    ),
    (
        _QWEN,
        f"{_ALL_TO_ALL} --moe-paged-stash",
        "Python state, frozen in a replay; --cuda-graph-stash has the same purpose",
    ),
)
"""`test_moe_drops` and `test_hybridep` have the rules of all experts."""


def _parsed(recipe: str, more: str) -> argparse.Namespace:
    return megatron_parser().parse_args(f"{_GRAPHS} {_BASE} {recipe} {more}".split())


@pytest.mark.parametrize(("recipe", "more"), _TAKEN)
def test_recipes_are_taken_as_they_are(recipe: str, more: str) -> None:
    assert settle_arguments(_parsed(recipe, more), on_cpu=False) is not None


@pytest.mark.parametrize(("recipe", "more", "message"), _REFUSED)
def test_recipes_are_refused_with_a_reason(recipe: str, more: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        settle_arguments(_parsed(recipe, more), on_cpu=False)
    assert message in str(error.value)
