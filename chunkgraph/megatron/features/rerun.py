"""Run a step again if the stash or an expert had no room in it, before its result is used.

The flags stay on the device while a step runs. At the end of the schedule the host reads their
values after the last forward, while the device still runs backwards, and all ranks agree on them.
If any rank had no room, all ranks restore gradients, random state, buffers and metrics, and the
step runs once more, eagerly, from the same inputs. Then the room grows, and graphs are captured
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from chunkgraph.engine.agreement import Agree, agree_alone
from chunkgraph.engine.step import StepMode
from chunkgraph.megatron.core.access import private_names
from chunkgraph.megatron.core.random_state import RandomStates
from chunkgraph.megatron.feature import LimitedFeature, Shortage
from chunkgraph.megatron.features.experts.state import expert_metrics
from chunkgraph.megatron.site import new_agreement

if TYPE_CHECKING:
    from chunkgraph.megatron.attachment import MegatronChunkGraphs


class RewindableInputs:
    """Repeat the items of a schedule's ``data_iterator``, or of a list of them.

    Containers are returned as copies, so that a forward step may remove items from them; the
    tensors in them are the same objects.

    Args:
        data_iterator: The schedule's argument.

    Attributes:
        data_iterator: The argument to pass to the schedule instead.
    """

    def __init__(self, data_iterator: Any) -> None:
        self._iterators: dict[int, _RecordingIterator] = {}
        if isinstance(data_iterator, (list, tuple)):
            self.data_iterator: Any = [self._recording(source) for source in data_iterator]
        else:
            self.data_iterator = self._recording(data_iterator)

    def rewind(self) -> None:
        """Start again with the first item of the step."""
        for iterator in self._iterators.values():
            iterator.position = 0

    def _recording(self, source: Any) -> Any:
        if source is None:
            return None
        return self._iterators.setdefault(id(source), _RecordingIterator(source))


class _RecordingIterator:
    def __init__(self, source: Any) -> None:
        self._source = source
        self._items: list[Any] = []
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.position == len(self._items):
            self._items.append(next(self._source))
        item = self._items[self.position]
        self.position += 1
        return tree_unflatten(*tree_flatten(item))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class StepState:
    """Save and restore the state that a step changes.

    The state consists of buffers, random state, ``more_tensors`` and Megatron's process-wide
    metrics; gradients are reset.

    Args:
        model_chunks: The model chunks of this rank.
        more_tensors: Tensors that the step writes, apart from model buffers.
    """

    def __init__(
        self, model_chunks: Sequence[nn.Module], more_tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        self._chunks = tuple(model_chunks)
        # Not `chunk.buffers()`: Megatron's DDP has a list of that name.
        modules = [m for chunk in model_chunks for m in chunk.modules()]
        buffers = [b for m in modules for b in nn.Module.buffers(m, recurse=False)]
        self._tensors = list({id(t): t for t in (*buffers, *more_tensors)}.values())
        self._saved = [torch.empty_like(t) for t in self._tensors]
        self._random: RandomStates | None = None
        self._metrics: dict[str, torch.Tensor] = {}

    def save(self) -> None:
        """Save the state, before a step."""
        self._random = RandomStates()
        running = running_metrics()
        previous, self._metrics = self._metrics, {}
        for name, value in running.items():
            copy = previous.get(name)
            if copy is None or copy.shape != value.shape:
                copy = torch.empty_like(value)
            self._metrics[name] = copy
        _copy([*self._saved, *self._metrics.values()], [*self._tensors, *running.values()])

    def restore(self) -> None:
        """Restore the saved state and reset gradients; a step begins without gradients."""
        assert self._random is not None
        self._random.restore()
        _copy(self._tensors, self._saved)
        for name, value in running_metrics().items():
            if name in self._metrics:
                value.copy_(self._metrics[name])
            else:  # first recorded in this step
                value.zero_()
        for chunk in self._chunks:
            zero_buffers: Any = getattr(chunk, "zero_grad_buffer", None)
            if zero_buffers is not None:
                zero_buffers()
            for parameter in chunk.parameters():
                parameter.grad = None
                if zero_buffers is None and hasattr(parameter, "main_grad"):
                    parameter.main_grad.zero_()


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy with few kernels, one for each dtype, since this runs before every step."""
    by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for pair in zip(targets, sources, strict=True):
        by_dtype.setdefault(pair[0].dtype, []).append(pair)
    with torch.no_grad():
        for pairs in by_dtype.values():
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def running_metrics() -> dict[str, torch.Tensor]:
    """Return the tensors, not copies, of routers' and multi-token prediction's metrics by name.

    Megatron creates a tensor when it first records the metric, so call this at every step.
    """
    (log,) = private_names(
        "megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper"
    )
    predicted = {
        f"multi-token prediction {name}": value
        for name, value in log.tracker.items()
        if isinstance(value, torch.Tensor)
    }
    return {**{f"experts {name}": v for name, v in expert_metrics().items()}, **predicted}


