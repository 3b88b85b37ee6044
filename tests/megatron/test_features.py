"""Model features: chunk graphs equal eager training to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from extended_config import config_from_mapping
from in_process import Trained
from refused import refused

from chunkgraph.engine import CaptureOptions
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import versions
from chunkgraph.megatron.features.tracked_losses import SparseAttention, constants_on_device

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(200)]

_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_FOUR_LAYERS = {**_DROPOUT, "num_layers": 4}
_LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "apply_rope_fusion": False,
}


_SPARSE = {
    **_LATENT,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 4,
    "dsa_indexer_loss_coeff": 0.1,
    "add_bias_linear": False,
}


def _check(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        assert result["num_parameters_compared"] > 5_000, name
        assert len({s["loss_chunk"] for s in result["steps"]}) == len(result["steps"]), name
        assert all(step["replays"] > 0 for step in result["steps"][1:]), name


def _in_scope(scope: str, case: dict[str, Any]) -> dict[str, Any]:
    config = case["config"]
    capture = {**config.get("capture", {}), "scope": scope}
    return {**case, "config": {**config, "capture": capture}}


@pytest.fixture
def in_both_scopes(once: Callable[..., Any]) -> Callable[..., dict[str, dict[str, Any]]]:
    """Return every case in both scopes; with an older release of Megatron in one of them."""

    def double(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        in_scopes = [
            {f"{name}_{scope}": _in_scope(scope, case) for name, case in cases.items()}
            for scope in ("block", "chunk")
        ]
        both: dict[str, dict[str, Any]] = {}
        for index, pair in enumerate(zip(*(scope.items() for scope in in_scopes), strict=True)):
            both |= [pair[index % 2]]
            both |= once(dict([pair[1 - index % 2]]))
        return both

    return double


def _alternately(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return every case in one of the scopes, in turn: cases differ inside the blocks."""
    return {
        name: _in_scope(("chunk", "block")[index % 2], case)
        for index, (name, case) in enumerate(cases.items())
    }


@pytest.mark.every_release
def test_one_rank(
    run_equal: Callable[..., Any],
    make_config: Callable[..., Any],
    in_both_scopes: Callable[..., Any],
) -> None:
    """Parameters that do not train, under DDP and without it."""
    cases = {
        "token_prediction": {
            "config": make_config(
                model={**_DROPOUT, "num_layers": 2},
                train={"num_microbatches": [2, 3, 1]},
                capture={"verify": "poison"},
            ),
            "transformer_options": {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3},
        },
        "frozen_parts": {
            "config": make_config(model=_FOUR_LAYERS),
            "frozen": [r"embedding", r"layers\.1\.", r"layers\.2\..*bias", r"final_layernorm"],
        },
        "frozen_no_ddp": {
            "config": make_config(model=_FOUR_LAYERS, train={"use_ddp": False}),
            "frozen": [r"layers\.3\.", r"output_layer"],
        },
    }
    _check(run_equal(in_both_scopes(cases), 1))


