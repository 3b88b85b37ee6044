"""Evaluation and log-probability passes of Megatron's schedule replay graphs of their own."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from extended_config import config_from_mapping
from in_process import EXPERTS, Trained

from chunkgraph.engine import CaptureOptions
from chunkgraph.megatron import attach
from chunkgraph.settings import Config

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(150)]

STEPS = "vvtltlvtlv"


def _logits_step(data: Any, chunk: Any) -> Any:
    """Return logits instead of losses, and change them in place, as RL frameworks do."""
    batch = next(data)
    batch = {**batch, "labels": None}
    names = ("position_ids", "attention_mask", "labels")
    logits = chunk(input_ids=batch["tokens"], **{name: batch.get(name) for name in names})

    def log_probs(output: torch.Tensor) -> Any:
        output.div_(0.8)
        return output.new_zeros(()), {"lm loss": output.log_softmax(-1).amax()}

    return logits, log_probs


def _run(model: Trained) -> list[torch.Tensor]:
    """Run steps: t trains, v validates in evaluation mode, l computes logits in training mode."""
    torch.manual_seed(5)
    results = []
    for number, kind in enumerate(STEPS):
        for chunk in model.chunks:
            chunk.train(kind != "v")
        count = 1 + number % 3
        if kind == "t":
            losses = model.step(number, count)
            results += [p.main_grad.clone() for c in model.chunks for p in c.parameters()]
        else:
            forward = {"forward": _logits_step} if kind == "l" else {}
            with torch.no_grad():
                losses = model.step(number, count, clears=False, forward_only=True, **forward)
        results.append(torch.tensor(losses))
        for chunk in model.chunks if kind == "t" else ():
            with torch.no_grad():
                for p in chunk.parameters():
                    p.sub_(p.main_grad, alpha=0.01)
    return results


@pytest.mark.parametrize("scope", ["block", "chunk"])
def test_one_rank(one_rank: torch.device, config: Config, scope: Any) -> None:
    expected = _run(Trained(one_rank, config, None))
    model = Trained(one_rank, config, {"scope": scope})
    got = _run(model)
    assert all(map(torch.equal, got, expected))
    steps = model.graphs.engine.forward_only
    counters = model.graphs.counters
    assert counters.fallbacks == {"forward only": 2, "capture warmup": 1}
    assert (steps.counters.capture_sessions, steps.counters.replayed_steps) == (2, 5)
    assert steps.num_eager_calls == 0


def test_a_copy_of_the_model_computes_with_its_own_weights(
    one_rank: torch.device, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is a reference that is not captured; then weights are replaced after a release."""
    monkeypatch.setitem(copy._deepcopy_dispatch, dist.ProcessGroup, lambda group, _: group)

    def run(graphs: dict[str, Any] | None) -> list[torch.Tensor]:
        model = Trained(one_rank, config, None)
        model.chunks = [copy.deepcopy(model.chunks[0].module)]  # without DDP
        model.chunks[0].zero_grad_buffer = model.chunks[0].zero_grad
        model.chunks[0].config.finalize_model_grads_func = None
        if graphs is not None:
            model.attach(**graphs)
        losses = model.step(0, 1) + model.step(1, 1)
        reference = Trained(one_rank, config, None)
        reference.chunks = [copy.deepcopy(model.chunks[0])]
        if graphs is not None:
            attach(reference.chunks, **graphs).detach()
        for parameter in model.chunks[0].parameters():
            parameter.data.mul_(0.5)
        with torch.no_grad():
            losses += reference.step(1, 1, clears=False, forward_only=True)
        losses += model.step(1, 1)
        if graphs is not None:
            model.graphs.release()
        model.chunks[0].load_state_dict(reference.chunks[0].state_dict(), assign=True)
        losses += model.step(1, 1) + model.step(2, 1)
        if graphs is not None:
            assert model.graphs.counters.replayed_steps == 3
        return [torch.tensor(losses), *(p.grad.clone() for p in model.chunks[0].parameters())]

    assert all(map(torch.equal, run(None), run({"scope": "chunk"})))


def test_features_that_only_train(one_rank: torch.device, make_config: Callable[..., Any]) -> None:
    config = config_from_mapping(make_config(model={"swiglu": True}, moe=EXPERTS))
    model = Trained(one_rank, config, {})
    for number in range(2):
        with torch.no_grad():
            model.step(number, 1, clears=False, forward_only=True)
    assert model.graphs.counters.fallbacks == {"forward only": 2}
    assert "Experts" in model.graphs.engine.forward_only.why_not


def test_tables_live_as_long_as_their_graphs(one_rank: torch.device, config: Config) -> None:
    """A loop clears Megatron's caches and captures again in each cycle."""
    from megatron.core.models.common.embeddings import RotaryEmbedding

    model = Trained(one_rank, config, {"options": CaptureOptions(on_moved_memory="recapture")})
    held = []
    for number in range(5):
        for p in model.chunks[0].parameters():
            p.data = p.data.clone()
        cache: Any = RotaryEmbedding.forward
        cache.cache_clear()
        model.step(number, 1)
        engine = model.graphs.engine
        held += [weakref.ref(engine._captured)] if engine._captured is not None else []
        gc.collect()
    assert len(model.graphs.counters.recaptures) == 3
    assert [ref() is not None for ref in held] == [False] * 3 + [True]
    (of_features,) = [engine._captured.held]
    assert sum(isinstance(own, list) and bool(own) for own in of_features) == 1
