"""Python state outside of a module that a forward changes and uses is refused by name."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import GraphBackend

WIDTH = 8


class Count:
    """A counter, as a class and as an object."""

    num_calls = 0

    def __call__(self) -> int:
        self.num_calls += 1
        return self.num_calls

    @classmethod
    def of_class(cls) -> int:
        cls.num_calls += 1
        return cls.num_calls

    @staticmethod
    def static() -> int:
        Count.num_calls += 1
        return Count.num_calls


class Slots:
    """A counter without a dict."""

    __slots__ = ("num_calls",)

    def __init__(self) -> None:
        self.num_calls = 0


class Teacher(nn.Module):
    """A module that no module registers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x * self.num_calls


class Counting(torch.autograd.Function):
    """Count in the forward, or in the backward."""

    num_forwards = num_backwards = 0

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Counting.num_backwards += 1
        return grad * Counting.num_backwards


class CountingForward(Counting):
    """Count in the forward."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Counting.num_forwards += 1
        return x * Counting.num_forwards

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.clone()


NUM_CALLS = 0
NUMBERS = [0]
NAMED: dict[str, int] = {}
TURNS = deque([1.0, 2.0, 3.0])
COUNT = Count()
SLOTS = Slots()
TEACHER = Teacher()
SEEN: set[int] = set()
ARRAY = np.zeros(2)
REBOUND: dict[str, Any] = {"array": np.ones(2), "set": frozenset(), "number": np.int64(1)}
PROGRAM = ModuleType("state_of_a_program")
PROGRAM.num_calls = 0  # type: ignore[attr-defined]


def by_global(x: torch.Tensor) -> torch.Tensor:
    global NUM_CALLS  # noqa: PLW0603
    NUM_CALLS += 1
    return x * NUM_CALLS


def bump() -> None:
    global NUM_CALLS  # noqa: PLW0603
    NUM_CALLS += 1


def by_function(x: torch.Tensor) -> torch.Tensor:
    bump()
    return x * NUM_CALLS


def by_list(x: torch.Tensor) -> torch.Tensor:
    NUMBERS[0] += 1
    return x * NUMBERS[0]


ORDER = OrderedDict(one=1.0, two=2.0)


def by_order(x: torch.Tensor) -> torch.Tensor:
    ORDER.move_to_end(next(iter(ORDER)))
    return x * next(iter(ORDER.values()))


def by_dict(x: torch.Tensor) -> torch.Tensor:
    NAMED["calls"] = NAMED.get("calls", 0) + 1
    return x * NAMED["calls"]


def by_deque(x: torch.Tensor) -> torch.Tensor:
    TURNS.rotate(1)
    return x * TURNS[0]


def by_class(x: torch.Tensor) -> torch.Tensor:
    Count.num_calls += 1
    return x * Count.num_calls


def by_set(x: torch.Tensor) -> torch.Tensor:
    SEEN.add(len(SEEN))
    return x * len(SEEN)


def by_array(x: torch.Tensor) -> torch.Tensor:
    ARRAY[0] += 1.0
    return x * float(ARRAY[0])


def by_slots(x: torch.Tensor) -> torch.Tensor:
    SLOTS.num_calls += 1
    return x * SLOTS.num_calls


def by_default(x: torch.Tensor, calls: list[int] = [0]) -> torch.Tensor:  # noqa: B006
    calls[0] += 1
    return x * calls[0]


def by_attribute(x: torch.Tensor) -> torch.Tensor:
    by_attribute.num_calls += 1  # type: ignore[attr-defined]
    return x * by_attribute.num_calls  # type: ignore[attr-defined]


by_attribute.num_calls = 0  # type: ignore[attr-defined]


def by_new_array(x: torch.Tensor) -> torch.Tensor:
    REBOUND["array"] = REBOUND["array"] + 1.0
    return x * float(REBOUND["array"][0])


def by_new_set(x: torch.Tensor) -> torch.Tensor:
    REBOUND["set"] = REBOUND["set"] | {len(REBOUND["set"])}
    return x * len(REBOUND["set"])


def by_new_number(x: torch.Tensor) -> torch.Tensor:
    REBOUND["number"] = REBOUND["number"] + 1
    return x * float(REBOUND["number"])


def by_module(x: torch.Tensor) -> torch.Tensor:
    PROGRAM.num_calls += 1
    return x * PROGRAM.num_calls


OUTSIDE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, Callable[[], Any]]] = {
    "global": (by_global, "the global NUM_CALLS", lambda: NUM_CALLS),
    "function": (by_function, "the global NUM_CALLS", lambda: NUM_CALLS),
    "list": (by_list, r"the global NUMBERS\[0\]", lambda: list(NUMBERS)),
    "order": (by_order, r"the global ORDER\['(one|two)'\]", lambda: list(ORDER)),
    "dict": (by_dict, r"the global NAMED\['calls'\]", lambda: dict(NAMED)),
    "deque": (by_deque, r"the global TURNS\[0\]", lambda: list(TURNS)),
    "class": (by_class, r"Count\.num_calls", lambda: Count.num_calls),
    "class method": (
        lambda x: x * Count.of_class(),
        r"Count\.num_calls",
        lambda: Count.num_calls,
    ),
    "static method": (
        lambda x: x * Count.static(),
        r"Count\.num_calls",
        lambda: Count.num_calls,
    ),
    "slots": (by_slots, r"the global SLOTS\.num_calls", lambda: SLOTS.num_calls),
    "default": (by_default, r"the default calls\[0\]", lambda: list(by_default.__defaults__[0])),
    "function attribute": (
        by_attribute,
        r"by_attribute\.num_calls",
        lambda: by_attribute.num_calls,  # type: ignore[attr-defined]
    ),
    "other module": (
        lambda x: TEACHER(x),  # noqa: PLW0108
        r"the global TEACHER\.num_calls",
        lambda: TEACHER.num_calls,
    ),
    "new array": (
        by_new_array,
        r"the global REBOUND\['array'\]",
        lambda: list(REBOUND["array"]),
    ),
    "new set": (by_new_set, r"the global REBOUND\['set'\]", lambda: REBOUND["set"]),
    "new number": (by_new_number, r"the global REBOUND\['number'\]", lambda: REBOUND["number"]),
    "array": (by_array, "the global ARRAY", ARRAY.tolist),
    "set": (by_set, "the global SEEN", lambda: set(SEEN)),
    "module": (by_module, r"the global PROGRAM\.num_calls", lambda: PROGRAM.num_calls),
    "object": (lambda x: x * COUNT(), r"the global COUNT\.num_calls", lambda: vars(COUNT).copy()),
    "operator": (CountingForward.apply, r"Counting\.num_forwards", lambda: Counting.num_forwards),
    "backward": (Counting.apply, r"Counting\.num_backwards", lambda: Counting.num_backwards),
}


def calling(function: Callable[[torch.Tensor], torch.Tensor], backend: GraphBackend) -> nn.Module:
    """Return a linear layer and ``function``."""

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self.linear(x))

    return Calling().to(backend.device)


@pytest.mark.parametrize(("function", "name", "value"), OUTSIDE.values(), ids=OUTSIDE)
def test_state_of_python_that_a_forward_changes_and_uses_is_refused(
    backend: GraphBackend,
    function: Callable[[torch.Tensor], torch.Tensor],
    name: str,
    value: Callable[[], Any],
) -> None:
    """Replays would repeat what it was in the capture."""
    graphs = ChunkGraphs([calling(function, backend)], [2], backend=backend)
    x = torch.ones(3, WIDTH, device=backend.device)
    with graphs.step(1):
        graphs.callables[0](x).sum().backward()
    before = value()
    with pytest.raises(CaptureError, match=f"its forward sets {name}"), graphs.step(1):
        pass
    assert value() == before


def test_a_nonlocal_variable_that_a_forward_changes_and_uses_is_refused(
    backend: GraphBackend,
) -> None:
    num_calls = 0

    def count(x: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return x * num_calls

    graphs = ChunkGraphs([calling(count, backend)], [2], backend=backend)
    with pytest.raises(CaptureError, match="its forward sets the variable num_calls"):
        graphs.capture([torch.ones(3, WIDTH, device=backend.device)])
    assert num_calls == 0


def test_counters_and_logs_that_no_forward_uses_are_captured(backend: GraphBackend) -> None:
    shapes: list[torch.Size] = []
    times = SimpleNamespace(num_calls=0)

    def log(x: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape)
        times.num_calls += 1
        return x * 2.0

    graphs = ChunkGraphs([calling(log, backend)], [2], backend=backend)
    graphs.capture([torch.ones(3, WIDTH, device=backend.device)])
    assert shapes
    assert times.num_calls == len(shapes)


def test_iterators_are_refused_before_they_are_advanced(backend: GraphBackend) -> None:
    factors = itertools.count(1.0)
    chunk = calling(lambda x: x * next(factors), backend)
    graphs = ChunkGraphs([chunk], [2], backend=backend)
    with pytest.raises(CaptureError, match="reads the variable factors, an iterator"):
        graphs.capture([torch.ones(3, WIDTH, device=backend.device)])
    assert next(factors) == 1.0