@pytest.mark.skipif(
    metadata.version("megatron-core").startswith("0.16"),
    reason="0.16's multi-latent attention cannot be built without Transformer Engine",
)
def test_latent_attention(run_equal: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """Multi-latent attention with RoPE and with YARN."""
    cases = {
        "latent_rope": {
            "config": make_config(
                model={**_DROPOUT, "layer_spec": "user_specs:latent"}, capture={"verify": "poison"}
            ),
            "transformer_options": {**_LATENT, "rope_type": "rope"},
        },
        "latent_yarn": {
            "config": make_config(model={**_DROPOUT, "layer_spec": "user_specs:latent"}),
            "transformer_options": {**_LATENT, "rope_type": "yarn", "rotary_scaling_factor": 4},
        },
    }
    _check(run_equal(_alternately(cases), 1))


@pytest.mark.slow
@pytest.mark.every_release
def test_two_ranks(
    run_equal: Callable[..., Any],
    make_config: Callable[..., Any],
    in_both_scopes: Callable[..., Any],
) -> None:
    """Sequence parallelism, and a pipeline with a frozen embedding or a frozen stage."""
    cases = {
        "sequence_parallel": {
            "config": make_config(
                model={
                    **_DROPOUT,
                    "num_layers": 2,
                    "layer_spec": "user_specs:split_sequences_2",
                },
                pipeline={"tensor_model_parallel_size": 2},
                capture={"verify": "poison"},
            ),
            "transformer_options": {"sequence_parallel": True},
        },
        "token_prediction": {
            "config": make_config(
                model={
                    **_DROPOUT,
                    "num_layers": 2,
                    "untie_embeddings_and_output_weights": False,
                },
                pipeline={"pipeline_model_parallel_size": 2},
                train={"num_microbatches": [3, 1, 4]},
            ),
            "transformer_options": {"mtp_num_layers": 1},
        },
        "frozen_embedding": {
            "config": make_config(
                model=_FOUR_LAYERS,
                pipeline={"pipeline_model_parallel_size": 2},
                train={"num_microbatches": [4, 1, 3], "overlap_grad_reduce": True},
            ),
            "frozen": [r"embedding", r"decoder\.layers\.0\."],
        },
    }
    _check(run_equal(in_both_scopes(cases), 2))


def _metrics(
    device: Any, config: Any, options: dict[str, Any], log: Any, **graph_options: Any
) -> list[dict[str, Any]]:
    """Return the metrics in Megatron's ``log`` after each of three steps."""
    graphs = None
    if graph_options:
        verify = CaptureOptions(verify=graph_options.pop("verify", "none"))
        graphs = {"options": verify, **graph_options}
    model = Trained(device, config, graphs, transformer_options=options)
    tracker, seen = log.tracker, []
    tracker.clear()
    for step, count in enumerate((2, 3, 1)):
        model.step(step, count)
        seen.append(
            {n: v.tolist() if hasattr(v, "tolist") else v is None for n, v in tracker.items()}
        )
        clean = getattr(log, "clean_metrics_in_tracker", None)
        (clean or log.clean_loss_in_tracker)()
    if graphs is not None:
        assert model.graphs.counters.replays == 4
        model.graphs.detach()
    return seen


def _check_metrics(device: Any, config: Any, options: dict[str, Any], log: Any) -> None:
    eager = _metrics(device, config, options, log)
    assert all(any(isinstance(v, list) and v[0] > 0 for v in step.values()) for step in eager)
    for graph_options in ({"scope": "chunk"}, {"scope": "block"}):
        assert _metrics(device, config, options, log, **graph_options) == eager
    # Eager passes next to replays do not count.
    assert _metrics(device, config, options, log, scope="chunk", verify="shadow") == eager


def test_metrics_of_token_prediction_go_on(one_rank: Any, config: Any) -> None:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    _check_metrics(one_rank, config, {"mtp_num_layers": 1}, MTPLossLoggingHelper)


def _sparse(make_config: Callable[..., Any], **sections: Any) -> dict[str, Any]:
    return make_config(  # type: ignore[no-any-return]
        model={
            "num_layers": 2,
            "normalization": "RMSNorm",
            "params_dtype": "bfloat16",
            "layer_spec": "attention_specs:sparse",
        },
        **sections,
    )


@pytest.mark.slow
def test_sparse_attention(run_equal: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    """The scale of the indexers' loss changes with the number of microbatches."""
    train = {"num_microbatches": [2, 1, 3]}
    cases = {
        "block": _sparse(make_config, train=train, capture={"verify": "poison"}),
        "chunk": _sparse(make_config, train=train, capture={"scope": "chunk", "verify": "shadow"}),
    }
    _check(
        run_equal({n: {"config": c, "transformer_options": _SPARSE} for n, c in cases.items()}, 1)
    )
    pipeline = {"pipeline_model_parallel_size": 2}
    staged = _sparse(make_config, train={"num_microbatches": [3, 1, 4]}, pipeline=pipeline)
    _check(run_equal({"pp2": {"config": staged, "transformer_options": _SPARSE}}, 2))


def test_metrics_of_sparse_attention_go_on(one_rank: Any, make_config: Callable[..., Any]) -> None:
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossLoggingHelper,
    )

    config = config_from_mapping(_sparse(make_config))
    _check_metrics(one_rank, config, _SPARSE, DSAIndexerLossLoggingHelper)


def _indexer_grads(device: str) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return a function that runs the loss of an indexer, forward and backward."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    torch.manual_seed(1)
    rows, batch, heads, width = 8, 2, 2, 16
    shapes = [(heads, width), (heads,), (width,), (heads, width), (heads, width)]
    values = [torch.randn(rows, batch, *s, device=device, requires_grad=True) for s in shapes]
    group = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))

    def run() -> tuple[torch.Tensor, ...]:
        q, weights, k, *attention = values
        query, key = (value.detach() for value in attention)
        _, loss = dsa.FusedDSAIndexerLoss.apply(
            q, weights, k, query, key, 0.25, 4, 0.1, None, False, group
        )
        return torch.autograd.grad(loss, (q, weights, k))

    return run


def test_a_constant_of_the_indexers_loss_is_made_on_the_device() -> None:
    run = _indexer_grads("cpu")
    expected = run()
    with (
        mock.patch.object(torch, "tensor", side_effect=AssertionError("from the host")),
        pytest.raises(AssertionError, match="from the host"),
    ):
        run()
    with (
        constants_on_device(),
        mock.patch.object(torch, "tensor", side_effect=AssertionError("from the host")),
    ):
        result = run()
    assert all(map(torch.equal, result, expected))


@pytest.mark.gpu
def test_a_gpu_captures_the_indexers_loss() -> None:
    run = _indexer_grads("cuda")
    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with constants_on_device(), torch.cuda.graph(graph):
        result = run()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, result, expected))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_parallel_size": 2}, "context_parallel_size=2 with experimental_attention_var"),
        ({"dsa_indexer_topk_freq": 4}, "dsa_indexer_topk_freq=4: layers share their choice"),
        ({"dsa_kernel_backend": "tilelang"}, "dsa_kernel_backend='tilelang': its kernels are"),
        ({"packed": True}, "experimental_attention_variant='dsa' with packed"),
    ],
)
def test_what_sparse_attention_cannot_go_with_is_named(
    changes: dict[str, Any], message: str
) -> None:
    assert refused(SparseAttention.rules, _SPARSE) == []
    (reason,) = refused(SparseAttention.rules, {**_SPARSE, **changes})
    assert message in reason
    assert refused(SparseAttention.rules, changes) == []


@pytest.mark.every_release
def test_sparse_attention_of_earlier_releases_is_refused() -> None:
    site: Any = SimpleNamespace(config=SimpleNamespace(experimental_attention_variant="dsa"))
    if str(versions()["megatron_core"]) >= "0.19":
        SparseAttention.prepare(site, ExitStack())
        return
    with pytest.raises(ConfigError, match=r"megatron-core 0\.1\d.* are untested"):
        SparseAttention.prepare(site, ExitStack())
