"""Arguments, options and public attributes of `ChunkGraphs`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toys import Apply

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs, Host
from chunkgraph.errors import ConfigError
from chunkgraph.graphs import RecorderBackend
from chunkgraph.slots import plan_slots


class Stage(nn.Module):
    """A stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Scale a linear map."""
        return self.linear(hidden) * scale


def train(graphs: ChunkGraphs, num_steps: int = 2) -> None:
    for _ in range(num_steps):
        with graphs.step(1):
            graphs.callables[0](torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("chunks", [nn.Sequential(nn.Linear(4, 4)), [Stage()]])
@pytest.mark.parametrize("num_slots", [2, [2]])
def test_one_module_and_one_number_of_slots(chunks: Any, num_slots: Any) -> None:
    graphs = ChunkGraphs(chunks, num_slots)
    train(graphs)
    assert graphs.report.num_slots == (2,)


@pytest.mark.parametrize(
    ("chunks", "named"),
    [
        (lambda x: x, r"Chunk 0 is <function .*Chunk\(forward=function, parameters="),
        ([Stage(), None], "Chunk 1 is None"),
        ([], "There are no chunks"),
        (Chunk.from_module(Stage(), "it", program="split"), "it: program is 'split'. Pass FORWARD"),
    ],
)
def test_what_is_no_chunk_is_refused(chunks: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ChunkGraphs(chunks, 1)


@pytest.mark.parametrize("num_slots", [[0], [2, 2]])
def test_what_is_no_slot_count_is_refused(num_slots: Any) -> None:
    with pytest.raises(ConfigError, match=r"for 1 chunks.*ChunkGraphs.for_schedule"):
        ChunkGraphs(Stage(), num_slots)


def test_a_function_with_its_parameters_is_a_chunk() -> None:
    stage = Stage()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return stage(hidden).tanh()

    chunk = Chunk(forward=forward, parameters=tuple(stage.parameters()), label="stage")
    graphs = ChunkGraphs(chunk, 1)
    train(graphs)
    assert graphs.counters.replays == 1


@pytest.mark.parametrize(("rank", "num_slots"), [(0, 4), (3, 1)])
def test_slots_come_from_the_schedule(rank: int, num_slots: int) -> None:
    graphs = ChunkGraphs.for_schedule("1f1b", Stage(), rank=rank, num_ranks=4)
    train(graphs)
    assert graphs.report.num_slots == (num_slots,)


@pytest.mark.parametrize("shared", [False, True])
def test_interleaved_chunks_have_slots_of_their_own_or_share_them(shared: bool) -> None:
    graphs = ChunkGraphs.for_schedule(
        "interleaved",
        [Stage(), Stage()],
        rank=1,
        num_ranks=2,
        options=CaptureOptions(shared_slots=shared),
    )
    graphs.capture([torch.ones(2, 4)] * 2)
    plan = plan_slots(2, 2, rank=1)
    assert graphs.report is not None
    expected = (plan.peak_in_flight,) * 2 if shared else plan.slots_per_chunk
    assert graphs.report.num_slots == expected


def test_a_schedule_that_is_unknown_or_unbounded_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown schedule '1F1B'.*Did you mean '1f1b'"):
        ChunkGraphs.for_schedule("1F1B", Stage())
    with pytest.raises(ConfigError, match="max_num_microbatches"):
        ChunkGraphs.for_schedule("gpipe", Stage(), num_ranks=2)
    graphs = ChunkGraphs.for_schedule("gpipe", Stage(), num_ranks=2, max_num_microbatches=3)
    assert "3 slots" in repr(graphs)


def test_graphs_say_what_they_are() -> None:
    graphs = ChunkGraphs([Stage()], [2], backend=RecorderBackend())
    assert repr(graphs) == "<ChunkGraphs of chunk 0 with 2 slots; captured: False; Counters()>"


def test_generators_are_declared_in_a_host() -> None:
    generator = torch.Generator().manual_seed(3)
    graphs = ChunkGraphs(
        Apply(
            lambda m, x: x * m.scale * torch.rand(2, generator=generator),
            scale=nn.Parameter(torch.ones(2)),
        ),
        1,
        backend=RecorderBackend(),
        host=Host([generator]),
    )
    state = generator.get_state()
    graphs.capture([torch.ones(1, 2)])
    assert torch.equal(generator.get_state(), state)
    with graphs.step(1):
        output = graphs.callables[0](torch.ones(1, 2))
        output.sum().backward()
    expected = torch.rand(2, generator=torch.Generator().manual_seed(3))
    assert torch.equal(output.detach(), expected[None])


def test_a_module_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"chunk 0: the parameters are on no device\. Put all"):
        ChunkGraphs([nn.Tanh()], [1])


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"verify": "Shadow"}, r"verify is 'Shadow'.*Did you mean 'shadow'\?"),
        ({"on_failure": "warn"}, "on_failure is 'warn'; it must be 'raise' or 'eager'"),
        ({"num_warmup_steps": -3}, "num_warmup_steps is -3; it must be a whole number, 0 or"),
        ({"num_verify_steps": -1}, "num_verify_steps is -1.*or None for all steps"),
        ({"shared_slots": "no"}, "shared_slots is 'no'; it must be True or False"),
    ],
)
def test_options_that_cannot_be_are_refused(option: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CaptureOptions(**option)


def test_memset_kernels_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, is_on in (("0", False), ("OFF", False), ("", True), ("true", True)):
        monkeypatch.setenv("CHUNKGRAPH_MEMSET_KERNELS", text)
        assert CaptureOptions().memset_kernels is is_on
    monkeypatch.setenv("CHUNKGRAPH_MEMSET_KERNELS", "never")
    with pytest.raises(ConfigError, match=r"MEMSET_KERNELS is 'never'\. Set it to one of 1, tr"):
        CaptureOptions()
