"""Forward-only steps: evaluation, and log-probabilities, with forward graphs of their own.

Every kind of such steps (their shape key, modes of modules, and other settings that a step
compares, such as which adapters are active) has an engine of its own, with one slot for all chunks.
Nothing of a forward outlives its call: outputs are copied, and there is no backward. So between
steps its memory is dead, and lies in a pool of the training graphs, whose memory is dead then too.
Kinds share it as well.

Whoever evaluates may do what no graph can hold. So nothing is refused here: a step whose kind has
no graphs, or whose model has changed, is eager on all ranks; a single call with other arguments, or
with gradients enabled, is eager by itself, as its slot holds nothing that another call needs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from chunkgraph.engine.checks import settings_of
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.observer import Counters
from chunkgraph.engine.program import BackwardPlan, ForwardOnly, Isolated
from chunkgraph.engine.step import StepMode, StepPlan
from chunkgraph.engine.tree import Call
from chunkgraph.errors import ReplayMismatchError

if TYPE_CHECKING:
    from chunkgraph.engine.engine import ChunkGraphs

_MOST_KINDS = 16


class _Evaluation(ForwardOnly):
    """The forward of a forward-only step, with gradients disabled."""

    enables_grad = False

    def plan(self, own: Isolated, sample: Call) -> BackwardPlan:  # noqa: ARG002
        """See `GraphProgram`."""
        return BackwardPlan(in_scratch=())


_EVALUATION = _Evaluation()


class ForwardOnlySteps:
    """Run the forward-only steps of one rank.

    Args:
        new: returns an engine without graphs for these chunks, with these counters.
        chunks: the chunks of the rank.
        counters: the counters of the training steps, which count eager forward-only steps too.

    Attributes:
        current: the engine of the step that runs; None outside of forward-only steps.
        counters: captures and replays of forward-only steps.
        num_eager_calls: calls of replayed steps that ran eagerly.
        needs_banks: whether a step is eager that does not state the banks of its microbatches.
        why_not: why forward-only steps of this rank are eager; "" if they may replay.
    """

    def __init__(
        self,
        new: Callable[[Sequence[Chunk], Counters], ChunkGraphs],
        chunks: Sequence[Chunk],
        counters: Counters,
        *,
        needs_banks: bool,
    ) -> None:
        self._new, self._chunks, self.needs_banks = new, chunks, needs_banks
        self._kinds: dict[Hashable, ChunkGraphs] = {}
        self._places: tuple[list[dict[str, Any]], list[str]] | None = None
        self._has_warned = False
        self.current: ChunkGraphs | None = None
        self.counters = Counters(
            fallbacks=counters.fallbacks,
            packing_overflows=counters.packing_overflows,
            missing_banks=counters.missing_banks,
        )
        self.num_eager_calls = 0
        unknown = [c for c in chunks if c.module is None and c.parameters]
        self.why_not = f"{unknown[0].label} has parameters, but no module" if unknown else ""

    @property
    def engines(self) -> tuple[ChunkGraphs, ...]:
        """Return the engines of all kinds."""
        return tuple(self._kinds.values())

    @property
    def takes_calls(self) -> bool:
        """Return whether a call now may be replayed, or become the sample of a capture."""
        return self.current is not None and not (self.why_not or torch.is_grad_enabled())

    @contextmanager
    def step(
        self, num_microbatches: int | None, shape_key: Hashable, plan: StepPlan, *, eager: bool
    ) -> Iterator[StepMode]:
        """Enclose one forward-only step; see `ChunkGraphs.step`."""
        if plan.banks is None and self.needs_banks:
            graphs, eager = self._new_graphs(), True
        else:
            graphs = self._of((shape_key, self._settings()))
        plan = replace(plan, misfit=plan.misfit or "", digest=0)
        with graphs.step(num_microbatches, shape_key=shape_key, eager=eager, plan=plan) as mode:
            self.current = graphs
            try:
                yield mode
            finally:
                self.current = None

    def call(self, c: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward of chunk ``c`` in the present step."""
        graphs = self.current
        assert graphs is not None
        if self.takes_calls:
            try:
                return graphs.call(c, args, kwargs)
            except ReplayMismatchError as error:  # of the call: nothing was loaded
                self._warn(error)
        return graphs.call_eagerly(c, args, kwargs, is_microbatch=True)

    def drop(self) -> None:
        """Drop all graphs; see `ChunkGraphs.drop`."""
        for graphs in self._kinds.values():
            graphs.drop()

    def release(self) -> None:
        """Release all graphs, and begin again."""
        self._places = None
        kinds, self._kinds = self._kinds, {}
        for graphs in kinds.values():
            graphs.release()

    def _of(self, kind: Hashable) -> ChunkGraphs:
        """Return the engine of a kind of steps; a new one may replace one without graphs.

        If all have graphs, the new one is not kept, so that it never gets any.
        """
        graphs = self._kinds.pop(kind, None)
        if graphs is None:
            graphs = self._new_graphs()
            if len(self._kinds) >= _MOST_KINDS:
                self._warn_of_shapes()
                unused = [k for k, other in self._kinds.items() if other.report is None]
                if not unused:
                    return graphs
                del self._kinds[unused[0]]
        self._kinds[kind] = graphs  # the latest is last
        return graphs

    def _settings(self) -> str:
        """Return the settings of all layers, as text."""
        if self._places is None:
            modules = [c.module for c in self._chunks if c.module is not None]
            self._places = settings_of(layer for module in modules for layer in module.modules())
        return repr([*map(dict.get, *self._places)])

    def _new_graphs(self) -> ChunkGraphs:
        with torch.inference_mode(False):  # it needs nodes of autograd
            return self._new([_evaluated(chunk) for chunk in self._chunks], self.counters)

    def _warn_of_shapes(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Forward-only steps had more than {_MOST_KINDS} shapes or modes of modules, and "
                "only one that comes again is replayed. Give these steps one shape (pad them), or "
                "packed sequences with buckets.",
                stacklevel=6,
            )

    def _warn(self, error: ReplayMismatchError) -> None:
        """Count a call that runs eagerly; warn of the first one."""
        self.num_eager_calls += 1
        if self.num_eager_calls == 1:
            what = str(error).partition("\n  To do:")[0]
            warnings.warn(
                f"A call of a forward-only step ran eagerly: {what}\n"
                "Further calls give no warning.",
                stacklevel=5,
            )


def _evaluated(chunk: Chunk) -> Chunk:
    """Return a chunk as forward-only steps capture it."""
    return replace(
        chunk,
        program=_EVALUATION,
        copies_outputs=None,
        before_backward=None,
        end_of_backward=None,
        new_marker=None,
    )