_log = logging.getLogger(__name__)

RunStep = Callable[[dict[str, Any], bool], tuple[Any, StepMode]]
"""A function of the schedule's keywords, and whether to run eagerly.

It runs the schedule and returns its result and its mode.
"""


class OverflowGuard:
    """Run the training steps of one rank. All ranks have a guard, with or without experts.

    A step must begin without gradients, as Megatron's steps do.

    Args:
        graphs: The rank's graphs; all ranks create their guards together.
        undo: Closes the guard's own agreement; the engine's runs ahead of steps.
    """

    def __init__(self, graphs: MegatronChunkGraphs, undo: ExitStack) -> None:
        self._graphs = graphs
        self._features = graphs.features
        self._counters = graphs.counters
        self._rank = graphs.site.place.rank
        self._state = StepState(graphs.site.chunks, graphs.features.tensors)
        graphs.site.meet()
        self._agree: Agree = new_agreement(undo) or agree_alone

    def run(self, step: RunStep, kwargs: dict[str, Any]) -> Any:
        """Run one training step, and again if something had no room.

        Args:
            step: Runs the schedule.
            kwargs: Keywords of the schedule.

        Returns:
            The schedule's result in the last run.

        Raises:
            VerifyError: All had room, and a replay is wrong.
        """
        inputs = RewindableInputs(kwargs["data_iterator"])
        kwargs = {**kwargs, "data_iterator": inputs.data_iterator}
        self._state.save()
        try:
            result, mode = step(kwargs, False)
        except BaseException:
            self._features.drop_step()
            raise
        shortages = self._agree_on_shortages(mode)
        if not shortages:
            self._features.raise_judged()
            return result
        del result  # it may alias memory of the graphs
        inputs.rewind()
        self._state.restore()
        return self._run_again(step, kwargs, mode, shortages)

    def _agree_on_shortages(self, mode: StepMode) -> list[tuple[LimitedFeature, Shortage]]:
        """Return the features that had no room on any rank, each with the largest shortage."""
        local_shortages = self._features.shortages(mode)
        if not local_shortages:
            return []
        numbers = iter(self._agree([n for _, local in local_shortages for n in local.numbers]))
        shortages, texts = [], []
        for feature, local in local_shortages:
            amount, is_at_limit = next(numbers), bool(next(numbers))
            largest = replace(local, amount=amount, text="", is_at_limit=is_at_limit)
            if largest.amount:
                shortages.append((feature, largest))
                self._counters.overflow_reruns[local.name] += 1
            if local.amount:
                texts.append(local.text)
        if texts or (shortages and self._rank == 0):
            text = " and ".join(texts) or "another rank had no room"
            _log.warning("rank %d: the step runs again eagerly: %s.", self._rank, text)
        return shortages

    def _run_again(
        self,
        step: RunStep,
        kwargs: dict[str, Any],
        mode: StepMode,
        shortages: Sequence[tuple[LimitedFeature, Shortage]],
    ) -> Any:
        was_captured = mode is StepMode.REPLAY
        growing = [(feature, largest) for feature, largest in shortages if not largest.is_at_limit]
        if not was_captured and self._graphs.engine.report is not None:
            growing = []  # eager passes with more room than the graphs have would differ
        if self._rank == 0:
            for _, largest in shortages if was_captured else ():
                if largest.is_at_limit:
                    _log.warning(
                        "room does not grow (%s): %s is reached.", largest.name, largest.limit
                    )
        if was_captured and growing:
            self._graphs.release()
            why = growing[0][1].name
            self._counters.recaptures.append(why)
            if self._rank == 0:
                _log.warning(
                    "graphs are captured again with more room (%s); recaptures so far: %d.",
                    why,
                    len(self._counters.recaptures),
                )
        with ExitStack() as room:
            for feature, _ in shortages:
                room.enter_context(feature.having_room())
            # After a release the step is one of the eager steps before the next capture.
            result, mode = step(kwargs, not (was_captured and growing))
        assert mode is StepMode.EAGER
        for feature, _ in growing:  # the same on all ranks
            feature.make_room(self._agree)
        return result
