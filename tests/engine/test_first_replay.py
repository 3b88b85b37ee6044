"""The model is checked while the device runs the first forward of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.watch.captured_model import CapturedModel
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend


class Counter(nn.Module):
    """Counts rows of zeros, of which there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_zeros", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_zeros += (x == 0).all(1).sum()
        return x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "no state": nn.Tanh,
    "random numbers": lambda: nn.Dropout(0.5),
    "a buffer": lambda: nn.BatchNorm1d(8),
    "an unchanged buffer": Counter,
}


def captured(
    backend: GraphBackend, layer: str, **options: Any
) -> tuple[Any, ChunkGraphs, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), LAYERS[layer](), nn.Softplus()).to(backend.device)
    graphs = ChunkGraphs([module], [2], backend=backend, options=CaptureOptions(**options))
    inputs = torch.randn(4, 8, device=backend.device, requires_grad=True)
    for _ in range(2):
        train(graphs, inputs)
    return module, graphs, inputs


def train(graphs: ChunkGraphs, inputs: torch.Tensor, num_microbatches: int = 2) -> None:
    with graphs.step(num_microbatches):
        for _ in range(num_microbatches):
            graphs.callables[0](inputs).square().sum().backward()


@pytest.mark.parametrize("beta", [2.0, torch.tensor([1.0, 2.0])])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_refused_step_leaves_the_state_as_it_was(
    backend: GraphBackend, layer: str, beta: Any
) -> None:
    module, graphs, inputs = captured(backend, layer)
    device = backend.device

    def state() -> list[torch.Tensor]:
        random = [torch.get_rng_state()]
        if device.type == "cuda":
            random.append(torch.cuda.get_rng_state(device))
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        return [t.clone() for t in (*module.state_dict().values(), *grads, *random)]

    before = state()
    module[2].beta = beta  # which calls do not compare
    with pytest.raises(ReplayMismatchError, match=r"2\.beta"):
        train(graphs, inputs)
    assert all(map(torch.equal, before, state()))

    module[2].beta = 1.0
    train(graphs, inputs)  # the slots are free


@pytest.mark.parametrize(
    ("layer", "num_passes", "order"),
    [
        ("no state", 1, ["replay", "check", "replay"]),
        ("random numbers", 1, ["replay", "check", "replay"]),
        ("a buffer", 1, ["check", "replay", "replay"]),
        ("an unchanged buffer", 1, ["check", "replay", "replay"]),
        ("no state", 0, ["check", "replay", "replay"]),  # what a pass changes is not known
    ],
)
def test_the_model_is_checked_once_the_device_is_busy(
    backend: GraphBackend,
    monkeypatch: pytest.MonkeyPatch,
    layer: str,
    num_passes: int,
    order: list[str],
) -> None:
    _, graphs, inputs = captured(backend, layer_passes)
    assert events_of_a_step(monkeypatch, graphs, inputs) == order


def test_a_verified_step_is_checked_first(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, graphs, inputs = captured(backend, "no state", verify="shadow")
    assert events_of_a_step(monkeypatch, graphs, inputs)[0] == "check"


def events_of_a_step(
    monkeypatch: pytest.MonkeyPatch, graphs: ChunkGraphs, inputs: torch.Tensor
) -> list[str]:
    events: list[str] = []

    def noted(owner: type, name: str, event: str) -> None:
        call = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            events.append(event)
            return result

        monkeypatch.setattr(owner, name, noting)

    noted(CapturedModel, "begin_step", "check")
    graph = graphs._replayer._captured.slots[0][0].forward_graph  # type: ignore[union-attr]
    noted(type(graph), "replay", "replay")
    with graphs.step(2):
        outputs = [graphs.callables[0](inputs) for _ in range(2)]
        of_forwards = list(events)
        for output in outputs:
            output.square().sum().backward()
    return of_forwards


def test_tensors_that_were_moved_are_refused_before_a_replay_reads_them(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, graphs, inputs = captured(backend, "no state")
    weight = next(module.parameters())
    weight.data = weight.data.clone()
    loads: list[Slot] = []
    monkeypatch.setattr(Slot, "load_inputs", lambda slot, _: loads.append(slot))
    with pytest.raises(ReplayMismatchError, match="was moved to other memory"):
        train(graphs, inputs)
    assert not loads


def test_a_step_without_a_forward_checks_the_model_at_its_end(backend: GraphBackend) -> None:
    module, graphs, inputs = captured(backend, "no state")
    train(graphs, inputs, num_microbatches=0)
    module[2].beta = 2.0
    with pytest.raises(ReplayMismatchError, match=r"2\.beta"):
        train(graphs, inputs, num_microbatches=0)
