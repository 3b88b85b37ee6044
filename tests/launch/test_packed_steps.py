"""Steps of packed data without processes: their reads, the model's inputs, refusals."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.errors import ConfigError, PackingError
from chunkgraph.launch.packed_steps import OwnDocuments, PackedSteps, ReadAhead, look_ahead
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.packing.documents import documents_of
from chunkgraph.packing import PackedShape

pytestmark = [pytest.mark.megatron, pytest.mark.every_release]

ROWS = 12


def batch(*ends: int, num_counted: int = ROWS, **changes: Any) -> dict[str, Any]:
    """Make a sample as SFTDataset does, with losses in its first rows."""
    offsets = torch.full((1, ROWS + 1), ROWS, dtype=torch.int32)
    offsets[0, 0] = 0
    offsets[0, 1 : len(ends) + 1] = torch.tensor(ends, dtype=torch.int32)
    rows = torch.arange(ROWS)[None]
    sample = {
        "tokens": rows,
        "labels": rows + 1,
        "loss_mask": (rows < num_counted).float(),
        "position_ids": rows,
        "cu_seqlens": offsets,
        "max_seqlen": torch.tensor([max(ends)], dtype=torch.int32),
    }
    return {**sample, **changes}


class Model(nn.Module):
    """Records its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, tokens: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:
        self.seen.append((tokens, packed_seq_params))
        return tokens


