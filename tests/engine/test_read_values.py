"""Values that a forward reads from globals, closures and objects are equal to eager or refused."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from chunkgraph.engine import Chunk, ChunkGraphs
from chunkgraph.errors import ReplayMismatchError

_FACTOR = 2.0
_TENSOR = torch.tensor(2.0)
_TABLE = {"factor": 2.0}
_SETTINGS = types.ModuleType("settings_of_a_program")
_SETTINGS.factor = 2.0  # type: ignore[attr-defined]
_CACHE: dict[int, float] = {}
_LOG = logging.getLogger(__name__)
_OLD: list[torch.Tensor] = []
_OF_THREAD = threading.local()
_OF_THREAD.factor = 2.0
_CONTEXT: ContextVar[float] = ContextVar("_CONTEXT", default=2.0)


@dataclasses.dataclass
class _Config:
    factor: float = 2.0
    seen: int = 0
    act: Any = torch.tanh

    def scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.factor

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.scaled(hidden)


class _Slots:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 2.0


def _of_global(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * _FACTOR


def _scaled_by_attribute(hidden: torch.Tensor) -> torch.Tensor:
    factor: float = _scaled_by_attribute.factor  # type: ignore[attr-defined]
    return hidden * factor


_SETTINGS.scaled = _of_global  # type: ignore[attr-defined]


class _Layer(nn.Module):
    """A linear layer, and places for a factor."""

    table = [2.0]  # noqa: RUF012

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = kind
        self.act = lambda hidden: hidden * _FACTOR
        self.factors = [1.0, 2.0]
        self.array = np.array([1.0, 2.0])
        self.named = {"inner": {"factor": 2.0}}
        self.config = _Config()
        self.acts = [lambda hidden: hidden * _FACTOR]
        self.part = functools.partial(lambda hidden: hidden * _FACTOR)
        self.nested = types.SimpleNamespace(config=_Config())
        self.slots = _Slots()
        self.log: list[float] = []
        self.memo: dict[int, float] = {}

    @property
    def from_property(self) -> float:
        return self.config.factor

    def helper(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.factors[1]


def _kind(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> type[_Layer]:
    """Return a layer with this forward."""
    return type("_Special", (_Layer,), {"forward": forward})


def _set(name: str, value: Any) -> Callable[[Any], None]:
    def change(_layer: Any) -> None:
        globals()[name] = value

    return change


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(_ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * _FACTOR


def _appended(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    parts = [hidden]
    parts.append(self.linear(hidden) * self.factors[1])
    named = {}
    named[self.kind] = parts[1] * self.factors[1]
    return named[self.kind]


_CASES: list[tuple[str, Callable[[Any, torch.Tensor], torch.Tensor], Callable[[Any], Any]]] = [
    ("the global _FACTOR", lambda s, x: s.linear(x) * _FACTOR, _set("_FACTOR", 3.0)),
    ("the global _FACTOR", lambda s, x: _of_global(s.linear(x)), _set("_FACTOR", 3.0)),
    ("the global _FACTOR", lambda s, x: _Scaled.apply(s.linear(x)), _set("_FACTOR", 3.0)),
    ("the global _FACTOR", lambda s, x: s.act(s.linear(x)), _set("_FACTOR", 3.0)),
    (
        "the global _FACTOR",
        lambda s, x: _SETTINGS.scaled(s.linear(x)),
        _set("_FACTOR", 3.0),
    ),
    (
        "the global _TENSOR",
        lambda s, x: s.linear(x) * _TENSOR,
        lambda s: (_OLD.append(_TENSOR), _set("_TENSOR", torch.tensor(3.0))(s)),
    ),
    (
        "the global _TABLE['factor']",
        lambda s, x: s.linear(x) * _TABLE["factor"],
        lambda _: _TABLE.update(factor=3.0),
    ),
    (
        "the global _SETTINGS.factor",
        lambda s, x: s.linear(x) * _SETTINGS.factor,
        lambda _: setattr(_SETTINGS, "factor", 3.0),
    ),
    (
        "factors[1]",
        lambda s, x: s.linear(x) * s.factors[1],
        lambda s: s.factors.__setitem__(1, 3.0),
    ),
    ("factors[1]", lambda s, x: s.helper(s.linear(x)), lambda s: s.factors.__setitem__(1, 3.0)),
    (
        "named['inner']['factor']",
        lambda s, x: s.linear(x) * s.named["inner"]["factor"],
        lambda s: s.named["inner"].update(factor=3.0),
    ),
    (
        "config.factor",
        lambda s, x: s.linear(x) * s.config.factor,
        lambda s: setattr(s.config, "factor", 3.0),
    ),
    (
        "config.factor",
        lambda s, x: s.linear(x) * s.from_property,
        lambda s: setattr(s.config, "factor", 3.0),
    ),
    (
        "nested.config.factor",
        lambda s, x: s.linear(x) * s.nested.config.factor,
        lambda s: setattr(s.nested.config, "factor", 3.0),
    ),
    (
        "array",
        lambda s, x: s.linear(x) * float(s.array[1]),
        lambda s: s.array.__setitem__(1, 3.0),
    ),
    (
        "config.factor",
        lambda s, x: s.config.scaled(s.linear(x)),
        lambda s: setattr(s.config, "factor", 3.0),
    ),
    (
        "config.factor",
        lambda s, x: s.config(s.linear(x)),
        lambda s: setattr(s.config, "factor", 3.0),
    ),
    ("the global _FACTOR", lambda s, x: s.part(s.linear(x)), _set("_FACTOR", 3.0)),
    (
        "the global _OF_THREAD.factor",
        lambda s, x: s.linear(x) * _OF_THREAD.factor,
        lambda _: setattr(_OF_THREAD, "factor", 3.0),
    ),
    (
        "the global _CONTEXT.get()",
        lambda s, x: s.linear(x) * _CONTEXT.get(),
        lambda _: _CONTEXT.set(3.0),
    ),
    ("the global _FACTOR", lambda s, x: s.acts[0](s.linear(x)), _set("_FACTOR", 3.0)),
    (
        "config.act",
        lambda s, x: s.config.act(s.linear(x)),
        lambda s: setattr(s.config, "act", torch.sin),
    ),
    (
        "_scaled_by_attribute.factor",
        lambda s, x: _scaled_by_attribute(s.linear(x)),
        lambda _: setattr(_scaled_by_attribute, "factor", 3.0),
    ),
    (
        "the default table['factor']",
        lambda s, x, table={"factor": 2.0}: s.linear(x) * table["factor"],
        lambda s: type(s).forward.__defaults__[0].update(factor=3.0),
    ),
    ("factors[1]", _appended, lambda s: s.factors.__setitem__(1, 3.0)),
    (
        "slots.factor",
        lambda s, x: s.linear(x) * s.slots.factor,
        lambda s: setattr(s.slots, "factor", 3.0),
    ),
    (
        "_Layer.table[0]",
        lambda s, x: s.linear(x) * s.table[0],
        lambda s: s.table.__setitem__(0, 3.0),
    ),
]


_scaled_by_attribute.factor = 2.0  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the globals of this file."""
    yield
    globals().update(_FACTOR=2.0, _TENSOR=torch.tensor(2.0))
    _TABLE["factor"] = _SETTINGS.factor = _Layer.table[0] = _OF_THREAD.factor = 2.0  # type: ignore[attr-defined]
    _CONTEXT.set(2.0)
    _scaled_by_attribute.factor = 2.0  # type: ignore[attr-defined]
    _CACHE.clear()


