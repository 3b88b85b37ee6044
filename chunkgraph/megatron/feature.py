"""What one capability of a model needs so that its chunks can be captured and replayed.

`attach` asks every kind of `Feature` in order what it refuses, and makes one of each kind that
applies to the model. `Features` is all of them as one: it enters them in order and leaves them in
reverse. A feature overrides what it needs; what nobody overrides costs nothing in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

import torch

from chunkgraph.engine import Agree, Chunk, StepMode
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.step import Shortage, Step, StepPlanner
from chunkgraph.settings.rule import Rule

if TYPE_CHECKING:
    from chunkgraph.megatron.attached import MegatronChunkGraphs
    from chunkgraph.megatron.captured_part import Call, CapturedPart
    from chunkgraph.megatron.site import Site

__all__ = [
    "Feature",
    "Features",
    "chained",
]

Context = AbstractContextManager[None]
AnyFeature = TypeVar("AnyFeature", bound="Feature")


class Feature:
    """One capability of a captured model; here: one that applies to all and does nothing.

    Attributes:
        repeats_steps: whether training steps run again in which the feature had no room, the same
            on all ranks.
    """

    repeats_steps = False
    rules: ClassVar[Sequence[Rule]] = ()
    """Settings that a graph cannot hold, of the model or with this capability."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a step writes besides the model's buffers and Megatron's metrics."""
        return ()

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return what rules ask of a model that its config does not say."""
        return {}

    @classmethod
    def check(cls, site: Site) -> None:
        """Refuse options of `attach` that do not fit the model or each other.

        Raises:
            ConfigError: naming them.
        """

    @classmethod
    def of(cls, site: Site) -> Self | None:
        """Make the feature of this model; None where it does not apply."""
        return cls()

    def install(self, undo: ExitStack) -> None:
        """Change the model or Megatron; ``undo`` is closed when the graphs are detached."""

    def planner(self) -> StepPlanner | None:
        """Return the variants of every slot, which one feature at most has."""
        return None

    def wrap(self, part: CapturedPart, chunk: Chunk) -> Chunk:
        """Return ``chunk`` as the engine captures it; the first feature is the innermost."""
        return chunk

    def call(self, part: CapturedPart, call: Call) -> Call:
        """Return what the forward of a part calls, around ``call``; the first is the outermost."""
        return call

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Meet the graphs that the feature is part of, before their first step."""

    def preserving(self) -> Context:
        """Stand around a capture session, and put host-side state back after it."""
        return nullcontext()

    def capturing(self) -> Context:
        """Stand around the captures of a session, its warmup included."""
        return nullcontext()

    def beside(self) -> Context:
        """Stand around an eager pass of ``verify``, inside `preserving`."""
        return nullcontext()

    def step(self, step: Step) -> Context:
        """Stand around one run of a schedule."""
        return nullcontext()

    def forwards_done(self, step: Step) -> None:
        """Use the time after the last forward of a training step: backwards are still running."""

    def forwards_resumed(self) -> None:
        """Take `forwards_done` back: the schedule has another forward."""

    def end_step(self, step: Step) -> None:
        """End a run whose slots are free again."""

    def abandon_step(self, *, is_training: bool) -> None:
        """Drop what a run left that failed at any point before `end_step`."""

    def shortage(self, mode: StepMode) -> Shortage | None:
        """Say what had no room in a training step; None, on all ranks: nobody looks."""
        return None

    def answer(self, mine: Shortage, most: Shortage) -> None:
        """Answer a shortage on any rank: raise on all of them, or want more room here.

        Args:
            mine: of this rank.
            most: the largest numbers of all ranks.
        """

    def having_room(self) -> Context:
        """Stand around the second run of a step that was short of this feature's room."""
        return nullcontext()

    def make_room(self, agree: Agree) -> None:
        """Give more room after that run, before graphs are captured again; ranks may agree."""

    def drop_step(self) -> None:
        """Drop what a run left that fails after `end_step`, or whose result nobody uses."""

    def release(self) -> None:
        """Let go of memory that only graphs use: they are gone."""


