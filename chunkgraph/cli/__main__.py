# PYTHON_ARGCOMPLETE_OK: a shell may run this module to complete words
"""The ``chunkgraph`` command: parse, run one subcommand, and turn errors into exit codes.

Exit codes: 0 done, 1 the run failed, 2 bad usage or configuration, 130 interrupted.
"""

from __future__ import annotations

try:
    import argparse
    import importlib.util
    import io
    import os
    import signal
    import sys
    import traceback
    from collections.abc import Mapping, Sequence
    from importlib import import_module

    from chunkgraph import __version__
    from chunkgraph._text import escape, shown
    from chunkgraph.cli.arguments import Parser
    from chunkgraph.errors import ChunkGraphError
    from chunkgraph.jobs.processes import EXIT_FAILED, EXIT_INTERRUPTED, exit_code_of
except KeyboardInterrupt:  # in the first moments, before `main`
    raise SystemExit(130) from None

_COMMANDS = ("plan", "train", "launch", "packing", "config", "doctor")
"""Modules of this package, in the order of the help text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: Arguments after the program's name; None for those of the process.
    """
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        print("interrupted: the run was stopped and its processes ended.", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(argv: list[str]) -> int:
    args = _parse(argv)
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may not be valid text
    try:
        code: int = import_module(f"chunkgraph.cli.{args.command}").run(args)
        _flush()
        return code
    except BrokenPipeError:
        # The reader closed the pipe (`chunkgraph plan | head`), so nothing can be printed.
        return EXIT_FAILED
    except (ChunkGraphError, OSError) as error:
        if getattr(args, "debug", False):
            traceback.print_exc()
        text = str(error)
        if not isinstance(error, ChunkGraphError):
            what = "reading or writing" if error.filename is None else shown(error.filename)
            text = f"{what}: {error.strerror or error}"
        print(f"error: {escape(text)}", file=sys.stderr)
        return exit_code_of(error)
    finally:
        _drop_what_cannot_be_printed()


def _drop_what_cannot_be_printed() -> None:
    """Discard unprintable output, which would print a traceback when the interpreter exits."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush() -> None:
    if sys.stdout is not None:  # closed before the command began
        sys.stdout.flush()


def build_parser(names: Sequence[str] = _COMMANDS) -> argparse.ArgumentParser:
    """Return the command-line parser with the given commands."""
    parser: argparse.ArgumentParser = Parser(
        prog="chunkgraph",
        description="Pipeline model chunks captured once as graphs, replayed for any number of "
        "microbatches.",
    )
    parser.add_argument("--version", action="version", version=f"chunkgraph {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in names:
        import_module(f"chunkgraph.cli.{name}").add_parser(subparsers)
    return parser


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parsers of the commands, by name."""
    actions = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return next(actions).choices


def _parse(argv: list[str]) -> argparse.Namespace:
    # Import only what the given command needs.
    names = argv[:1] if argv and argv[0] in _COMMANDS else _COMMANDS
    parser = build_parser(names)
    if "_ARGCOMPLETE" in os.environ and importlib.util.find_spec("argcomplete") is not None:
        import argcomplete

        argcomplete.autocomplete(parser)  # prints what may follow, and exits
    args, rest = parser.parse_known_args(argv)
    # argparse accepts positionals only in one sequence; overrides may also follow an option.
    overrides = [item for item in rest if "=" in item and not item.startswith("-")]
    if hasattr(args, "overrides") and len(overrides) == len(rest):
        args.overrides = [*args.overrides, *rest]
    elif rest:
        commands_of(parser)[args.command].error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _exit_on_sigterm(signum: int, _frame: object) -> None:
    """Exit through the ``finally`` blocks, which end the worker processes."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
