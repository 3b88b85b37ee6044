"""Chunk graphs inside Megatron's unmodified ``pretrain()``.

In your own script::

    import chunkgraph.megatron

    chunkgraph.megatron.enable()      # before Megatron's arguments are parsed
    ...
    pretrain(...)                     # with --cuda-graph-granularity chunk among the arguments

``chunkgraph launch`` makes this call for scripts that do not.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from chunkgraph._text import counted, format_bytes
from chunkgraph.engine import CaptureOptions, CaptureReport
from chunkgraph.engine.agreement import refuse_differences
from chunkgraph.launch.arguments import equal_facts, refuse_changed_arguments, settle_arguments
from chunkgraph.launch.flags import GraphFlags
from chunkgraph.launch.packed_steps import OwnDocuments, PackedSteps, SpreadDocuments
from chunkgraph.launch.patches import (
    UnitScale,
    patch_pretrain,
    pretrain_arguments,
    pretrain_hooks,
    write_scalars,
)
from chunkgraph.launch.step_records import mark
from chunkgraph.launch.validation import StepChecks
from chunkgraph.megatron.attachment import MegatronChunkGraphs, attach, config_of, eager_driver
from chunkgraph.megatron.core.access import import_megatron, patch_attributes
from chunkgraph.megatron.core.agreement import exchange_between
from chunkgraph.megatron.core.data_parallel import delay_in_new_configs
from chunkgraph.megatron.features.contexts import ContextGroups, follow_groups
from chunkgraph.megatron.features.experts.feature import Experts, dropped_tokens
from chunkgraph.megatron.features.experts.overlap import turn_off_overlap
from chunkgraph.megatron.features.experts.state import scale_expert_metrics
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.packing.params import shares_keys
from chunkgraph.megatron.features.packing.script import packing_options
from chunkgraph.megatron.pipeline.choice import PipelinePlace
from chunkgraph.megatron.pipeline.driver import ScheduleDriver
from chunkgraph.megatron.site import new_agreement
from chunkgraph.schedules import splits_backward

_PROFILES = ("profile", "use_pytorch_profiler", "nvtx_ranges")
"""Megatron's flags of profilers, which show the names of replays."""
_NUM_TIMED = 20
_REPLAYS, _DROPPED = ("replays", ""), ("dropped tokens", "")
"""Counts of `StepMetrics`: a name and a reason."""


def enable(*, on_cpu: bool = False) -> ChunkGraphsInPretrain:
    """Add the flags of chunk graphs to Megatron's ``pretrain()``, and hooks that implement them.

    Call it before Megatron's arguments are parsed. Without ``--cuda-graph-granularity chunk`` among
    them, the hooks do nothing. A second call, for example under ``chunkgraph launch``, returns the
    hooks of the first one unchanged.

    Args:
        on_cpu: Whether a CPU host is active (see :mod:`chunkgraph.megatron.cpu.pretrain`).

    Returns:
        The hooks; ``disable()`` removes them from Megatron.

    Raises:
        MissingDependencyError: ``megatron.training`` cannot be imported.
        ConfigError: The installed release is outside the supported range, or lacks a required name.
    """
    hooks = pretrain_hooks()
    if isinstance(hooks, ChunkGraphsInPretrain):
        return hooks
    hooks = ChunkGraphsInPretrain(on_cpu=on_cpu)
    undo = contextlib.ExitStack()
    undo.callback(patch_pretrain(hooks, on_cpu=on_cpu))
    undo.callback(hooks.delaying.close)
    hooks.disable = undo.close
    return hooks


