"""Banks that cannot be captured, and ranks that stop together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from thread_ranks import Agreeing, run_ranks
from torch import nn
from toys import all_equal

from chunkgraph.engine import Banks, ChunkGraphs, StepPlan
from chunkgraph.engine.joint_capture import Lockstep, StoppedElsewhere
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import GraphBackend

WIDTH = 4
BANKS = ("large", "middle", "small")
HOST_READ = "(__float__ reads a tensor on the host|not permitted when stream is capturing)"
ROWS = {"large": 6, "middle": 6, "small": 2}  # two banks differ in an option alone


class Mixed(nn.Module):
    """Reads a number on the host in ``faulty`` banks, so that their capture fails."""

    def __init__(self, faulty: Sequence[str] = ()) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.faulty = set(faulty)

    def forward(self, x: torch.Tensor, bank: str) -> torch.Tensor:
        h = torch.tanh(self.inner(x))
        h = h * 2 if bank == "middle" else h
        y = x + self.outer(self.dropout(h))
        if bank in self.faulty:
            float(y.detach().sum())
        return y


def derive(_c: int, args: tuple[Any, ...], kwargs: dict[str, Any], source: Any, target: Any) -> Any:
    (x,) = args
    rows = torch.ones(ROWS[target], WIDTH, device=x.device).requires_grad_(x.requires_grad)
    return (rows,), {**kwargs, "bank": target}


def new_module(device: torch.device, faulty: Sequence[str] = ()) -> Mixed:
    torch.manual_seed(5)
    return Mixed(faulty).to(device)


def new_graphs(module: Mixed, backend: GraphBackend) -> ChunkGraphs:
    return ChunkGraphs(
        [module],
        [3],
        backend=backend,
        banks=Banks(BANKS, derive, drops_failed=True),
        takes_misfits=True,
    )


def test_what_was_dropped_is_tried_again_after_a_release(backend: GraphBackend) -> None:
    """Its part that was captured does not disturb the other banks."""
    module = new_module(backend.device, ["large"])
    graphs = new_graphs(module, backend)

    def run_one(bank: str, call: Any = graphs.callables[0]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, ROWS[bank] * WIDTH, device=backend.device).view(-1, WIDTH)
        y = call(x.requires_grad_(), bank=bank)
        module.zero_grad()
        y.square().sum().backward()
        return [y.detach().clone(), *(p.grad.clone() for p in (x, *module.parameters()))]

    with graphs.step(1, plan=StepPlan(["small"], misfit="")):
        run_one("small")
    with (
        pytest.warns(UserWarning, match=rf"{HOST_READ}(.|\n)*go on without graphs of large"),
        graphs.step(1, plan=StepPlan(["large"], misfit="")),
    ):
        run_one("large")
    assert graphs.misfit_of(["small", "middle"]) == ""
    for bank in ("small", "middle"):
        with graphs.step(1, plan=StepPlan([bank], misfit="")) as mode_of_step:
            results = run_one(bank)
        assert mode_of_step.value == "replay"
        assert all_equal(results, run_one(bank, module))
    reason = graphs.misfit_of(["small", "large"])
    assert reason == "no graphs of large: its capture failed"
    with graphs.step(1, plan=StepPlan(["large"], misfit=reason)):
        run_one("large")
    assert graphs.counters.missing_banks == {reason: 2}
    assert graphs.counters.fallbacks == {"capture warmup": 1, "no graphs of a bank": 2}
    graphs.release()
    module.faulty.clear()
    for mode in ("eager", "replay"):
        with graphs.step(1, plan=StepPlan(["large"], misfit="")) as mode_of_step:
            run_one("large")
        assert mode_of_step.value == mode
    assert graphs.counters.captures == 6 + 9


def test_the_last_bank_fails_the_session(backend: GraphBackend) -> None:
    graphs = new_graphs(new_module(backend.device, BANKS), backend)
    x = torch.ones(6, WIDTH, device=backend.device, requires_grad=True)
    samples = {key: [derive(0, (x,), {}, key, key)[0] + (key,)] for key in BANKS}
    with (
        pytest.warns(UserWarning, match="All ranks go on without graphs of") as warnings,
        pytest.raises(CaptureError, match=HOST_READ),
    ):
        graphs.capture(samples)
    assert len(warnings) == 2


@pytest.mark.parametrize("fails_at", [None, 0, 2, 5])
def test_ranks_with_different_numbers_of_graphs_end_together(fails_at: int | None) -> None:
    """Rank 1 fails after ``fails_at`` of its six graphs; the others have two and nine."""
    ranks = Agreeing(3)
    ended: dict[int, str] = {}

    def session(rank: int) -> None:
        lockstep = Lockstep(ranks.rank(rank))
        try:
            for number in range((2, 6, 9)[rank]):
                lockstep.begin("large" if number < 3 else "small")
                if rank == 1 and number == fails_at:
                    raise CaptureError
            lockstep.finish()
            ended[rank] = "done"
        except StoppedElsewhere:
            ended[rank] = "stopped"
        except CaptureError:
            lockstep.fail()
            ended[rank] = f"failed in {lockstep.bank}"

    run_ranks(3, session)
    if fails_at is None:
        assert ended == {0: "done", 1: "done", 2: "done"}
    else:
        bank = "large" if fails_at < 3 else "small"
        assert ended == {0: "stopped", 1: f"failed in {bank}", 2: "stopped"}
