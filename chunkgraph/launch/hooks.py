"""Chunk graphs inside Megatron's ``pretrain()``, which calls them and stays as it is.

In a script of one's own::

    import chunkgraph.megatron

    chunkgraph.megatron.enable()      # before Megatron's arguments are parsed
    ...
    pretrain(...)                     # with --cuda-graph-granularity chunk among the arguments

``chunkgraph launch`` makes this call for scripts that do not.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from chunkgraph.launch.arguments import refuse_changed_arguments, settle_arguments
from chunkgraph.launch.document_source import DocumentSource
from chunkgraph.launch.flags import GraphFlags, add_flags
from chunkgraph.launch.look_ahead import num_microbatches_at
from chunkgraph.launch.own_documents import OwnDocuments
from chunkgraph.launch.packed_steps import PackedSteps
from chunkgraph.launch.packing_rules import changing_limits, packing_options, resolved_flags
from chunkgraph.launch.patches import (
    count_documents_on_cpu,
    patch_pretrain,
    pretrain_arguments,
    pretrain_hooks,
    tensorboard_writers,
)
from chunkgraph.launch.run_record import capture_line, save_run_record, start_line
from chunkgraph.launch.spread_documents import SpreadDocuments
from chunkgraph.launch.step_metrics import StepMetrics
from chunkgraph.megatron.attachment import MegatronChunkGraphs, attach, config_of
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.core.collectives import gather_from_data_ranks, share_in_tensor_group
from chunkgraph.megatron.features.contexts import ContextGroups, follow_groups
from chunkgraph.megatron.features.experts.rows_in_use import moe_layers_of
from chunkgraph.megatron.features.experts.state import scale_expert_metrics
from chunkgraph.megatron.features.experts.worst_case_dispatch import use_worst_case_dispatch
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.features.stash.feature import stash_options
from chunkgraph.megatron.topology import PipelinePlace

__all__ = ["ChunkGraphsInPretrain", "enable"]


def enable(*, on_cpu: bool = False, run_dir: Path | None = None) -> ChunkGraphsInPretrain:
    """Give Megatron's ``pretrain()`` the flags of chunk graphs, and what they ask for.

    Call it before Megatron's arguments are parsed. Without ``--cuda-graph-granularity chunk`` among
    them nothing else happens. Where it was called before, as ``chunkgraph launch`` does it, the
    hooks of that call are returned and go on as they are.

    Args:
        on_cpu: whether a CPU host is in force (see :mod:`chunkgraph.megatron.cpu.pretrain`).
        run_dir: where the resolved settings are saved; default is Megatron's ``--save`` folder.

    Returns:
        The hooks; ``disable()`` takes them out of Megatron again.

    Raises:
        MissingDependencyError: ``megatron.training`` cannot be imported.
        ConfigError: the installed release is outside the range that is known, or has moved a name
            that is needed.
    """
    hooks = pretrain_hooks()
    if isinstance(hooks, ChunkGraphsInPretrain):
        return hooks
    hooks = ChunkGraphsInPretrain(on_cpu=on_cpu, run_dir=run_dir)
    undo = contextlib.ExitStack()
    undo.callback(patch_pretrain(hooks))
    if on_cpu:
        undo.callback(count_documents_on_cpu())
    hooks.disable = undo.close
    return hooks


class ChunkGraphsInPretrain:
    """What Megatron's pretrain program calls; see `chunkgraph.launch.patches.PretrainHooks`.

    Attributes:
        flags: what the command line asked for, while training with every default written out; None
            before it is parsed and for ``layer``.
        graphs: attached to the model while it is trained, otherwise None.
        was_parsed: whether Megatron's arguments were parsed.
        has_trained: whether graphs were ever attached to a model.
        disable: takes the hooks out of Megatron.
        on_parser: called with the parser of Megatron, all flags in it.
    """

    def __init__(self, *, on_cpu: bool = False, run_dir: Path | None = None) -> None:
        self.flags: GraphFlags | None = None
        self.graphs: MegatronChunkGraphs | None = None
        self.was_parsed = False
        self.has_trained = False
        self.disable: Callable[[], None] = lambda: None
        self.on_parser: Callable[[argparse.ArgumentParser], None] = lambda _: None
        self._on_cpu = on_cpu
        self._run_dir = run_dir
        self._metrics: StepMetrics | None = None
        self._steps: PackedSteps | None = None
        self._has_told_failure = False

    # -- called by Megatron --------------------------------------------------------------------

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        add_flags(parser)
        self.on_parser(parser)

    def parsed(self, args: argparse.Namespace) -> None:
        """Check the flags, and have Megatron leave the graphs to us."""
        self.flags = settle_arguments(args, on_cpu=self._on_cpu)
        self.was_parsed = True
        if self.flags is not None:
            self.flags.capture_options()  # raises now for what it cannot do, not after the setup

    @contextlib.contextmanager
    def training(self, model: Any) -> Iterator[None]:
        """Attach to the loaded and wrapped model, and let go of it whatever happens."""
        if self.flags is None:
            yield
            return
        args = pretrain_arguments()
        # The script may have changed them since they were parsed.
        refuse_changed_arguments(args)
        self.flags = flags = resolved_flags(self.flags, args)
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        # Graphs hold memory of communicators: they go before the process groups do.
        with contextlib.ExitStack() as undo:
            undo.callback(self._forget)
            contexts = self._contexts(flags, args, chunks, undo)
            _give_rank_budget(args, chunks)
            self.graphs = graphs = attach(
                model,
                scope=flags.capture.scope,
                options=flags.capture_options(),
                token_drops=flags.token_drops,
                packing=contexts or packing_options(flags, args),
                stash=stash_options(flags.stash),
                schedule=flags.schedule,
            )
            undo.callback(graphs.detach)
            if _is_profiled(args):
                graphs.name_replays()
            self.has_trained = True
            self._metrics = StepMetrics(graphs)
            self._has_told_failure = False
            if _rank() == 0:
                record = save_run_record(graphs, flags, args, self._run_dir)
                _say_on_rank_0(start_line(graphs, flags, record))
            if flags.packing.max_packed_seqs:
                source = _document_source(flags, args, graphs, contexts)
                self._steps = PackedSteps(source, chunks, _rank())
                undo.callback(self._steps.close)
            yield

    def _contexts(
        self, flags: GraphFlags, args: Any, chunks: Sequence[Any], undo: contextlib.ExitStack
    ) -> PackedBanks | None:
        """The banks of context-parallel sizes that change; None where they do not."""
        if flags.contexts is None:
            return None
        state = import_megatron("megatron.core.parallel_state")
        place = PipelinePlace.current(len(chunks), config_of(chunks[0]))
        limits = changing_limits(
            flags,
            args,
            world_size=state.get_data_parallel_world_size(with_context_parallel=True),
            group_size=place.group_size if len(chunks) > 1 else 1,
        )
        groups = ContextGroups.of_data_parallel(limits.group_sizes, has_experts=_has_experts(args))
        # Not after an error, which this rank may have alone: others may wait in them for ever.
        undo.push(lambda kind, _error, _trace: groups.close() if kind is None else None)
        undo.callback(follow_groups(chunks, groups))
        return PackedBanks.of_limits(
            limits,
            groups,
            cuda_graph_cp_sizes=flags.contexts.captured,
            seq_buckets=flags.packing.seq_buckets,
        )

    def _forget(self) -> None:
        self.graphs = self._metrics = self._steps = None

    def wrap_schedule(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """A step of training or evaluation with graphs, while they are attached."""
        graphs = self.graphs
        if graphs is None:
            return forward_backward
        wrapped = graphs.wrap_forward_backward(forward_backward)
        if self._steps is not None:
            graphs.before_run = self._steps.begin_run
            wrapped = self._steps.wrap(wrapped)

        def chunk_graph_step(**kwargs: Any) -> Any:
            if graphs.engine.report is not None or self._has_told_failure:
                return wrapped(**kwargs)
            with warnings.catch_warnings():
                # Said below, once for all ranks and not by way of a filter of the script's.
                warnings.filterwarnings("ignore", message=r"(?s).*Training goes on eagerly")
                result = wrapped(**kwargs)
            self._tell_of_capture(graphs)
            return result

        return chunk_graph_step

    def before_log(self, iteration: int) -> None:
        """Count the step, and write its numbers where Megatron writes its own."""
        if self._steps is not None and self._steps.metrics_scales is not None:
            # Megatron divides them by the microbatches that it asked for.
            scale_expert_metrics(*self._steps.metrics_scales)
        if self._metrics is not None:
            self._metrics.step()
            for write in tensorboard_writers(iteration):
                for name, value in self._metrics.scalars().items():
                    write(name, value)
        if self._steps is not None:
            self._announce_after(iteration, self._steps)

    def log_text(self) -> str:
        """The numbers of the steps since the last line, in the style of Megatron's log."""
        return self._metrics.take_line() if self._metrics is not None else ""

    def _announce_after(self, iteration: int, steps: PackedSteps) -> None:
        """Have the step behind this one announced, where Megatron's loop goes on to train it.

        Here the step is over for good: none of its runs again is to come.
        """
        args = pretrain_arguments()
        exit_interval = getattr(args, "exit_interval", None)
        ends = (
            iteration >= args.train_iters
            or (exit_interval and iteration % exit_interval == 0)
            or iteration in (getattr(args, "phase_transition_iterations", None) or ())
        )
        # Loaders of the script's own may save where they stand; rollouts are made for each step.
        is_other = getattr(args, "dataloader_type", None) == "external"
        is_other = is_other or getattr(args, "perform_rl_step", False)
        if ends or is_other or iteration + 1 in (getattr(args, "iterations_to_skip", None) or ()):
            return
        num_microbatches = num_microbatches_at(args.consumed_train_samples)
        if num_microbatches is not None:
            steps.announce_next(num_microbatches)

    # -- what is said --------------------------------------------------------------------------

    def _tell_of_capture(self, graphs: MegatronChunkGraphs) -> None:
        engine = graphs.engine
        if engine.failure is not None:
            self._has_told_failure = True
            if engine.failed_here:
                sys.stderr.write(
                    f"WARNING: chunk graphs: {engine.failure}\nTraining goes on eagerly on all "
                    "ranks.\n"
                )
                sys.stderr.flush()
        elif engine.report is not None:
            _say_on_rank_0(capture_line(engine.report))


