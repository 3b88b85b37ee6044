"""``python -m chunkgraph.launch SCRIPT ...``: run one rank of an unmodified pretrain script.

For torchrun and srun, for a single process, and for the processes of ``chunkgraph launch``::

    torchrun --nproc-per-node 8 -m chunkgraph.launch pretrain_gpt.py FLAGS \
        --cuda-graph-impl local --cuda-graph-granularity chunk
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import runpy
import socket
import sys
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Never

from chunkgraph._collector import collector_paused
from chunkgraph._text import did_you_mean, shorten
from chunkgraph.errors import ChunkGraphError, ConfigError, TopologyError
from chunkgraph.jobs.processes import EXIT_FAILED, keep_quiet, leave, run_rank
from chunkgraph.launch.flags import (
    FLAGS,
    GRANULARITY,
    RECORD_VARIABLE,
    SWITCH,
    GraphFlags,
    explain_in_one_line,
    parse_options,
    set_max_connections,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chunkgraph.launch.hooks import ChunkGraphsInPretrain

_PROG = "python -m chunkgraph.launch"


def main(options: argparse.Namespace | None = None) -> int:
    """Run the script as one rank, report errors and return the exit code.

    Args:
        options: The parsed command line; None: parse that of this process.
    """
    _set_rank_variables()
    return run_rank(lambda: run_script(options or parse_options(sys.argv[1:], _PROG)))


def run_script(options: argparse.Namespace) -> int:
    """Run the script with Megatron's pretrain program hooked; return its exit code.

    Raises:
        Exception: Any exception of the script.
        ConfigError: The flags cannot be combined.
    """
    on_cpu = options.device == "cpu"
    with _hooked_script(options, on_cpu=on_cpu) as hooks, contextlib.ExitStack() as stack:
        from chunkgraph.engine.agreement import lost_ranks_named
        from chunkgraph.launch.step_records import StepRecorder

        if run := os.environ.get(RECORD_VARIABLE):
            stack.callback(StepRecorder(hooks, **json.loads(run)).close)
        stack.enter_context(lost_ranks_named())
        code, is_over = 0, True
        try:
            runpy.run_path(str(options.script), run_name="__main__")
        except SystemExit as error:
            code = _exit_code(error)
            is_over = hooks.was_parsed  # otherwise this was --help
        except argparse.ArgumentError as error:
            raise ConfigError(
                f"{shorten(options.script.name)}: {error}. If the script defines a flag of chunk "
                "graphs, rename the script's."
            ) from error
        if code == 0 and is_over and os.environ.get("RANK", "0") == "0":
            _warn_if_unused(options, hooks)
    if on_cpu and code == 0:
        # Ranks sometimes ended with SIGABRT ("terminate called without an active exception") after
        # a complete training. The likely cause, not proven: a gloo thread frees its tensors shortly
        # after it reports the result, while Python is already exiting.
        time.sleep(0.1)
    return code


@contextlib.contextmanager
def _hooked_script(
    options: argparse.Namespace, *, on_cpu: bool, is_planned: bool = False
) -> Iterator[ChunkGraphsInPretrain]:
    """Prepare this process for the script, and hook Megatron's pretrain program.

    Args:
        options: The command line.
        on_cpu: Whether the script trains on a CPU.
        is_planned: Whether it ends before it trains, whatever this machine has.
    """
    script_args = list(options.script_args)
    if on_cpu or is_planned:
        # Megatron compiles small functions for a GPU; torch reads the variable at import.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        set_max_connections(script_args)  # on GPUs the user does
        warnings.simplefilter("ignore")
    # As Python does for a script; in a checkout, `megatron` is next to the script.
    sys.path.insert(0, str(options.script.resolve().parent))
    with contextlib.ExitStack() as stack:
        with collector_paused():
            if on_cpu or is_planned:
                from chunkgraph.megatron.cpu.pretrain import cpu_flags, cpu_pretrain_host

                stack.enter_context(cpu_pretrain_host())
            if on_cpu:
                keep_quiet()
                script_args += cpu_flags(script_args)
            sys.argv = [str(options.script), *script_args]
            from chunkgraph.launch.hooks import enable

            hooks = enable(on_cpu=on_cpu)
        hooks.on_parser = explain_in_one_line
        stack.callback(hooks.disable)
        yield hooks


class _ParsedError(BaseException):
    """Exits the script with its arguments and flags; ``except Exception`` does not catch it."""


def planned_arguments(options: argparse.Namespace) -> tuple[argparse.Namespace, GraphFlags]:
    """Run the script until it parses its arguments, before it creates model, groups or data.

    The arguments are those of a GPU run with Megatron's checks, whatever this machine has.

    Args:
        options: The command line; without a number of processes, the plan is of one copy of the
            model.

    Returns:
        Megatron's validated arguments, and the flags of chunk graphs.

    Raises:
        ConfigError: Megatron or chunk graphs refuse the arguments, or the script fails or parses
            none.
    """
    latest: list[argparse.Namespace] = []

    def on_parser(parser: argparse.ArgumentParser) -> None:
        explain_in_one_line(parser)
        own = (SWITCH, *(str(item.flag) for item in FLAGS))
        for name in (arg.partition("=")[0] for arg in options.script_args):
            # A script may ignore unknown flags, and own parsers of it know some.
            if name not in parser._option_string_actions and did_you_mean(name, own, 0.9):
                parser.error(f"unrecognized arguments: {name}")

    def parsed(args: argparse.Namespace) -> None:
        latest[:] = [args]
        if not hooks.unknown:  # otherwise the script may parse again, and know them then
            end_script()

    def end_script(*_: object, **__: object) -> Never:
        from chunkgraph.launch.arguments import settle_arguments
        from chunkgraph.launch.patches import validate_arguments

        (args,) = latest
        least = _smallest_world_size(args)
        size = options.nproc_per_node or least
        os.environ["WORLD_SIZE"] = str(size)
        flags = settle_arguments(args, on_cpu=False)
        if flags is None:
            asked = f"{GRANULARITY} {args.cuda_graph_granularity}"
            raise ConfigError(f"{asked}: there are no chunk graphs to plan. Add {SWITCH}.")
        if size % least:
            raise TopologyError(
                f"{size} processes: the products pipeline x tensor x context and pipeline x expert "
                f"x expert-tensor must divide them. Start a multiple of {least}, or change sizes."
            )
        args.rank, args.world_size = 0, size
        validate_arguments(args)
        raise _ParsedError(args, flags)

    if not any(arg.partition("=")[0] == GRANULARITY for arg in options.script_args):
        options.script_args = [*options.script_args, SWITCH]
    os.environ.update(RANK="0", WORLD_SIZE=str(options.nproc_per_node or 1), LOCAL_RANK="0")
    with (
        _hooked_script(options, on_cpu=False, is_planned=True) as hooks,
        contextlib.ExitStack() as undo,
    ):
        import torch.distributed as dist

        from chunkgraph.megatron.core.access import patch_attributes

        hooks.on_parser, hooks.parsed = on_parser, parsed  # type: ignore[method-assign]
        undo.callback(patch_attributes(dist, {"init_process_group": end_script}))
        undo.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            runpy.run_path(str(options.script), run_name="__main__")
            if latest:
                end_script()
        except _ParsedError as end:
            args, flags = end.args
            return args, flags
        except (ChunkGraphError, KeyboardInterrupt):
            raise
        except BaseException as error:
            what = traceback.format_exception_only(error)[-1]
            raise ConfigError(
                f"{options.script.name} ended before its plan: {shorten(what.strip())}. Run it "
                "without --plan, or add --debug, to see where."
            ) from error
    raise ConfigError(
        f"{options.script.name} never parsed Megatron's arguments, so there is nothing to plan. "
        "In your own training loop, chunkgraph plan takes the sizes instead."
    )


def _smallest_world_size(args: argparse.Namespace) -> int:
    """Return the number of ranks of one copy of the model."""

    def size(name: str) -> int:
        return int(getattr(args, name, None) or 1)

    dense = size("tensor_model_parallel_size") * size("context_parallel_size")
    tensor = getattr(args, "expert_tensor_parallel_size", None)  # default as in parallel_state
    of_experts = size("expert_model_parallel_size") * (tensor or size("tensor_model_parallel_size"))
    return size("pipeline_model_parallel_size") * math.lcm(dense, of_experts)


def _warn_if_unused(options: argparse.Namespace, hooks: ChunkGraphsInPretrain) -> None:
    """Warn that the flags had no effect, as in a script with its own training loop."""
    names = {arg.partition("=")[0] for arg in options.script_args}
    is_asked = hooks.flags if hooks.was_parsed else names & {GRANULARITY, SWITCH}
    if is_asked and not hooks.has_trained:
        sys.stderr.write(
            f"WARNING: chunk graphs: {shorten(options.script.name)} trained nothing with "
            f"Megatron's pretrain(), so {GRANULARITY} had no effect. In your own training loop, "
            "call chunkgraph.megatron.attach().\n"
        )


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return EXIT_FAILED


def _set_rank_variables() -> None:
    """Copy Slurm's variables to the names that Megatron reads; default to a single process."""
    slurm = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}
    # In a shell of salloc only the number of tasks is set.
    if "RANK" not in os.environ and all(name in os.environ for name in slurm.values()):
        for name, of_slurm in slurm.items():
            os.environ.setdefault(name, os.environ[of_slurm])
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    if os.environ["WORLD_SIZE"] == "1":
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        with socket.create_server(("127.0.0.1", 0)) as free:  # another job may use torch's 29500
            os.environ.setdefault("MASTER_PORT", str(free.getsockname()[1]))


if __name__ == "__main__":
    code = main()
    if code and os.environ["WORLD_SIZE"] != "1":
        leave(code)
    sys.exit(code)
