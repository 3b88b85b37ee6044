"""Runs a pretrain script on a Megatron that has graphs of chunks: ``upstream_chunks.py IMPL ...``.

Two forms of Megatron's ``--cuda-graph-granularity`` exist, for ``--cuda-graph-impl local`` and
``transformer_engine``. This stands in for the form IMPL: it defines the flags, refuses what that
form refuses, and prints a line where Megatron would capture. Training is then eager.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from typing import Any


def define_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add Megatron's flags of graphs of chunks."""
    parser.add_argument("--cuda-graph-granularity", choices=["layer", "chunk"], default="layer")
    parser.add_argument("--cuda-graph-dynamic-microbatches", action="store_true")
    return parser


def capture(args: Any, form: str) -> None:
    """Check the arguments as a form of Megatron does, and tell what it would capture."""
    if args.cuda_graph_granularity == "chunk":
        assert args.cuda_graph_impl == form, f"chunk granularity needs cuda_graph_impl {form}"
        args.cuda_graph_impl = "none"
        print(f"Megatron captures chunks with {form}", flush=True)


def main() -> None:
    """Define the flags, then run the script."""
    from megatron.training import arguments

    form, *sys.argv = sys.argv[1:]
    add, validate = arguments._add_training_args, arguments.validate_args
    arguments._add_training_args = lambda parser: define_flags(add(parser))

    def validate_args(args: Any, *more: Any, **options: Any) -> Any:
        capture(args, form)
        return validate(args, *more, **options)

    arguments.validate_args = validate_args
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
