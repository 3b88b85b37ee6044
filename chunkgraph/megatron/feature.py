"""The `Feature` protocol: support for one capability of a model in captures and replays.

`attach` collects the refusals of every kind of `Feature`, in order, and creates one feature of
each kind that applies to the model. `Features` combines them: it enters their contexts in order
and leaves them in reverse. A feature overrides the methods it needs; a method that no feature
overrides costs nothing in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, ClassVar, Literal, Self, TypeVar

import torch

from chunkgraph.engine import Agree, Chunk, StepMode
from chunkgraph.errors import ConfigError, VerifyError
from chunkgraph.megatron.step import Shortage, Step, StepPlanner
from chunkgraph.settings.rule import Rule

if TYPE_CHECKING:
    from chunkgraph.megatron.attached import MegatronChunkGraphs
    from chunkgraph.megatron.captured_part import Call, CapturedPart
    from chunkgraph.megatron.site import Site

__all__ = [
    "AnyFeature",
    "Feature",
    "Features",
    "LimitedFeature",
    "Work",
    "chained",
]

Context = AbstractContextManager[None]
Work = Literal["session", "capture", "verify"]
"""Work of the engine outside of steps.

- ``session``: a capture session; state on the host is restored at its end.
- ``capture``: the passes and captures of a session, inside.
- ``verify``: an eager pass of ``verify``, inside a ``session``.
"""
AnyFeature = TypeVar("AnyFeature", bound="Feature")


class Feature:
    """Support for one capability of a captured model. The base class does nothing.

    Attributes:
        rules: Settings that a graph cannot hold, of the model or with this capability.
        planner: Planner of the slots' variants; at most one feature has one.
    """

    rules: ClassVar[Sequence[Rule]] = ()
    planner: StepPlanner | None = None

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return the facts of a model that rules check and its config lacks."""
        return {}

    @classmethod
    def prepare(cls, site: Site, undo: ExitStack) -> None:
        """Refuse options that do not fit, and change the model before its parts are chosen.

        ``undo`` is closed when the graphs are detached.

        Raises:
            ConfigError: An option does not fit the model or another one; the message names it.
        """

    @classmethod
    def of(cls, site: Site, undo: ExitStack) -> Self | None:
        """Create the feature, which may change the model or Megatron; None if it does not apply."""
        return cls()

    def wrap(self, part: CapturedPart, chunk: Chunk) -> Chunk:
        """Return ``chunk`` as the engine captures it; the first feature wraps innermost."""
        return chunk

    def call(self, part: CapturedPart, call: Call) -> Call:
        """Wrap ``call``, which a part's forward calls; the first feature wraps outermost."""
        return call

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Receive the graphs that the feature belongs to, before their first step."""

    def around(self, work: Work) -> Context:
        """Enclose work of the engine outside of steps; see `Work`."""
        return nullcontext()

    def begin_run(self) -> None:
        """Act before one run of a schedule, ahead of the engine's checks and captures."""

    def step(self, step: Step) -> Context:
        """Enclose one run of a schedule; an exception tells that it failed."""
        return nullcontext()

    def forwards_done(self, step: Step) -> None:
        """Act after the last forward of a training step, while backwards still run."""

    def forwards_resumed(self) -> None:
        """Undo `forwards_done`: the schedule has another forward."""

    def release(self) -> None:
        """Free memory that only graphs use; the graphs no longer exist."""


class LimitedFeature(Feature):
    """A feature that may have no room in a training step, which then runs again.

    Attributes:
        repeats_steps: Whether it checks its room; the same on all ranks.
    """

    repeats_steps = True

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a step writes, apart from buffers and Megatron's metrics."""
        return ()

    def shortage(self, mode: StepMode) -> Shortage | None:
        """Return this rank's shortage of room in a training step, with amount 0 if all had room.

        Return None, on all ranks, if the feature does not check.
        """
        return None

    def having_room(self) -> Context:
        """Enclose the second run of a step in which this feature had no room."""
        return nullcontext()

    def make_room(self, agree: Agree) -> None:
        """Provide more room after the second run, before the next capture; ranks may agree."""

    def drop_step(self) -> None:
        """Discard a run that failed, or whose result is not used."""


