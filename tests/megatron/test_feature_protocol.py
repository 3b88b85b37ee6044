"""A feature from outside of the package: each method is called, and detaching removes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, Chunk, StepMode
from chunkgraph.errors import ConfigError
from chunkgraph.megatron import attach
from chunkgraph.megatron.feature import Feature, LimitedFeature, Shortage, Step, Work
from chunkgraph.megatron.features import FEATURES
from chunkgraph.settings.rule import Rule

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(150)]


class Counting(LimitedFeature):
    """Counts its calls, and doubles the output of every chunk."""

    rules = (Rule("init_method_std: too much", lambda f: f.init_method_std > f.most_std),)
    num_short: ClassVar[int] = 0
    calls: ClassVar[Counter[str]] = Counter()
    now_around: ClassVar[list[str]] = []

    @contextmanager
    def _around(self, name: str) -> Iterator[None]:
        self.calls[name] += 1
        self.now_around.append(name)
        yield
        assert self.now_around.pop() == name

    @classmethod
    def facts(cls, site: Any) -> dict[str, object]:
        cls.calls["facts"] += 1
        return {"most_std": 0.25}

    @classmethod
    def prepare(cls, site: Any, undo: ExitStack) -> None:
        cls.calls["prepare"] += 1
        assert not site.parts
        undo.callback(lambda: cls.calls.update(["unprepared"]))

    @classmethod
    def of(cls, site: Any, undo: ExitStack) -> Counting:
        cls.calls["of"] += 1
        assert [part.index for part in site.parts] == [0]
        undo.callback(lambda: cls.calls.update(["undone"]))
        return cls()

    def wrap(self, part: Any, chunk: Chunk) -> Chunk:
        self.calls["wrap"] += 1
        assert part.label == chunk.label
        return replace(chunk, forward=lambda *args, **kwargs: 2 * chunk.forward(*args, **kwargs))

    def call(self, part: Any, call: Any) -> Any:
        self.calls["call"] += 1

        def counted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.calls[f"forwards of chunk {part.index}"] += 1
            return call(args, kwargs)

        return counted

    def bind(self, graphs: Any) -> None:
        self.calls["bind"] += 1
        assert graphs.features.find(Counting) is self

    def around(self, work: Work) -> Any:
        self.calls["around"] += 1
        return self._around(work)

    def begin_run(self) -> None:
        self.calls["begin_run"] += 1
        assert "step" not in self.now_around

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        self.calls[f"step {step.mode.name}"] += 1
        try:
            with self._around("step"):
                yield
        except KeyError:
            self.calls["failed step"] += 1
            self.now_around.clear()
            raise

    def forwards_done(self, step: Step) -> None:
        assert step.is_training
        self.calls["forwards_done"] += 1

    def shortage(self, mode: StepMode) -> Shortage:
        assert mode is not StepMode.OUTSIDE
        self.calls["shortage"] += 1
        short, type(self).num_short = self.num_short, 0
        return Shortage("toys", short, "no toy")

    def having_room(self) -> Any:
        return self._around("having_room")

    def make_room(self, agree: Any) -> None:
        assert agree([3]) == [3]
        self.calls["make_room"] += 1

    def drop_step(self) -> None:
        self.calls["drop_step"] += 1

    def release(self) -> None:
        self.calls["release"] += 1


@pytest.fixture(autouse=True)
def _from_nothing() -> None:
    Counting.calls.clear()
    Counting.num_short = 0
    Counting.now_around.clear()


def _outputs(chunks: list[nn.Module], features: Any, num_forwards: int = 1) -> list[torch.Tensor]:
    """Return the outputs of an eager step, two replayed ones and one that may run again."""
    block: Any = next(m for m in chunks[0].modules() if hasattr(m, "input_tensor"))
    block = getattr(block, "decoder", block)
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), diagonal=1)

    def forward_step() -> torch.Tensor:
        hidden = torch.ones(16, 2, 32, requires_grad=True)
        output: torch.Tensor = block(hidden_states=hidden, attention_mask=mask)
        output.sum().backward()
        return output.detach().clone()

    def schedule(forward_step_func: Any, **_: Any) -> torch.Tensor:
        torch.manual_seed(5)
        first, *_others = [forward_step_func() for _ in range(num_forwards)]
        return first

    graphs = attach(
        chunks, scope="block", features=features, options=CaptureOptions(verify="shadow")
    )
    run = graphs.wrap_forward_backward(schedule)
    keywords: dict[str, Any] = {"num_microbatches": 1, "data_iterator": None}
    outputs = [run(forward_step_func=forward_step, **keywords) for _ in range(3)]
    assert graphs.counters.replayed_steps == 2
    with pytest.raises(KeyError):
        run(forward_step_func=lambda: {}["missing"], **keywords)
    Counting.num_short = 1
    outputs.append(run(forward_step_func=forward_step, **keywords))
    graphs.detach()
    return outputs


def test_every_method_of_a_feature_is_called(chunks: list[nn.Module]) -> None:
    doubled = _outputs(chunks, (*FEATURES, Counting), num_forwards=2)
    names = {n for kind in (Feature, LimitedFeature) for n in vars(kind) if n[0] != "_"}
    calls = Counting.calls
    names -= {"plans", "repeats_steps", "replays_forwards", "rules", "tensors", "step"}
    assert names - set(calls) == set()
    assert calls["capture"] == 1
    assert calls["step REPLAY"] == 4
    assert calls["step EAGER"] == 2  # the last one equals the first
    assert calls["forwards_done"] == 5
    assert calls["failed step"] == calls["drop_step"] == 1
    assert calls["undone"] == calls["unprepared"] == 1
    assert calls["shortage"] == 4
    assert calls["having_room"] == calls["make_room"] == 1
    assert calls["forwards of chunk 0"] == 10
    assert calls["session"] > calls["verify"] > 1  # also around captures and passes

    calls.clear()
    plain = _outputs(chunks, FEATURES)
    assert not calls
    assert all(torch.equal(2 * a, b) for a, b in zip(plain, doubled, strict=True))


def test_a_feature_refuses_a_model_with_the_others(chunks: list[nn.Module]) -> None:
    config: Any = chunks[0].config
    config.init_method_std, config.cpu_offloading = 0.5, True
    with pytest.raises(ConfigError, match=r"(?s)cpu_offloading=True.*init_method_std=0.5: too"):
        attach(chunks, features=(*FEATURES, Counting))
    assert Counting.calls == {"facts": 1}