class ChunkGraphsInPretrain:
    """The hooks of chunk graphs in Megatron's pretrain program, which `patch_pretrain` installs.

    Attributes:
        flags: The parsed flags; None before parsing and for granularity ``layer``.
        graphs: The graphs that are attached to the model during training, otherwise None.
        unknown: Arguments that Megatron's parser did not know.
        was_parsed: Whether Megatron's arguments were parsed.
        has_trained: Whether graphs were ever attached to a model.
        always_succeeds: Whether every step of the optimizer succeeds, on all ranks.
        disable: Function that removes the hooks from Megatron.
        delaying: While it is open, layers that are built may delay their weight gradients.
        on_parser: Callback with Megatron's parser after all flags are added.
    """

    def __init__(self, *, on_cpu: bool = False) -> None:
        self.flags: GraphFlags | None = None
        self.graphs: MegatronChunkGraphs | None = None
        self.unknown: list[str] = []
        self.was_parsed = False
        self.has_trained = False
        self.always_succeeds = False
        self.disable: Callable[[], None] = lambda: None
        self.on_parser: Callable[[argparse.ArgumentParser], None] = lambda _: None
        self._on_cpu = on_cpu
        self._schedule = "auto"
        self._driver: ScheduleDriver | None = None
        self.delaying = contextlib.ExitStack()
        self._metrics: StepMetrics | None = None
        self._steps: PackedSteps | None = None

    # -- called by Megatron --------------------------------------------------------------------

    def parsed(self, args: argparse.Namespace) -> None:
        """Check the flags, and turn off Megatron's own graphs."""
        self.flags = settle_arguments(args, on_cpu=self._on_cpu)
        self.was_parsed = True
        self.delaying.close()
        self._schedule = args.pipeline_schedule or "auto"
        if splits_backward(self._schedule):
            self.delaying.callback(delay_in_new_configs())

    def before_model(self) -> None:
        """Check that all ranks train the same model with the same settings."""
        if self.flags is not None:
            with contextlib.ExitStack() as undo:
                facts = equal_facts(pretrain_arguments())
                refuse_differences(new_agreement(undo), dist.get_rank(), facts)

    @contextlib.contextmanager
    def training(self, model: Any, optimizer: Any = None) -> Iterator[None]:
        """Attach graphs to the loaded and wrapped model, and detach them on every exit.

        They also hold the step of ``optimizer``, unless it is None.
        """
        self.delaying.close()
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        # Graphs hold memory of communicators: detach them before the process groups are destroyed.
        with contextlib.ExitStack() as undo:
            undo.callback(self._forget)
            if self.flags is not None:
                self._attach(self.flags, model, chunks, undo)
                if optimizer is not None and self.flags.capture.captures_optimizer:
                    self._attach_optimizer(optimizer, undo)
            elif self._schedule != "auto":
                self._driver = eager_driver(chunks, self._schedule)
                undo.callback(self._driver.close)
            yield

    def _attach(
        self, flags: GraphFlags, model: Any, chunks: Sequence[Any], undo: contextlib.ExitStack
    ) -> None:
        args = pretrain_arguments()
        # The script may have changed arguments after parsing.
        refuse_changed_arguments(args)
        # Past the script's own filters: the capture failed, and it may train without graphs.
        warnings.filterwarnings("always", message=r"(?s).*Training continues eagerly")
        contexts = self._contexts(flags, args, chunks, undo)
        modules = (module for chunk in chunks for module in chunk.modules())
        for line in (*flags.turned_off, turn_off_overlap(modules, undo)):
            if line:
                _print_on_rank_0(line)
        self.graphs = graphs = attach(
            model,
            scope=flags.capture.scope,
            options=CaptureOptions(**flags.capture.options),
            token_drops=flags.token_drops,
            packing=contexts or packing_options(flags.packing, args),
            stash=flags.stash,
            schedule=flags.schedule,
        )
        undo.callback(graphs.detach)
        if any(getattr(args, name, False) for name in _PROFILES):
            graphs.name_replays()
        self.has_trained = True
        self._metrics = StepMetrics(graphs)
        _print_on_rank_0(start_line(graphs, flags))
        if graphs.site.facts().packed:
            self._steps = _packed_steps(args, graphs, chunks, contexts)
            undo.callback(self._steps.close)

    def _attach_optimizer(self, optimizer: Any, undo: contextlib.ExitStack) -> None:
        assert self.graphs is not None
        step = self.graphs.capture_optimizer(optimizer)
        self.always_succeeds = step.always_succeeds
        if step.always_succeeds:  # Megatron's loop reads the scale in every step
            scale = UnitScale(optimizer.get_loss_scale())
            undo.callback(patch_attributes(optimizer, {"get_loss_scale": lambda: scale}))
        undo.callback(StepChecks(step).close)
        if step.why_eager:
            _print_on_rank_0(f"chunk graphs: the optimizer runs eagerly: {step.why_eager}")

    def _contexts(
        self, flags: GraphFlags, args: Any, chunks: Sequence[Any], undo: contextlib.ExitStack
    ) -> PackedBanks | None:
        """Return the banks for changing context-parallel sizes; None if the size is fixed."""
        if not flags.packing.context_parallel_sizes:
            return None
        state = import_megatron("megatron.core.parallel_state")
        place = PipelinePlace.current(len(chunks), config_of(chunks[0]))
        limits = flags.packing.limits(
            args.seq_length,
            state.get_data_parallel_world_size(with_context_parallel=True),
            multiple_of=place.group_size if len(chunks) > 1 else 1,
            counts_padding=shares_keys(args),
        )
        groups = ContextGroups.of_data_parallel(
            limits.group_sizes, has_experts=bool(args.num_experts)
        )
        # Not after an error: if only this rank has one, others may wait in these groups forever.
        undo.push(lambda kind, _error, _trace: groups.close() if kind is None else None)
        undo.callback(follow_groups(chunks, groups))
        return PackedBanks.of_limits(limits, groups)

    def _forget(self) -> None:
        self.always_succeeds = False
        self.graphs = self._driver = self._metrics = self._steps = None

    def wrap_schedule(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the schedule of a training or evaluation step while graphs are attached."""
        graphs = self.graphs
        if graphs is None:
            return self._driver or forward_backward
        wrapped = graphs.wrap_forward_backward(forward_backward)
        if self._steps is not None:
            graphs.before_run = self._steps.begin_run
            wrapped = self._steps.wrap(wrapped)

        def chunk_graph_step(**kwargs: Any) -> Any:
            was_captured = graphs.engine.report is not None
            result = wrapped(**kwargs)
            if graphs.engine.report is not None and not was_captured:
                experts = graphs.find(Experts)
                dispatch = "" if experts is None else experts.dispatch
                _print_on_rank_0(capture_line(graphs.engine.report, dispatch))
            return result

        return chunk_graph_step

    def before_log(self, iteration: int) -> None:
        """Count the step, and write its metrics to the same writers as Megatron's."""
        if self._steps is not None and self._steps.metrics_scales is not None:
            # Megatron divides the metrics by its own number of microbatches.
            scale_expert_metrics(*self._steps.metrics_scales)
        if self._metrics is not None:
            self._metrics.step()
            if (step_ms := self._metrics.replayed_ms()) is not None:
                line = f"chunk graphs: a replayed step takes {step_ms:.1f} ms"
                if not pretrain_arguments().cross_entropy_loss_fusion:
                    line += "; --cross-entropy-loss-fusion saves passes over all logits"
                _print_on_rank_0(line)
            write_scalars(self._metrics.scalars(), iteration)
        if self._steps is not None:
            self._announce_after(iteration, self._steps)

    def log_text(self) -> str:
        """Return the metrics since the last line, in the format of Megatron's log."""
        return self._metrics.take_line() if self._metrics is not None else ""

    def _announce_after(self, iteration: int, steps: PackedSteps) -> None:
        """Announce the next step if Megatron's loop is going to train it.

        At this point the step is complete: it cannot run again.
        """
        args = pretrain_arguments()
        exit_interval = getattr(args, "exit_interval", None)
        if not (
            iteration >= args.train_iters
            or (exit_interval and iteration % exit_interval == 0)
            or iteration in (getattr(args, "phase_transition_iterations", None) or ())
            or iteration + 1 in (getattr(args, "iterations_to_skip", None) or ())
            # External loaders may save their position.
            or getattr(args, "dataloader_type", None) == "external"
        ):
            # A step of another number, in a ramp-up, withdraws the announcement.
            calculator = import_megatron("megatron.core.num_microbatches_calculator")
            steps.announce_next(calculator.get_num_microbatches())


def _packed_steps(
    args: Any, graphs: MegatronChunkGraphs, chunks: Sequence[Any], contexts: PackedBanks | None
) -> PackedSteps:
    """Create the reader of each step's documents; all ranks must call this together."""
    state = import_megatron("megatron.core.parallel_state")
    tensor_ranks = exchange_between(state.get_tensor_model_parallel_group())
    if contexts is None:
        return OwnDocuments(graphs, chunks, _rank(), tensor_ranks)
    return SpreadDocuments(
        contexts,
        chunks,
        _rank(),
        device=graphs.site.device,
        data_ranks=exchange_between(state.get_data_parallel_group(with_context_parallel=True)),
        tensor_ranks=tensor_ranks,
        has_experts=bool(args.num_experts),
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _print_on_rank_0(line: str) -> None:
    if _rank() == 0:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def start_line(graphs: MegatronChunkGraphs, flags: GraphFlags) -> str:
    """Return a line about the upcoming capture on rank 0."""
    slots = graphs.num_slots
    scope: str = graphs.scope.scope
    if graphs.scope.why_block:
        scope += f" (no whole chunk with {graphs.scope.why_block})"
    return (
        f"chunk graphs: scope {scope}, {_slots(slots)} on rank 0 "
        f"({2 * sum(slots) * graphs.num_banks} graphs), verify {flags.capture.verify}; "
        f"capture after {counted(flags.capture.num_warmup_steps, 'eager step')}"
    )


def capture_line(report: CaptureReport, expert_dispatch: str = "") -> str:
    """Return a line about the finished capture on rank 0, with `Experts.dispatch`, if any."""
    total = report.slot_bytes + report.scratch_bytes + report.static_bytes
    slots = _slots(report.num_slots, report.shared_slots)
    return (
        f"chunk graphs: captured {counted(report.num_graphs, 'graph')}, {slots} on rank 0, "
        f"in {report.duration_ms / 1e3:.2f} s; {format_bytes(total)}: slots "
        f"{format_bytes(report.slot_bytes)}, scratch {format_bytes(report.scratch_bytes)}, static "
        f"{format_bytes(report.static_bytes)}"
        + (f"; experts: {expert_dispatch}" if expert_dispatch else "")
        + (f"; memset nodes were kept: {report.memsets_kept}" if report.memsets_kept else "")
    )


def _slots(num_slots: tuple[int, ...], are_shared: bool = False) -> str:
    if are_shared and len(num_slots) > 1:
        return f"{counted(num_slots[0], 'slot')} shared by {len(num_slots)} chunks"
    counts = " + ".join(str(n) for n in num_slots)
    return f"{counts} slot{'s' if num_slots != (1,) else ''}"


class StepMetrics:
    """Differences of the engine's counters on this rank, by step and by log line."""

    def __init__(self, graphs: MegatronChunkGraphs) -> None:
        self._graphs = graphs
        self._last = self._line = self._read()
        self._step: Counter[tuple[str, str]] = Counter()
        self._marks: list[Any] = []
        self._is_told = False

    def step(self) -> None:
        """Record the end of a training step; evaluation since the previous one counts with it."""
        now = self._read()
        self._step, self._last = now - self._last, now

    def replayed_ms(self) -> float | None:
        """Return, once, the median time of 20 steps in a row that were replayed, in ms."""
        if len(self._marks) <= _NUM_TIMED:
            is_replayed = self._step.keys() - {_DROPPED} == {_REPLAYS}
            self._marks = [*(self._marks if is_replayed else ()), mark()]
            return None
        if self._is_told or not self._marks[-1].query():
            return None
        self._is_told = True
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return statistics.median(first.elapsed_time(last) for first, last in pairs)

    def scalars(self) -> dict[str, float]:
        """Return the last step's metrics by TensorBoard name; memory in bytes, times in seconds."""
        report = self._graphs.engine.report
        # Every reason from its first occurrence on, also at 0: a curve repeats its last value.
        return {
            **{
                "/".join(filter(None, ("chunk-graphs", name.replace(" ", "-"), reason))): (
                    self._step[name, reason]
                )
                for name, reason in self._last
            },
            "chunk-graphs/capture-seconds": report.duration_ms / 1e3 if report else 0.0,
            "chunk-graphs/pool-bytes": (
                report.slot_bytes + report.scratch_bytes + report.static_bytes if report else 0
            ),
        }

    def take_line(self) -> str:
        """Return the metrics since the last call, each as `` name: value |``."""
        now = self._read()
        since, self._line = now - self._line, now
        parts = [f" graph replays: {since.pop(_REPLAYS, 0):5d} |"]
        if _DROPPED in now:
            parts.append(f" dropped tokens: {since.pop(_DROPPED, 0)} |")
        parts += [f" {name} ({reason}): {count} |" for (name, reason), count in since.items()]
        return "".join(parts)

    def _read(self) -> Counter[tuple[str, str]]:
        """Return the counts by name and reason; of dropped tokens, those that have arrived."""
        counters, dropped = self._graphs.counters, dropped_tokens(self._graphs)
        return Counter(
            {
                _REPLAYS: counters.replays,
                **({_DROPPED: sum(dropped.values())} if dropped else {}),
                **{("steps run again", why): n for why, n in counters.overflow_reruns.items()},
                **{("eager steps", why): n for why, n in counters.fallbacks.items()},
            }
        )