class Features:
    """Combine the features of one model.

    Args:
        features: The features in order.

    Attributes:
        limited: Those that may have no room in a step.
        planner: The planner of the slots' variants.

    Raises:
        ConfigError: Several features have a planner.
    """

    def __init__(self, features: Iterable[Feature]) -> None:
        self._all = tuple(features)
        self._overriding = {
            name: tuple(f for f in self._all if _overrides(f, name))
            for name in vars(Feature)
            if not name.startswith("_") and callable(getattr(Feature, name))
        }
        self.limited = tuple(f for f in self._all if isinstance(f, LimitedFeature))
        planners = [f.planner for f in self._all if f.planner is not None]
        if len(planners) > 1:
            raise ConfigError(f"Several features plan steps, and one may: {planners}.")
        self.planner = planners[0] if planners else StepPlanner()
        self._wrong_replay: VerifyError | None = None

    @classmethod
    def of(cls, site: Site, kinds: Iterable[type[Feature]], undo: ExitStack) -> Features:
        """Create every feature that applies to the model."""
        features = (kind.of(site, undo) for kind in kinds)
        return cls([feature for feature in features if feature is not None])

    def find(self, kind: type[AnyFeature]) -> AnyFeature | None:
        """Return the feature of ``kind``, or None."""
        return next((feature for feature in self._all if isinstance(feature, kind)), None)

    def wrap(self, part: CapturedPart) -> Chunk:
        """Return the chunk of ``part`` as the engine captures it."""
        chunk = part.chunk()
        for feature in self._overriding["wrap"]:
            chunk = feature.wrap(part, chunk)
        return chunk

    def call(self, part: CapturedPart, call: Call) -> Call:
        """Wrap the engine's ``call`` as the forward of ``part`` calls it."""
        for feature in reversed(self._overriding["call"]):
            call = feature.call(part, call)
        return call

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Bind the graphs to every feature."""
        for feature in self._overriding["bind"]:
            feature.bind(graphs)

    def around(self, work: Work) -> Context:
        """Enclose work of the engine outside of steps."""
        return _all_of(f.around(work) for f in self._overriding["around"])

    def judge(self, wrong_replay: VerifyError) -> None:
        """Raise the error, or keep the first of a step that may run again until `raise_judged`.

        Without room for all its rows a replay differs from an eager pass, which has this room.
        """
        if not self.repeats_steps:
            raise wrong_replay
        self._wrong_replay = self._wrong_replay or wrong_replay

    def raise_judged(self) -> None:
        """Raise the error that `judge` kept in this step, which does not run again."""
        if self._wrong_replay is not None:
            self.drop_step()
            raise self._wrong_replay

    def begin_run(self) -> None:
        """Begin a run in every feature."""
        self._wrong_replay = None
        for feature in self._overriding["begin_run"]:
            feature.begin_run()

    def step(self, step: Step) -> Context:
        """Enclose one run of a schedule."""
        return _all_of(f.step(step) for f in self._overriding["step"])

    @property
    def repeats_steps(self) -> bool:
        """Return whether a training step runs again if a feature had no room in it."""
        return any(feature.repeats_steps for feature in self.limited)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that a step writes, apart from buffers and Megatron's metrics."""
        return [tensor for feature in self.limited for tensor in feature.tensors]

    @property
    def awaits_forwards(self) -> bool:
        """Return whether a feature acts after the last forward of a step."""
        return bool(self._overriding["forwards_done"])

    def forwards_done(self, step: Step) -> None:
        """Notify every feature after the last forward of a training step."""
        for feature in self._overriding["forwards_done"]:
            feature.forwards_done(step)

    def forwards_resumed(self) -> None:
        """Notify every feature that another forward follows."""
        for feature in self._overriding["forwards_resumed"]:
            feature.forwards_resumed()

    def shortages(self, mode: StepMode) -> list[tuple[LimitedFeature, Shortage]]:
        """List the shortages of features that check, last feature first; alike on all ranks."""
        shortages = [(f, f.shortage(mode)) for f in reversed(self.limited)]
        return [(feature, shortage) for feature, shortage in shortages if shortage is not None]

    def drop_step(self) -> None:
        """Discard a run in every feature."""
        for feature in reversed(self.limited):
            feature.drop_step()

    def release(self) -> None:
        """Free the memory of graphs in every feature."""
        for feature in reversed(self._overriding["release"]):
            feature.release()


def chained(first: Callable[[], None] | None, second: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls ``first``, if there is one, and then ``second``."""
    if first is None:
        return second

    def call() -> None:
        first()
        second()

    return call


@contextmanager
def _all_of(contexts: Iterable[Context]) -> Iterator[None]:
    """Enter contexts in order; each is created after the previous ones are entered."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _overrides(feature: Feature, name: str) -> bool:
    default = getattr(Feature, name)
    method = getattr(type(feature), name)
    return getattr(method, "__func__", method) is not getattr(default, "__func__", default)
