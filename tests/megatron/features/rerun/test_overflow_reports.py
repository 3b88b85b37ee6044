"""Reports of steps without room: who waits for them, and which are errors on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from chunkgraph.engine.observer import Counters
from chunkgraph.engine.step import StepMode
from chunkgraph.megatron.feature import Feature, Features, LimitedFeature, Shortage
from chunkgraph.megatron.features.rerun import OverflowGuard

pytestmark = [pytest.mark.megatron, pytest.mark.every_release]


def _guard(features: Any, done: list[Any], *, has_graphs: bool = True) -> OverflowGuard:
    """Make the guard of one rank, which records releases and restored states."""
    graphs: Any = SimpleNamespace(
        site=SimpleNamespace(chunks=(), place=SimpleNamespace(rank=0), meet=lambda: None),
        features=Features(features),
        engine=SimpleNamespace(report="graphs" if has_graphs else None),
        counters=Counters(),
        release=lambda: done.append("released"),
    )
    guard = OverflowGuard(graphs, ExitStack())
    restore = lambda: done.append("restored")  # noqa: E731
    guard._state = SimpleNamespace(save=lambda: None, restore=restore)  # type: ignore[assignment]
    return guard


@pytest.mark.parametrize("has_graphs", [False, True])
def test_an_eager_step_gives_room_where_no_graph_has_less(has_graphs: bool) -> None:
    """Eager passes next to replays, as `verify` runs them, must drop what the replays drop."""
    done: list[Any] = []

    class Short(LimitedFeature):
        def shortage(self, mode: StepMode) -> Shortage:
            assert mode is StepMode.EAGER
            return Shortage("expert capacity", 2, "2 tokens")

        @contextmanager
        def having_room(self) -> Iterator[None]:
            done.append("room")
            yield

        def make_room(self, agree: Any) -> None:
            done.extend(agree([7]))

    guard = _guard([Feature(), Short()], done, has_graphs=has_graphs)
    guard.run(lambda _kwargs, _eager: (None, StepMode.EAGER), {"data_iterator": None})
    assert done == ["restored", "room", *([] if has_graphs else [7])]
    assert guard._counters.overflow_reruns == {"expert capacity": 1}


def test_one_feature_at_its_limit_keeps_no_other_from_growing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The limit of a feature is its own, and the warning names the settings."""
    grown = []

    class Short(LimitedFeature):
        def __init__(self, name: str, *, is_at_limit: bool) -> None:
            self._shortage = Shortage(name, 1, f"no {name}", is_at_limit, f"{name}.max")

        def shortage(self, _mode: StepMode) -> Shortage:
            return self._shortage

        def make_room(self, agree: Any) -> None:
            grown.append(self._shortage.name)

    def run(*features: Feature) -> list[str]:
        guard = _guard(features, grown)
        modes = iter([StepMode.REPLAY, StepMode.EAGER])
        guard.run(lambda _kwargs, _eager: (None, next(modes)), {"data_iterator": None})
        grown.remove("restored")
        return guard._counters.recaptures

    pages, rows = Short("pages", is_at_limit=True), Short("rows", is_at_limit=False)
    for number in range(1, 5):
        assert run(pages, rows) == ["rows"]
        assert grown == ["released", "rows"] * number
    assert run(pages) == []
    assert grown == ["released", "rows"] * 4
    assert caplog.text.count("room does not grow (pages): pages.max is reached") == 5
    assert caplog.text.count("captured again with more room (rows)") == 4
