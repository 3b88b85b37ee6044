"""Extreme loads of experts, their dropped tokens, and refused settings."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping
from in_process import Trained
from refused import refused

from chunkgraph.errors import ReplayMismatchError, TokenDropError
from chunkgraph.launch.hooks import StepMetrics
from chunkgraph.megatron.features.experts import dropless
from chunkgraph.megatron.features.experts.feature import Experts, dropped_tokens
from chunkgraph.megatron.features.experts.room import LOAD_OF, RowCounts
from chunkgraph.megatron.features.experts.state import forget_expert_metrics
from chunkgraph.megatron.rules.experts import MOE_RULES

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(60)]

_COUNTS = (2, 1, 3)
_NUM_TOKENS = 16 * 2  # of a microbatch


class _Run(Trained):
    """A model whose routers prefer the first experts, trained for a few steps.

    Args:
        device: device of this rank.
        config: configuration of the run.
        bias: added to the experts' scores, beginning with the first expert.
        graphs: arguments of `attach`; None trains eagerly.
        model_options: see `build_model`.
    """

    def __init__(
        self,
        device: Any,
        config: Any,
        bias: list[float],
        graphs: dict[str, Any] | None,
        **model_options: Any,
    ) -> None:
        super().__init__(device, config, graphs, **model_options)
        for module in self.chunks[0].modules():
            if getattr(module, "expert_bias", None) is not None:
                module.expert_bias[: len(bias)] = torch.tensor(bias)

    def all_steps(self) -> dict[str, Any]:
        """Return everything that can be compared."""
        from megatron.core.transformer.moe.moe_utils import (
            clear_aux_losses_tracker,
            get_moe_layer_wise_logging_tracker,
        )

        steps = []
        for step, count in enumerate(_COUNTS):
            losses = self.step(step, count, clears=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                metrics = {
                    name: (entry["values"] if isinstance(entry, dict) else entry.values).tolist()
                    for name, entry in get_moe_layer_wise_logging_tracker().items()
                }
                clear_aux_losses_tracker()  # as Megatron's training loop does
            steps.append((losses, metrics))
        return {"steps": steps, "tensors": self.tensors()}


def _make(make_config: Callable[..., dict[str, Any]], **experts: Any) -> Any:
    return config_from_mapping(
        make_config(
            model={"num_layers": 2, "swiglu": True},
            moe={
                "num_moe_experts": 4,
                "moe_ffn_hidden_size": 32,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_aux_loss_coeff": 0.1,
                **experts,
            },
        )
    )


@pytest.mark.parametrize(
    ("top_k", "factor", "dispatcher", "dropped"),
    [
        (2, 2.0, "alltoall", 0),  # two experts get all tokens, two get none
        (2, 1.0, "alltoall", 2 * (_NUM_TOKENS - _NUM_TOKENS // 2)),
        (1, 1.0, "allgather", _NUM_TOKENS - _NUM_TOKENS // 4),  # one expert gets all tokens
        (1, 0.5, "alltoall", _NUM_TOKENS - _NUM_TOKENS // 8),
        (2, None, "alltoall", 0),
        (1, None, "alltoall", 0),
        (1, None, "allgather", 0),
    ],
)
def test_uneven_loads_are_as_in_eager_training_and_every_drop_is_counted(
    one_rank: Any, make_config: Any, top_k: int, factor: float | None, dispatcher: str, dropped: int
) -> None:
    config = _make(
        make_config,
        moe_router_topk=top_k,
        moe_expert_capacity_factor=factor,
        moe_token_dispatcher_type=dispatcher,
        token_drops="count",
    )
    bias = [20.0, 10.0]
    eager = _Run(one_rank, config, bias, None).all_steps()
    run = _Run(one_rank, config, bias, {"token_drops": "count"})
    name = {"alltoall": "all-to-all", "allgather": "all-gather"}[dispatcher]
    metrics = StepMetrics(run.graphs)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Experts had no room")
        chunk = run.all_steps()
    assert run.graphs.counters.replays == sum(_COUNTS[1:])
    gemm = f"torch._grouped_mm (torch {torch.__version__})"
    text = f"dispatch {name}, GEMM {gemm}, room for {_NUM_TOKENS * top_k} rows"
    assert run.graphs.find(Experts).dispatch == (text if factor is None else "")
    metrics.step()
    assert metrics.scalars()["chunk-graphs/dropped-tokens"] == 2 * dropped * sum(_COUNTS)
    assert f" dropped tokens: {2 * dropped * sum(_COUNTS)} |" in metrics.take_line()
    assert dropped_tokens(run.graphs, wait=True) == dict.fromkeys((1, 2), dropped * sum(_COUNTS))
    run.graphs.detach()
    assert chunk["steps"] == eager["steps"]
    assert all(metrics["load_balancing_loss"][0] > 0 for _, metrics in chunk["steps"])
    assert eager["tensors"].keys() == chunk["tensors"].keys()
    different = [n for n, t in eager["tensors"].items() if not torch.equal(t, chunk["tensors"][n])]
    assert different == []


@pytest.mark.slow
@pytest.mark.every_release
def test_steps_run_again_until_sinkhorn_routing_has_enough_rounds(
    one_rank: Any, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dropless, "_FEWEST_ROUNDS", 1)
    softmax = {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
    config = _make(make_config, moe_router_topk=2, moe_aux_loss_coeff=0.0, **softmax)
    options = {"moe_router_load_balancing_type": "sinkhorn"}

    def steps(graphs: dict[str, Any] | None) -> tuple[_Run, list[list[Any]]]:
        run = _Run(one_rank, config, [], graphs, transformer_options=options)
        results = []
        for step in range(6):
            losses = run.step(step, 1 + step % 3)
            results.append([losses, *(p.main_grad.tolist() for p in run.chunks[0].parameters())])
        return run, results

    _, eager = steps(None)
    run, chunk = steps({})
    assert chunk == eager
    counters = run.graphs.counters
    reruns = counters.overflow_reruns["expert capacity"]
    assert 1 < reruns < 5  # after an eager step; the last one has enough
    assert counters.recaptures == ["expert capacity"] * reruns
    assert dropped_tokens(run.graphs, wait=True) == {1: 0, 2: 0}


def test_drops_are_an_error_where_that_is_asked_for_and_reported_once_otherwise(
    one_rank: Any, make_config: Any
) -> None:
    config = _make(make_config, moe_expert_capacity_factor=1.0)
    run = _Run(one_rank, config, [], {"token_drops": "raise"})
    with pytest.raises(TokenDropError, match=r"(?s)layer 1: \d+.*moe_expert_capacity_factor"):
        run.step(0, 2)
    run.graphs.detach()
    run = _Run(one_rank, config, [], {})
    with pytest.warns(UserWarning, match=r"Experts had no room for tokens.*layer"):
        run.step(0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run.step(1, 2)
    run.graphs.detach()
    enough = _make(make_config, moe_expert_capacity_factor=2.0)
    run = _Run(one_rank, enough, [20.0, 10.0], {"token_drops": "raise"})
    run.all_steps()
    assert run.graphs.counters.replays == sum(_COUNTS[1:])


@pytest.mark.every_release
@pytest.mark.parametrize("num_steps", [1, 2], ids=["before the capture", "after the capture"])
def test_metrics_that_were_replaced_are_reported(
    one_rank: Any, make_config: Any, num_steps: int
) -> None:
    run = _Run(one_rank, _make(make_config, moe_expert_capacity_factor=2.0), [], {})
    for step in range(num_steps):
        run.step(step, 1)
    forget_expert_metrics()
    with pytest.raises(ReplayMismatchError, match="load_balancing_loss"):
        run.step(num_steps, 1)


def test_the_scale_of_a_replaced_loss_scaler_reaches_the_graphs(
    one_rank: Any, make_config: Any
) -> None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler as Scaler

    config = _make(make_config, moe_expert_capacity_factor=2.0, moe_aux_loss_coeff=5.0)
    results = []
    for graphs in (None, {}):
        run = _Run(one_rank, config, [], graphs)
        for step in range(3):
            run.step(step, 1, clears=False)
            Scaler.main_loss_backward_scale = torch.full((1,), 3.0)  # another tensor from now on
        run.step(3, 4, clears=False)
        grads = [p.main_grad.clone() for p in run.chunks[0].parameters()]
        results.append(grads)
        if run.graphs is not None:
            run.graphs.detach()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


_HOLDS = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_expert_capacity_factor": 1.5,
    "moe_pad_expert_input_to_capacity": True,
    "moe_token_dispatcher_type": "alltoall",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"moe_expert_capacity_factor": None, "fp8": "hybrid", "fp8_recipe": "tensorwise"},
            "fp8='hybrid' with .* moe_expert_capacity_factor=None: only grouped experts",
        ),
        (
            {"use_transformer_engine_op_fuser": True},
            r"op_fuser=True with moe_expert_capacity_factor=.*: fused operations hold",
        ),
        ({"moe_pad_expert_input_to_capacity": False}, "moe_pad_expert_input_to_capacity=False"),
        ({"moe_expert_capacity_factor": 0.5}, "moe_expert_capacity_factor=0.5: below 1"),
        ({"moe_expert_capacity_factor": 4.5}, r"moe_expert_capacity_factor=4.5: above .*\(4\)"),
        (
            {"moe_token_dispatcher_type": "allgather", "moe_permute_fusion": True},
            "moe_permute_fusion=True",
        ),
        ({"moe_use_legacy_grouped_gemm": True}, "moe_use_legacy_grouped_gemm=True"),
    ],
)
def test_what_a_graph_cannot_hold_of_experts_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    assert refused(MOE_RULES, _HOLDS) == []
    dense = {"num_moe_experts": None, "moe_token_dispatcher_type": "flex"}
    assert refused(MOE_RULES, dense) == []
    (refusal,) = refused(MOE_RULES, {**_HOLDS, **changes})

    assert re.search(message, refusal), refusal


# Counts of rows without room, and the heaviest load.

CPU = torch.device("cpu")


@pytest.mark.every_release
def test_the_heaviest_load_is_relative_to_the_tokens() -> None:
    """Microbatches of several lengths: the longest need not be the least balanced."""
    counts = RowCounts([1], CPU)
    assert counts.take_load() == 0
    counts.add_load(3, torch.tensor(1))
    with counts.measuring():  # a rerun's load that was not taken does not reach the next one
        assert counts.measures
    assert (counts.measures, counts.take_load()) == (False, 0)
    counts.add_load(torch.tensor(0), torch.tensor(0))  # padding alone
    counts.add_load(torch.tensor(4), torch.tensor(3))
    assert counts.take_load() == 3 * LOAD_OF // 4
    for num_tokens, num_rows in ((64, 30), (16, 9), (16, 12), (64, 33), (0, 0)):
        counts.add_load(num_tokens, torch.tensor(num_rows))
    assert counts.take_load() == 12 * LOAD_OF // 16
    counts.add_load(3, torch.tensor(1))
    assert counts.take_load() == LOAD_OF // 3 + 1  # rounded up
    assert counts.take_load() == 0