def params_of(data: dict[str, Any]) -> Any:
    """Make the parameters as pretrain_gpt.py does."""
    row = data["cu_seqlens"][0]
    row = row[: int((row == data["tokens"].shape[1]).nonzero()[0]) + 1]
    kind = import_megatron("megatron.core.packed_seq_params").PackedSeqParams
    longest = int(data["max_seqlen"].max())
    return kind(
        qkv_format="thd",
        cu_seqlens_q=row,
        cu_seqlens_kv=row,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def forward_step(data: Iterator[dict[str, Any]], model: nn.Module) -> None:
    read = next(data)
    model(read["tokens"], packed_seq_params=params_of(read))


Step = Callable[..., dict[str, Any]]


@pytest.fixture
def models() -> list[Model]:
    return [Model()]


@pytest.fixture
def words() -> list[Any]:
    """Announcements to chunk graphs ahead of steps."""
    return []


@pytest.fixture
def steps() -> list[PackedSteps]:
    """All `PackedSteps` that were made, first to last."""
    return []


@pytest.fixture
def step(models: list[Model], words: list[Any], steps: list[PackedSteps]) -> Iterator[Step]:
    """Run a step with graphs for 4 sequences; return the schedule's arguments."""

    def run(
        batches: Sequence[dict[str, Any]] | None,
        *,
        each: Callable[..., None] = forward_step,
        num_microbatches: int = 2,
        most: int = ROWS,
        buckets: Sequence[float] = (),
        iterators: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        shape = PackedShape(4, most)
        shapes = shape.buckets(buckets)
        by_rows = {s.max_packed_tokens: s for s in shapes}
        graphs: Any = SimpleNamespace(
            buckets=by_rows,
            packed_shapes=tuple(shapes),
            announce=lambda packings: words.append([*packings]),
            withdraw=lambda: words.append("withdrawn"),
        )
        if batches is not None or not steps:  # otherwise a further step of the same run
            steps.append(OwnDocuments(graphs, models, 3))
        arguments: dict[str, Any] = {}

        def schedule(**kwargs: Any) -> None:
            arguments.update(kwargs)
            data = kwargs["data_iterator"]
            for c, model in enumerate(models):
                for _ in range(num_microbatches):
                    each(data[c] if isinstance(data, list) else data, model)

        iterator = iterators if batches is None else iter(batches)
        call = {"data_iterator": iterator, "num_microbatches": num_microbatches}
        call |= {"seq_length": ROWS, "micro_batch_size": 1, **kwargs}
        steps[-1].wrap(schedule)(**call)
        return arguments

    yield run
    for each in steps:
        each.close()


def test_a_step_reads_its_own_microbatches_and_no_more(step: Step) -> None:
    batches = iter([batch(4, 12), batch(3, 5, 12), batch(12)])
    arguments = step(None, iterators=batches)
    assert arguments["packings"] == [(4, 8), (3, 2, 7)]
    assert [next(batches)["max_seqlen"].item()] == [12]
    with pytest.raises(StopIteration):
        step(None, iterators=batches)


def of_megatron(batches: Sequence[dict[str, Any]]) -> Any:
    """Return Megatron's data iterator that replays microbatches."""
    machine = import_megatron("megatron.core.rerun_state_machine")
    return machine.RerunDataIterator(iter(batches))


def test_what_is_looked_at_stays_to_be_read() -> None:
    """Every later reader, and one that rereads, gets it."""
    batches = [batch(n, ROWS) for n in range(1, 5)]
    iterator = of_megatron(batches)
    assert look_ahead([iterator, None], 2) == [deque(batches[:2]), None]
    below = iterator.iterable
    assert isinstance(below, ReadAhead)
    assert next(iterator) is batches[0]
    assert look_ahead([iterator], 3) == [deque(batches[1:])]
    assert iterator.iterable is below
    assert look_ahead([iterator], 4) is None
    assert list(below) == batches[1:]
    with pytest.raises(StopIteration):
        next(iterator)
    assert look_ahead([iter(batches)], 1) is None


def test_an_error_of_the_data_comes_up_where_they_are_read() -> None:
    def read() -> Iterator[dict[str, Any]]:
        yield batch(12)
        raise OSError("a broken disk")

    iterator = of_megatron(read())  # type: ignore[arg-type]
    assert look_ahead([iterator], 2) is look_ahead([iterator], 2) is None
    assert next(iterator)["max_seqlen"] == 12
    for _ in range(2):
        with pytest.raises(OSError, match="broken disk"):
            next(iterator)


@pytest.mark.parametrize("was_announced", [True, False])
def test_an_announcement_of_another_step_is_taken_back(
    step: Step, steps: list[PackedSteps], words: list[Any], was_announced: bool
) -> None:
    """Also on a rank without an announcement: another rank may have made one."""
    iterator = of_megatron([batch(n, 12) for n in range(1, 6)])
    step(None, iterators=iterator)
    steps[0].announce_next(2 if was_announced else 4)
    arguments = step(None, iterators=iterator, num_microbatches=3)
    assert words == [[[(3, 9), (4, 8)]], []][not was_announced] + ["withdrawn"]
    assert arguments["packings"] == [(3, 9), (4, 8), (5, 7)]


@pytest.mark.parametrize("other", ["read", "replaced"])
def test_other_data_than_those_announced_are_an_error(
    step: Step, steps: list[PackedSteps], words: list[Any], other: str
) -> None:
    batches = [batch(n, 12) for n in range(1, 7)]
    iterator = of_megatron(batches)
    step(None, iterators=iterator)
    steps[0].announce_next(2)
    if other == "read":
        next(iterator)
    then = of_megatron(batches[3:]) if other == "replaced" else iterator
    with pytest.raises(ConfigError, match="rank 3: the documents of the step differ from"):
        step(None, iterators=then)


def test_nothing_is_announced_of_wrong_data_or_other_iterators(
    step: Step, steps: list[PackedSteps], words: list[Any]
) -> None:
    """A step reports its own data's errors; nothing is read ahead from a user's iterator."""
    wrong = batch(4, 12, cu_seqlens=torch.tensor([[0, 5, 3, 12]]))
    iterator = of_megatron([batch(12), batch(12), wrong, batch(12)])
    step(None, iterators=iterator)
    steps[0].announce_next(2)
    with pytest.raises(PackingError, match="rank 3, microbatch 0"):
        step(None, iterators=iterator)
    plain = iter([batch(12)] * 3)
    step(None, iterators=plain)
    steps[0].announce_next(1)
    assert words == []
    assert len(list(plain)) == 1


def test_the_model_gets_offsets_of_fixed_shape(step: Step, models: list[Model]) -> None:
    step([batch(4, 12), batch(3, 5, 7, 12)])
    (_, fits), (_, too_many) = models[0].seen
    assert fits.cu_seqlens_q.tolist() == [0, 4, 12, 12, 12]
    assert fits.cu_seqlens_kv is fits.cu_seqlens_q
    assert fits.cu_seqlens_q_padded is None
    # Not as long as all documents together: Megatron's RoPE would expect another kind of table.
    assert fits.max_seqlen_q == fits.max_seqlen_kv == ROWS + 1
    assert too_many.cu_seqlens_q.tolist() == [0, 3, 5, 7, 12]  # the script's packing
    assert too_many.max_seqlen_q == ROWS


def test_empty_documents_and_several_samples(step: Step) -> None:
    """A conversation may have no token; samples are concatenated."""
    two = {name: torch.cat([value, batch(6, 12)[name]]) for name, value in batch(4, 4, 12).items()}
    assert documents_of(two, ROWS, "here").offsets == (0, 4, 4, 12, 18, 24)
    assert documents_of(two, ROWS, "here").lengths == (4, 8, 6, 6)
    arguments = step([batch(4, 4, 12), batch(12)])
    assert arguments["packings"] == [(4, 8), (12,)]


def test_rows_that_no_loss_needs_are_left_out(step: Step, models: list[Model]) -> None:
    whole = batch(2, 4, 12, num_counted=5)
    arguments = step([whole, batch(3, 12, num_counted=7)], most=8, buckets=(6,))
    assert whole["tokens"].shape == (1, ROWS)  # the data set's own
    assert arguments["packings"] == [(2, 2, 2), (3, 5)]
    assert arguments["seq_length"] == 8
    (short, params), (long, _) = models[0].seen
    assert (short.shape, long.shape) == ((1, 6), (1, 8))
    assert params.cu_seqlens_q.tolist() == [0, 2, 4, 6, 6]
    # A step with a microbatch that needs more rows keeps all rows.
    arguments = step([batch(4, 12, num_counted=2), batch(12, num_counted=9)], most=8, buckets=(6,))
    assert arguments["packings"] == [(4, 8), (12,)]
    assert arguments["seq_length"] == ROWS
    # A microbatch of too many documents has the rows of one that does not fit.
    arguments = step([batch(1, 2, 3, 12, num_counted=5), batch(12, num_counted=0)], buckets=(6,))
    assert arguments["packings"] == [(1, 1, 1, 9), (6,)]
    arguments = step([batch(1, 2, 6, 7, 12, num_counted=5), batch(12)], buckets=(6,))
    assert arguments["packings"] == [(1, 1, 4), (12,)]  # three documents are left


def _reads_nothing(_data: Any, model: nn.Module) -> None:
    model(torch.zeros(1), packed_seq_params=params_of(batch(4, 12)))


def _calls_twice(data: Any, model: nn.Module) -> None:
    read = next(data)
    for _ in range(2):
        model(read["tokens"], packed_seq_params=params_of(read))


def _gives_no_params(data: Any, model: nn.Module) -> None:
    model(next(data)["tokens"])


@pytest.mark.parametrize(
    ("each", "message"),
    [
        (_reads_nothing, "left microbatches of its step unread"),
        (_gives_no_params, "microbatch 0, chunk 0: .* without packed_seq_params="),
        (_calls_twice, "microbatch 2, chunk 0: the data of the step has no such microbatch"),
    ],
)
def test_forward_steps_that_do_otherwise_are_refused(
    step: Step, each: Callable[..., None], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"rank 3.*{message}"):
        step([batch(4, 12), batch(4, 12)], each=each)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"cu_seqlens": None}, ConfigError, "gives nothing as 'cu_seqlens'"),
        ({"cu_seqlens": torch.empty(1, 3, device="meta")}, ConfigError, "on a device"),
        ({"cu_seqlens": torch.tensor([[0, 5, 3, 12]], dtype=torch.int32)}, PackingError, "decr"),
        ({"cu_seqlens": torch.tensor([[0, 5]], dtype=torch.int32)}, ConfigError, "end at 5, not"),
    ],
)
def test_data_without_right_offsets_are_named(
    step: Step, data: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"rank 3, microbatch 1: .*{message}"):
        step([batch(12), batch(12, **data)])


def test_iterators_of_several_chunks(step: Step, models: list[Model]) -> None:
    models.append(Model())
    with pytest.raises(ConfigError, match=r"rank 3: .*no data iterator"):
        step(None, iterators=[None, None])
    arguments = step(None, iterators=[iter([batch(12), batch(12)]), iter([batch(12), batch(12)])])
    assert arguments["packings"] == [(12,), (12,)]
    assert [len(model.seen) for model in models] == [2, 2]