def _step(graphs: ChunkGraphs, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs = []
    with graphs.step(len(inputs)):
        for x in inputs:
            out = graphs.callables[0](x)
            out.sum().backward()
            outputs.append(out.detach())
    return outputs


def _captured(layer: Any) -> tuple[ChunkGraphs, list[torch.Tensor]]:
    torch.manual_seed(1)
    graphs = ChunkGraphs([layer], [2])
    inputs = [torch.randn(2, 4) for _ in range(2)]
    for _ in range(2):
        _step(graphs, inputs)
    return graphs, inputs


@pytest.mark.parametrize(("name", "forward", "change"), _CASES)
def test_a_changed_value_is_refused_and_named(
    name: str,
    forward: Callable[[Any, torch.Tensor], torch.Tensor],
    change: Callable[[Any], Any],
) -> None:
    layer = _kind(forward)("special")
    graphs, inputs = _captured(layer)
    _step(graphs, inputs)
    assert graphs.counters.replays
    change(layer)
    with pytest.raises(ReplayMismatchError, match="was changed after capture") as error:
        _step(graphs, inputs)
    assert f"{name} (captured " in str(error.value)
    graphs.release()
    for _ in range(2):
        outputs = _step(graphs, inputs)
    with torch.no_grad():
        assert all(torch.equal(out, layer(x)) for out, x in zip(outputs, inputs, strict=True))


def test_another_order_of_a_dict_is_refused() -> None:
    layer = _kind(lambda s, x: functools.reduce(lambda y, f: f(y), s.named.values(), s.linear(x)))(
        "special"
    )
    layer.named = {"shift": lambda y: y + 1.0, "scale": lambda y: y * 2.0}
    graphs, inputs = _captured(layer)
    _step(graphs, inputs)
    layer.named["shift"] = layer.named.pop("shift")
    with pytest.raises(ReplayMismatchError, match=r"the order of .*named was changed after"):
        _step(graphs, inputs)


@pytest.mark.parametrize("name", ["forward", "helper"])
def test_a_method_of_a_class_that_is_replaced_is_refused(name: str) -> None:
    kind: Any = type("_Special", (_Layer,), {"forward": lambda s, x: s.helper(s.linear(x))})
    kind.helper = lambda _, hidden: hidden * 2.0
    graphs, inputs = _captured(kind("special"))
    _step(graphs, inputs)
    setattr(kind, name, lambda s, x: s.linear(x) if name == "forward" else x)
    with pytest.raises(ReplayMismatchError, match=rf"_Special\.{name} \(captured"):
        _step(graphs, inputs)


@pytest.mark.parametrize("kind", ["function", "partial", "object", "method"])
def test_a_value_that_a_hook_of_a_layer_reads_is_refused(kind: str) -> None:
    config = _Config()

    def hook(_layer: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * config.factor

    class Hook:
        def __call__(self, *args: Any) -> torch.Tensor:
            return hook(*args)

    hooks = {
        "function": hook,
        "partial": functools.partial(hook),
        "object": Hook(),
        "method": Hook().__call__,
    }
    layer = _kind(lambda s, x: s.linear(x))("special")
    layer.linear.register_forward_hook(hooks[kind])
    graphs, inputs = _captured(layer)
    _step(graphs, inputs)
    config.factor = 3.0
    with pytest.raises(ReplayMismatchError, match=r"the variable config\.factor \(captured"):
        _step(graphs, inputs)


@pytest.mark.parametrize("make", [functools.partial, lambda f: types.SimpleNamespace(f=f).f])
def test_a_value_that_a_chunks_function_reads_is_refused(make: Callable[..., Any]) -> None:
    layer = nn.Linear(4, 4)
    config = _Config()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return layer(hidden) * config.factor

    chunk = Chunk(make(forward), tuple(layer.parameters()), "it", layer)
    graphs, inputs = _captured(chunk)
    _step(graphs, inputs)
    config.factor = 3.0
    with pytest.raises(ReplayMismatchError, match=r"the variable config\.factor \(captured"):
        _step(graphs, inputs)


def test_a_changed_variable_of_a_closure_is_refused() -> None:
    factor = 2.0

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden) * factor

    graphs, inputs = _captured(_kind(forward)("special"))
    _step(graphs, inputs)
    factor = 3.0
    with pytest.raises(ReplayMismatchError, match=r"the variable factor \(captured 2.0, now 3.0\)"):
        _step(graphs, inputs)


def _memoising(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    key = hidden.shape[0]
    if key not in self.memo:
        self.memo[key] = 2.0
        _CACHE[key] = 2.0
        self.log.append(2.0)
        self.named["inner"]["memo"] = 2.0
        self.factors[0] += 1.0
        self.config.seen += 1
    _LOG.debug("%s", self.kind)
    return self.linear(hidden) * self.memo[key] * _CACHE[key]


def test_what_a_forward_keeps_itself_is_no_setting() -> None:
    """Caches, counters and logs that eager passes fill between steps."""
    layer = _kind(_memoising)("special")
    graphs, inputs = _captured(layer)
    with torch.no_grad():
        layer(torch.randn(5, 4))
    layer.log.clear()
    outputs = _step(graphs, inputs)
    assert graphs.counters.replays
    with torch.no_grad():
        assert all(torch.equal(out, layer(x)) for out, x in zip(outputs, inputs, strict=True))


def test_a_variable_that_the_forward_counts_itself_is_no_setting() -> None:
    num_calls = 0

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return self.linear(hidden)

    layer = _kind(forward)("special")
    graphs, inputs = _captured(layer)
    with torch.no_grad():
        layer(inputs[0])
    _step(graphs, inputs)
    assert graphs.counters.replays


def test_values_that_no_forward_reads_may_change() -> None:
    layer = _kind(lambda s, x: s.linear(x) * s.config.factor)("special")
    graphs, inputs = _captured(layer)
    layer.config.seen = 7
    layer.factors[0] = 7.0
    layer.log.append(1.0)
    _step(graphs, inputs)
    assert graphs.counters.replays


class _Raising:
    """An object whose attributes cannot be asked for."""

    factor = 2.0

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_unusual_objects_are_captured() -> None:
    traced = torch.jit.trace(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4))
    around: dict[str, Any] = {"factor": 2.0}
    around["itself"] = around
    raising = _Raising()
    layer = _kind(lambda s, x: traced(s.linear(x)) * around["factor"] * raising.factor)("special")
    graphs, inputs = _captured(layer)
    outputs = _step(graphs, inputs)
    assert graphs.counters.replays
    with torch.no_grad():
        assert all(torch.equal(out, layer(x)) for out, x in zip(outputs, inputs, strict=True))


def test_large_tables_count_as_one_object() -> None:
    layer = _kind(lambda s, x: s.linear(x) * s.named["table"][0][1])("special")
    layer.named = {"table": [[2.0] * 40] * 40}
    graphs, inputs = _captured(layer)
    _step(graphs, inputs)
    layer.named["table"] = [[3.0] * 40] * 40
    with pytest.raises(ReplayMismatchError, match=r"named\['table'\]"):
        _step(graphs, inputs)
