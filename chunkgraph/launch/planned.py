"""Get Megatron's arguments of a user's command line, checked but not run."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import runpy
import sys
import warnings
from typing import Never

from chunkgraph.errors import ConfigError
from chunkgraph.launch.arguments import settle_arguments
from chunkgraph.launch.flags import GRANULARITY, GraphFlags
from chunkgraph.launch.hooks import ChunkGraphsInPretrain
from chunkgraph.launch.options import LaunchOptions, explain_in_one_line, set_max_connections
from chunkgraph.launch.patches import patch_pretrain, validate_arguments
from chunkgraph.megatron.cpu.pretrain import cpu_pretrain_host

__all__ = ["planned_arguments"]


class _ParsedError(BaseException):
    """Exits the script after its arguments; ``except Exception`` does not catch it."""

    def __init__(self, args: argparse.Namespace, flags: GraphFlags) -> None:
        super().__init__()
        self.arguments = args
        self.flags = flags


def planned_arguments(
    options: LaunchOptions, num_processes: int | None
) -> tuple[argparse.Namespace, GraphFlags]:
    """Run the script until it parses its arguments, before it creates model, groups or data.

    The arguments are those of a GPU run with Megatron's checks, whatever this machine has.

    Args:
        options: The command line.
        num_processes: Number of ranks of the job; None for one copy of the model.

    Returns:
        Megatron's validated arguments, and the flags of chunk graphs.

    Raises:
        ConfigError: Megatron or chunk graphs refuse the arguments, or the script parses none.
        Exception: Any exception that the script raises before.
    """
    args = list(options.script_args)
    if not any(arg.partition("=")[0] == GRANULARITY for arg in args):
        args += [GRANULARITY, "chunk"]
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    set_max_connections(args)
    os.environ.update(RANK="0", WORLD_SIZE=str(num_processes or 1), LOCAL_RANK="0")
    sys.path.insert(0, str(options.script.resolve().parent))
    sys.argv = [str(options.script), *args]
    warnings.simplefilter("ignore")
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_pretrain_host())
        stack.callback(patch_pretrain(_PlanHooks(num_processes)))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            runpy.run_path(str(options.script), run_name="__main__")
        except _ParsedError as parsed:
            return parsed.arguments, parsed.flags
    raise ConfigError(
        f"{options.script.name} never parsed Megatron's arguments, so there is nothing to plan. "
        "In your own training loop, chunkgraph plan takes the sizes instead."
    )


class _PlanHooks(ChunkGraphsInPretrain):
    """Hooks that end the script once its arguments are known."""

    def __init__(self, num_processes: int | None) -> None:
        super().__init__()
        self.on_parser = explain_in_one_line
        self._num_processes = num_processes

    def parsed(self, args: argparse.Namespace) -> Never:
        """Check the arguments as in a run, and exit the script."""
        size = self._num_processes or _smallest_world_size(args)
        os.environ["WORLD_SIZE"] = str(size)
        flags = settle_arguments(args, on_cpu=False)
        if flags is None:
            raise ConfigError(f"{GRANULARITY} layer: there are no chunk graphs to plan. Use chunk.")
        args.rank, args.world_size = 0, size
        validate_arguments(args)
        raise _ParsedError(args, flags)


def _smallest_world_size(args: argparse.Namespace) -> int:
    """Return the number of ranks of one copy of the model."""

    def size(name: str) -> int:
        return int(getattr(args, name, None) or 1)

    dense = size("tensor_model_parallel_size") * size("context_parallel_size")
    of_experts = size("expert_model_parallel_size") * size("expert_tensor_parallel_size")
    return size("pipeline_model_parallel_size") * math.lcm(dense, of_experts)