def _give_rank_budget(args: argparse.Namespace, chunks: Sequence[Any]) -> None:
    """Give models with DeepEP's dispatch of one node the budget that `settle_arguments` put aside.

    With it, for the whole of the process, the dispatch that goes by it.
    """
    factor = getattr(args, "cuda_graph_expert_rank_capacity_factor", None)
    if factor is None:
        return
    for chunk in chunks:
        config_of(chunk).moe_expert_rank_capacity_factor = factor
        # Evaluation behind the training too: what it computes depends on no graph.
        use_worst_case_dispatch(moe_layers_of(list(chunk.modules())))


def _document_source(
    flags: GraphFlags, args: Any, graphs: MegatronChunkGraphs, contexts: PackedBanks | None
) -> DocumentSource:
    """Make what settles the documents of each microbatch; all ranks call it together."""
    if contexts is None:
        return OwnDocuments(graphs, _rank(), share_in_tensor_group())
    assert flags.contexts is not None
    return SpreadDocuments(
        contexts,
        _rank(),
        device=graphs.site.device,
        gather=gather_from_data_ranks(),
        share=share_in_tensor_group(),
        schedule=flags.contexts.schedule,
        seed=lambda: f"{args.seed} {args.curr_iteration}",
        has_experts=_has_experts(args),
    )


def _is_profiled(args: argparse.Namespace) -> bool:
    names = ("profile", "use_pytorch_profiler", "nvtx_ranges")
    return any(getattr(args, name, False) for name in names)


def _has_experts(args: argparse.Namespace) -> bool:
    """Whether the model has any, be it on other ranks."""
    return bool(getattr(args, "num_experts", None))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _say_on_rank_0(line: str) -> None:
    if _rank() == 0:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