class Features:
    """The features of one model as one.

    Args:
        features: in order.
    """

    def __init__(self, features: Iterable[Feature]) -> None:
        self._all = tuple(features)
        self._overriding = {
            name: tuple(f for f in self._all if _overrides(f, name))
            for name in vars(Feature)
            if not name.startswith("_") and callable(getattr(Feature, name))
        }
        planners = [p for f in self._all if (p := f.planner()) is not None]
        if len(planners) > 1:
            raise ConfigError(f"Several features plan steps, and one may: {planners}.")
        self.planner = planners[0] if planners else StepPlanner()

    @classmethod
    def install_on(cls, site: Site, kinds: Iterable[type[Feature]], undo: ExitStack) -> Features:
        """Make and install every feature that applies to a model."""
        features = []
        for kind in kinds:
            feature = kind.of(site)
            if feature is not None:
                feature.install(undo)
                features.append(feature)
        return cls(features)

    def find(self, kind: type[AnyFeature]) -> AnyFeature | None:
        """Return the feature of one kind, if it applies."""
        return next((feature for feature in self._all if isinstance(feature, kind)), None)

    def wrap(self, part: CapturedPart) -> Chunk:
        """Return what the engine captures of a part."""
        chunk = part.chunk()
        for feature in self._overriding["wrap"]:
            chunk = feature.wrap(part, chunk)
        return chunk

    def call(self, part: CapturedPart, call: Call) -> Call:
        """Return what the forward of a part calls, around the engine's ``call``."""
        for feature in reversed(self._overriding["call"]):
            call = feature.call(part, call)
        return call

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Introduce the graphs to every feature."""
        for feature in self._overriding["bind"]:
            feature.bind(graphs)

    def preserving(self) -> Context:
        """Stand around a capture session."""
        return _entered(f.preserving() for f in self._overriding["preserving"])

    def capturing(self) -> Context:
        """Stand around the captures of a session."""
        return _entered(f.capturing() for f in self._overriding["capturing"])

    def beside(self) -> Context:
        """Stand around an eager pass of ``verify``."""
        return _entered(f.beside() for f in self._overriding["beside"])

    def step(self, step: Step) -> Context:
        """Stand around one run of a schedule."""
        return _entered(f.step(step) for f in self._overriding["step"])

    @property
    def repeats_steps(self) -> bool:
        """Whether training steps run again in which a feature had no room."""
        return any(feature.repeats_steps for feature in self._all)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What a step writes besides the model's buffers and Megatron's metrics."""
        return [tensor for feature in self._all for tensor in feature.tensors]

    @property
    def awaits_forwards(self) -> bool:
        """Whether a feature uses the time after the last forward of a step."""
        return bool(self._overriding["forwards_done"])

    def forwards_done(self, step: Step) -> None:
        """Call every feature after the last forward of a training step."""
        for feature in self._overriding["forwards_done"]:
            feature.forwards_done(step)

    def forwards_resumed(self) -> None:
        """Call every feature when there is a forward after the last."""
        for feature in self._overriding["forwards_resumed"]:
            feature.forwards_resumed()

    def end_step(self, step: Step) -> None:
        """End a run in every feature."""
        for feature in reversed(self._overriding["end_step"]):
            feature.end_step(step)

    def abandon_step(self, *, is_training: bool) -> None:
        """Drop what a failed run left in every feature."""
        for feature in reversed(self._overriding["abandon_step"]):
            feature.abandon_step(is_training=is_training)

    def shortages(self, mode: StepMode) -> list[tuple[Feature, Shortage]]:
        """List what features say of their room, the last one first, the same on all ranks."""
        found = [(f, f.shortage(mode)) for f in reversed(self._overriding["shortage"])]
        return [(feature, shortage) for feature, shortage in found if shortage is not None]

    def drop_step(self) -> None:
        """Drop what a run left in every feature."""
        for feature in reversed(self._overriding["drop_step"]):
            feature.drop_step()

    def release(self) -> None:
        """Let go of the memory of graphs in every feature."""
        for feature in reversed(self._overriding["release"]):
            feature.release()


def chained(first: Callable[[], None] | None, second: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls both in this order."""
    if first is None:
        return second

    def call() -> None:
        first()
        second()

    return call


@contextmanager
def _entered(contexts: Iterable[Context]) -> Iterator[None]:
    """Enter contexts in order, each made after the ones before it were entered."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _overrides(feature: Feature, name: str) -> bool:
    default = getattr(Feature, name)
    mine = getattr(type(feature), name)
    return getattr(mine, "__func__", mine) is not getattr(default, "__func__", default)
