"""Experts on packed sequences: rows after the documents are routed nowhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_cases import EXPERTS
from extended_config import config_from_mapping
from packed_flights import SHAPE, differing, packed_batch
from poison import Poisoned

from chunkgraph.engine import StepPlan
from chunkgraph.errors import ConfigError, SlotError
from chunkgraph.megatron import attach, keep_padding_from_experts
from chunkgraph.megatron.attachment import config_of
from chunkgraph.megatron.features.experts.feature import dropped_tokens
from chunkgraph.megatron.features.experts.padding import rows_within_capacity
from chunkgraph.megatron.features.experts.state import forget_expert_metrics, take_expert_metrics
from chunkgraph.packing import PackedShape
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import seed_everything

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(100)]

# Two microbatches each; graphs are captured with the first pair.
_PACKINGS = [
    [[10, 8, 6], [32]],
    [[5, 5, 5, 5, 5], [1, 20]],
    [[1], [16, 16]],
    [[3, 1, 1, 1, 7], [31]],
]
_DROPPING = {"moe_expert_capacity_factor": 1.0, "token_drops": "count"}
_BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
_CASES: dict[str, dict[str, Any]] = {
    "dropping": _DROPPING,
    "by_position": {**_DROPPING, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "biased": {**_BIASED, "moe_shared_expert_intermediate_size": 32},
    "everywhere": {"moe_router_load_balancing_type": "global_aux_loss"},
    "allgather": {**_DROPPING, "moe_token_dispatcher_type": "allgather"},
    "dropless": {**_BIASED, "moe_router_topk": 3, "moe_expert_capacity_factor": None},
    "dropless_gathered": {
        "moe_expert_capacity_factor": None,
        "moe_token_dispatcher_type": "allgather",
    },
    "dropless_sharded": {**_BIASED, "moe_expert_capacity_factor": None},
}
_OPTIONS = {"by_position": {"moe_token_drop_policy": "position"}}


@pytest.fixture(autouse=True)
def scale(one_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the process's scale of router losses, which no schedule sets here."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)


class _Model:
    """Two layers with experts, from the same seed every time.

    Args:
        graphs: arguments of `attach`; None: eager on padded rows; False: as Megatron made it.
    """

    def __init__(
        self,
        device: Any,
        make_config: Callable[..., dict[str, Any]],
        graphs: dict[str, Any] | bool | None,
        case: str = "dropping",
    ) -> None:
        config = config_from_mapping(
            make_config(
                model={
                    "layer_spec": "user_specs:packed_experts",
                    "num_layers": 2,
                    "swiglu": True,
                    "normalization": "LayerNorm",
                },
                moe={
                    **EXPERTS,
                    "moe_expert_capacity_factor": 2.0,
                    "moe_aux_loss_coeff": 0.5,
                    "moe_z_loss_coeff": 0.1,
                    **_CASES[case],
                },
                train={
                    "micro_batch_size": 1,
                    "use_distributed_optimizer": case.endswith("sharded"),
                },
                packing={"max_packed_seqs": SHAPE.max_packed_seqs, "max_packed_tokens": 32},
            )
        )
        forget_expert_metrics()
        seed_everything(1, device)
        chunks = build_model(config, device, transformer_options=_OPTIONS.get(case))
        self.chunk: Any = chunks[0]
        for module in self.chunk.modules():
            if hasattr(module, "expert_bias") and module.expert_bias is not None:
                module.expert_bias[:2] = torch.tensor([20.0, 10.0])  # two of the experts get all
        self.layers = [m for m in self.chunk.modules() if type(m).__name__ == "MoELayer"]
        self.graphs: Any = None
        self.close: Callable[[], None] = lambda: None
        if isinstance(graphs, dict):
            self.graphs = attach(
                chunks, num_slots=[2], packing=SHAPE, **{"token_drops": "count", **graphs}
            )
            self.close = self.graphs.detach
        elif graphs is None:
            self.close = keep_padding_from_experts(chunks, config_of(self.chunk))

    def step(
        self, packings: list[list[int]], *, rows: int | None = 32, mask: bool = True
    ) -> dict[str, torch.Tensor]:
        """Run both microbatches; return losses of tokens, gradients, metrics and counts."""
        for parameter in self.chunk.parameters():
            parameter.main_grad.zero_()

        def flight(**_: Any) -> dict[str, torch.Tensor]:
            results, outputs = {}, []
            for number, lengths in enumerate(packings):
                batch = _batch(lengths, number, rows)
                is_token = ~batch["padding_mask"]
                if not mask:
                    del batch["padding_mask"]
                output = self.chunk(**batch)
                results[f"losses {number}"] = output.detach()[is_token].clone()
                outputs.append(torch.where(is_token, output, 0.0).sum())
            for output in outputs:
                output.backward()
            return results

        run = flight
        if self.graphs is not None:
            run = self.graphs.wrap_forward_backward(flight)
            results = run(num_microbatches=len(packings), packings=packings, data_iterator=None)
        else:
            results = run()
        results.update({n: p.main_grad.clone() for n, p in self.chunk.named_parameters()})
        results.update({n: b.clone() for n, b in self.chunk.named_buffers()})
        taken = take_expert_metrics()
        results.update({n: torch.tensor(v) for n, v in taken.items()})
        return results


def _batch(lengths: list[int], seed: int, rows: int | None = 32) -> dict[str, Any]:
    batch = packed_batch(lengths, seed, PackedShape(6, sum(lengths) if rows is None else rows))
    return {"padding_mask": ~batch.pop("is_counted"), **batch}


@pytest.mark.slow
@pytest.mark.every_release
@pytest.mark.parametrize(
    ("case", "scope"),
    [
        ("dropping", "block"),
        ("dropping", "chunk"),
        ("by_position", "chunk"),
        ("biased", "block"),
        ("everywhere", "chunk"),
        ("allgather", "block"),
        ("dropless", "chunk"),
        ("dropless_gathered", "block"),
        ("dropless_sharded", "chunk"),
    ],
)
def test_packings_never_seen_at_capture(
    one_rank: Any, make_config: Any, case: str, scope: str
) -> None:
    results = []
    dropped = 0
    for graphs in (None, {"scope": scope}):
        model = _Model(one_rank, make_config, graphs, case)
        results.append([model.step(packings) for packings in _PACKINGS])
        if model.graphs is not None:
            assert model.graphs.counters.capture_sessions == 1
            assert model.graphs.counters.replays == 6
            dropped = sum(dropped_tokens(model.graphs, wait=True).values())
        model.close()
    for eager, chunk in zip(*results, strict=True):
        assert all(value.isfinite().all() for value in eager.values())
        assert differing(eager, chunk) == []
    assert (dropped > 0) == (_CASES[case].get("moe_expert_capacity_factor") is not None)


@pytest.mark.parametrize(
    "case",
    ["dropping", "biased", "everywhere", "dropless", "dropless_gathered", "dropless_sharded"],
)
def test_padding_does_not_change_the_mathematics(
    one_rank: Any, make_config: Any, case: str
) -> None:
    """Equal, up to rounding, to unmodified Megatron on rows that all hold a token.

    Compares dropped tokens, router losses and their metrics, and counts for the expert bias.
    """
    plain = _Model(one_rank, make_config, False, case)
    without = [plain.step(packings, rows=None, mask=False) for packings in _PACKINGS]
    model = _Model(one_rank, make_config, {"scope": "chunk"}, case)
    padded = [model.step(packings) for packings in _PACKINGS]
    model.close()
    for expected, actual in zip(without, padded, strict=True):
        assert expected.keys() == actual.keys()
        for name, value in expected.items():
            scale = value.abs().max().item()
            assert torch.allclose(actual[name], value, rtol=1e-4, atol=1e-5 * scale), name
            if "tokens_per_expert" in name:
                assert torch.equal(actual[name], value), name


def _poison(model: _Model, poison: float) -> None:
    """Poison padding rows of the experts' inputs, and of the gradients of their outputs."""
    value = torch.tensor(poison)

    def spoil_input(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden = kwargs.pop("hidden_states", args[0] if args else None)
        rows = kwargs["padding_mask"].transpose(0, 1)[..., None]
        return (hidden.masked_fill(rows, poison),), kwargs

    def spoil_grad(_: Any, _args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        rows = kwargs["padding_mask"].transpose(0, 1)[..., None]
        return (Poisoned.apply(result[0], rows, value), *result[1:])

    for hook in (spoil_input, spoil_grad):
        hook.__module__ = "chunkgraph"  # attach() refuses unknown hooks
    for layer in model.layers:
        layer.register_forward_pre_hook(spoil_input, with_kwargs=True, prepend=True)
        layer.register_forward_hook(spoil_grad, with_kwargs=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dropping", "biased", "dropless", "dropless_sharded"])
def test_a_poisoned_tail_reaches_nothing(one_rank: Any, make_config: Any, case: str) -> None:
    """NaN in the experts' padding rows changes no loss, gradient, metric or count."""
    results = []
    for poison in (0.0, math.nan):
        model = _Model(one_rank, make_config, {"scope": "block"}, case)
        _poison(model, poison)
        results.append([model.step(packings) for packings in _PACKINGS])
        assert model.graphs.counters.replays == 6
        model.close()
    for clean, poisoned in zip(*results, strict=True):
        assert all(value.isfinite().all() for value in poisoned.values())
        assert differing(clean, poisoned) == []


def test_the_first_tokens_have_room_by_position() -> None:
    """The capacity depends on the tokens alone, and no expert takes padding."""
    torch.manual_seed(1)
    chosen = torch.zeros(32, 4, dtype=torch.bool)
    chosen = chosen.scatter(1, torch.rand(32, 4).topk(2).indices, True)
    padding = torch.ones(32, dtype=torch.bool)
    padding[torch.randperm(32)[:24]] = False
    chosen &= ~padding[:, None]
    kept = rows_within_capacity(torch.rand(32, 4) * chosen, chosen, padding, 2, 0.5, "position")
    assert not kept[padding].any()
    for expert in range(4):
        assert (
            kept[:, expert].nonzero().flatten().tolist()[:6]
            == (chosen[:, expert].nonzero().flatten().tolist()[:6])
        )


def test_a_forward_step_without_the_mask_is_reported(one_rank: Any, make_config: Any) -> None:
    model = _Model(one_rank, make_config, {})
    with pytest.raises(ConfigError, match=r"Layer 1 .*without padding_mask.*every pipeline stage"):
        model.step(_PACKINGS[0], mask=False)
    model.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe_permute_fusion": True}, "moe_permute_fusion=True with packed sequences: its kernel"),
        ({"moe_router_fusion": True}, "moe_router_fusion=True with packed sequences: its kernel"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, "do not support padding"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "do not support padding"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    from types import SimpleNamespace

    with pytest.raises(ConfigError, match=message):
        keep_padding_from_experts([], SimpleNamespace(num_moe_experts=4, **options))


def test_a_release_whose_routers_know_no_padding_is_refused_by_name(
    one_rank: Any, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    def forward(self: Any, input: torch.Tensor) -> Any:  # noqa: A002
        raise NotImplementedError

    monkeypatch.setattr(TopKRouter, "forward", forward)
    with pytest.raises(ConfigError, match=r"megatron-core 0\.\d+.*TopKRouter take no padding_mask"):
        _Model(one_rank, make_config, {})


def test_no_step_is_announced_while_one_runs_that_may_run_again(
    one_rank: Any, make_config: Callable[..., dict[str, Any]]
) -> None:
    model = _Model(one_rank, make_config, {"token_drops": "rerun"})
    with (
        model.graphs.engine.step(1, plan=StepPlan(misfit="")),
        pytest.raises(SlotError, match=r"may run again.*Announce it after that step"),
    ):
        model.graphs.announce([[3]])
    model.graphs.announce([[3]])
    model.close()


def test_more_room_is_enough_for_the_same_documents(
    one_rank: Any, make_config: Callable[..., dict[str, Any]]
) -> None:
    """An expert's room depends on tokens: padding rows must not make loads look balanced."""
    model = _Model(one_rank, make_config, {"token_drops": "rerun"})
    for _ in range(5):
        model.step([[5, 4], [1]])
    # The first step ran eagerly; the graphs are captured with its room.
    assert model.graphs.counters.overflow_reruns["expert capacity"] == 1
    assert model.graphs.counters.recaptures == []
    # One token has room at any factor, and needs no more.
    assert model.layers[0].config.moe_expert_capacity_factor < 2.0
    model.close()
