"""The `Feature` protocol: support for one capability of a model in captures and replays.

`attach` collects the refusals of every kind of `Feature`, in order, and creates one feature of
each kind that applies to the model. `Features` combines them: it enters their contexts in order
and leaves them in reverse. A feature overrides the methods it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import torch

from chunkgraph import engine
from chunkgraph.engine import Agree, Chunk, Host, StepMode
from chunkgraph.errors import VerifyError
from chunkgraph.megatron.core.random_state import graph_safe_generators
from chunkgraph.settings.rule import Rule

if TYPE_CHECKING:
    from chunkgraph.megatron.attachment import MegatronChunkGraphs
    from chunkgraph.megatron.features.packing.steps import StepPlans
    from chunkgraph.megatron.model_part import Call, ModelPart
    from chunkgraph.megatron.site import Site

Context = AbstractContextManager[object]
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
        plans: The plans of packed steps, if this is the feature that makes them.
        replays_forwards: Whether forward-only steps may have graphs with it.
    """

    rules: ClassVar[Sequence[Rule]] = ()
    replays_forwards: ClassVar[bool] = True
    plans: StepPlans | None = None

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

    def wrap(self, part: ModelPart, chunk: Chunk) -> Chunk:
        """Return ``chunk`` as the engine captures it; the first feature wraps innermost."""
        return chunk

    def call(self, part: ModelPart, call: Call) -> Call:
        """Wrap ``call``, which a part's forward calls; the first feature wraps outermost."""
        return call

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Receive the graphs that the feature belongs to, before their first step."""

    def around(self, work: Work) -> Context:
        """Enclose work of the engine outside of steps; see `Work`.

        What it yields for a ``capture`` lives as long as the graphs.
        """
        return nullcontext()

    def begin_run(self) -> None:
        """Act before one run of a schedule, ahead of the engine's checks and captures."""

    def step(self, step: Step) -> Context:
        """Enclose one run of a schedule; an exception tells that it failed."""
        return nullcontext()

    def forwards_done(self, step: Step) -> None:
        """Act after the last forward of a training step, while backwards still run."""

    def release(self) -> None:
        """Free memory that only graphs use; the graphs no longer exist."""


class LimitedFeature(Feature):
    """A feature that may have no room in a training step, which then runs again.

    Attributes:
        repeats_steps: Whether it checks its room; the same on all ranks.
    """

    repeats_steps = True
    replays_forwards = False

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


class Features(Host):
    """Combine the features of one model, for the engine as well.

    Args:
        features: The features in order.

    Attributes:
        limited: Those that may have no room in a step.
        plans: The plans of packed steps; None if documents are not packed.
    """

    def __init__(self, features: Iterable[Feature]) -> None:
        super().__init__()
        self._all = tuple(features)
        self.limited = tuple(f for f in self._all if isinstance(f, LimitedFeature))
        self.plans = next((f.plans for f in self._all if f.plans is not None), None)
        self._wrong_replay: VerifyError | None = None

    def find(self, kind: type[AnyFeature]) -> AnyFeature | None:
        """Return the feature of ``kind``, or None."""
        return next((feature for feature in self._all if isinstance(feature, kind)), None)

    def wrap(self, part: ModelPart) -> Chunk:
        """Return the chunk of ``part`` as the engine captures it."""
        chunk = part.chunk()
        for feature in self._all:
            chunk = feature.wrap(part, chunk)
        return chunk

    @property
    def only_training(self) -> str:
        """Return the names of features with which only training steps have graphs, or ""."""
        return ", ".join(type(f).__name__ for f in self._all if not f.replays_forwards)

    def call(self, part: ModelPart, call: Call) -> Call:
        """Wrap the engine's ``call`` as the forward of ``part`` calls it."""
        for feature in reversed(self._all):
            call = feature.call(part, call)
        return call

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Bind the graphs to every feature."""
        for feature in self._all:
            feature.bind(graphs)

    def preserving(self) -> Context:
        """Enclose a session, or an eager pass of ``verify``, in every feature."""
        return self._around("session")

    def capturing(self) -> Context:
        """Enclose the passes and captures of a session in every feature."""
        return self._around("capture")

    def verifying(self) -> Context:
        """Enclose an eager pass of ``verify`` in every feature."""
        return self._around("verify")

    def generators(self) -> list[torch.Generator]:
        """Return the generators of Megatron's random states."""
        return graph_safe_generators()

    def _around(self, work: Work) -> Context:
        return _all_of(f.around(work) for f in self._all)

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
        for feature in self._all:
            feature.begin_run()

    def step(self, step: Step) -> Context:
        """Enclose one run of a schedule."""
        return _all_of(f.step(step) for f in self._all)

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
        return any(type(f).forwards_done is not Feature.forwards_done for f in self._all)

    def forwards_done(self, step: Step) -> None:
        """Notify every feature after the last forward of a training step."""
        for feature in self._all:
            feature.forwards_done(step)

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
        for feature in reversed(self._all):
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
def _all_of(contexts: Iterable[Context]) -> Iterator[list[object]]:
    """Enter contexts in order; each is created after the previous ones are entered."""
    with ExitStack() as stack:
        yield [stack.enter_context(context) for context in contexts]


@dataclass(frozen=True)
class StepInputs:
    """The contents of a training step, as the caller announces or passes them.

    Attributes:
        packings: Number of tokens of each document of each microbatch; None if not passed.
        misfit: Why the step cannot be replayed, or "".
        buckets: Rows of each microbatch; None for those of the smallest bucket that holds it.
        contexts: The bank of each microbatch, if context-parallel sizes change.
    """

    packings: Sequence[Sequence[int]] | None = None
    misfit: str = ""
    buckets: Sequence[int] | None = None
    contexts: Sequence[Any] | None = None


@dataclass(frozen=True)
class StepPlan(engine.StepPlan):
    """The plan of a step's microbatches, as the engine takes it, and what the step does with it.

    Attributes:
        repeated_misfit: The ``misfit`` of a second run of the step, which has no announcement.
        rows: Rows of each microbatch; None for those of the schedule.
        cut_for: Banks to whose number of sequences offsets are cut.
        pinned: Rows on this rank and bank of each microbatch, to which the caller's are padded;
            empty: calls are left as they are.
        is_repeated: Whether the step runs again because something had no room.
    """

    repeated_misfit: str | None = None
    rows: Sequence[int] | None = None
    cut_for: Sequence[Hashable] = ()
    pinned: Sequence[tuple[int, Any]] = ()
    is_repeated: bool = False

    @property
    def repeated(self) -> StepPlan:
        """Return the plan of a second run of the step."""
        return replace(self, misfit=self.repeated_misfit, is_repeated=True)


@dataclass(frozen=True)
class Step:
    """One run of a step's schedule.

    Attributes:
        mode: How the step runs.
        is_training: Whether the step has backwards.
        plan: The plan of its microbatches.
    """

    mode: StepMode
    is_training: bool
    plan: StepPlan

    @property
    def is_replayed(self) -> bool:
        """Return whether graphs are replayed."""
        return self.mode is StepMode.REPLAY


@dataclass(frozen=True)
class Shortage:
    """A shortage of room for one feature in a training step, on this rank.

    Attributes:
        name: Name in reports.
        amount: The missing amount; 0 if everything had room.
        text: Text for the log of this rank.
        is_at_limit: Whether this rank cannot provide more room.
        limit: Names of the settings that limit the room.
    """

    name: str
    amount: int
    text: str = ""
    is_at_limit: bool = False
    limit: str = ""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers whose maximum the ranks compute."""
        return self.amount, int(self.is_at_limit)
