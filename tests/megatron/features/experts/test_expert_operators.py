"""Operators that graphs of experts add to eager training, since every kernel takes time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping
from in_process import EXPERTS, Trained
from torch.utils._python_dispatch import TorchDispatchMode

from chunkgraph.engine.capture import session
from chunkgraph.engine.replay import replayer
from chunkgraph.graphs.operators import storages_written, tensors_in
from chunkgraph.graphs.recorder.recorded_graph import RecordedGraph
from chunkgraph.settings import StashConfig

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(60)]

_UNDEFINED_CONTENTS = ("aten::empty", "aten::new_empty")


class _EagerOperators(TorchDispatchMode):
    """Counts operators that allocate or write memory, by name; without views and replays.

    Attributes:
        counts: how often each operator ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in([*args, *kwargs.values()])
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        out = func(*args, **kwargs)
        outputs = [t.untyped_storage() for t in tensors_in(out)]
        is_fresh = any(s.nbytes() and s.data_ptr() not in known for s in outputs)
        name = func._schema.name
        if name.startswith(_UNDEFINED_CONTENTS):
            return out
        if is_fresh or storages_written(func, args, kwargs):
            self.counts[name.removeprefix("aten::")] += 1
        return out


@contextmanager
def _graph_operators() -> Iterator[dict[str, Counter[str]]]:
    """Record the label and the operators of every graph captured in this context."""
    graphs: dict[str, Counter[str]] = {}
    finish = RecordedGraph.finish

    def noting(self: RecordedGraph, log: Any, *more: Any) -> None:
        names = [
            entry.func._schema.name
            for entry in log
            # Eager steps make numbers on the host by `torch.tensor`, which is no operator.
            if hasattr(entry, "func") and not any(isinstance(a, torch.Tensor) for a in entry.args)
        ]
        graphs[self.label] = Counter(name.removeprefix("aten::") for name in names)
        finish(self, log, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedGraph, "finish", noting)
        yield graphs


def _operators(
    device: Any,
    make_config: Callable[..., dict[str, Any]],
    num_layers: int,
    graphs: dict[str, Any] | None,
) -> tuple[Counter[str], Counter[str]]:
    """Return the operators in graphs and in eager code of a step of one microbatch."""
    config = make_config(
        model={"num_layers": num_layers, "swiglu": True},
        moe=EXPERTS,
        train={"micro_batch_size": 3},
    )
    model = Trained(device, config_from_mapping(config), graphs)
    with _graph_operators() as captured:
        for step in range(3):
            with _EagerOperators() as eager:
                model.step(step, 1)
    if graphs is not None:
        assert model.graphs.counters.replayed_steps == 2
        model.graphs.detach()
    return sum(captured.values(), Counter()), eager.counts


def _added(
    device: Any, make_config: Any, num_layers: int, **graphs: Any
) -> tuple[Counter[str], Counter[str]]:
    """Return the operators that graphs add to eager training: in all, and outside of graphs."""
    _, plain = _operators(device, make_config, num_layers, None)
    held, eager = _operators(device, make_config, num_layers, {"scope": "chunk", **graphs})
    return held + eager - plain, eager - plain


@pytest.fixture(autouse=True)
def modes_may_be_active(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a mode of a test count the operators around captures and replays."""
    for module in (session, replayer):
        monkeypatch.setattr(module, "refuse_contexts", lambda *_: None)


@pytest.mark.parametrize("token_drops", ["count", "raise", "rerun"])
def test_a_layer_adds_three_operators_that_count(
    one_rank: Any, make_config: Any, token_drops: str
) -> None:
    """Only reruns save states before a step."""
    added, outside = _added(one_rank, make_config, 3, token_drops=token_drops)
    # Tokens, labels and the loss's gradient are copied into the slot, the loss out of it.
    copies = Counter({"_foreach_copy_": 1, "copy_": 1, "clone": 1})
    if token_drops == "rerun":
        # Before a step: the host's random state, and all counters, by type.
        states = Counter({"clone": 3, "_foreach_copy_": 2})
        assert outside - copies - states == Counter()
        copies += states
    assert added - copies == Counter({"gt": 3, "sum": 3, "add_": 3})


def test_the_stash_looks_at_rows_once(one_rank: Any, make_config: Any) -> None:
    """Here experts run one after the other, and each also counts its rows."""
    added, _ = _added(one_rank, make_config, 1, stash=StashConfig(enabled=True))
    # One comparison for tokens without room, and one for rows without a token.
    assert added["gt"] == 2
    assert added["cumsum"] == 1 + 4
