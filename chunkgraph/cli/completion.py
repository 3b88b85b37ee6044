"""``chunkgraph completion``: print a shell's completion script."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Print a script that completes commands, options and their values in a shell. Load it with

  source <(chunkgraph completion bash)           # in ~/.bashrc
  source <(chunkgraph completion zsh)            # in ~/.zshrc, after compinit
  chunkgraph completion fish > ~/.config/fish/completions/chunkgraph.fish
"""
_BASH = """\
_chunkgraph() {
  local words i=1 previous=${COMP_WORDS[COMP_CWORD-1]} current=${COMP_WORDS[COMP_CWORD]}
  local command=${COMP_WORDS[1]}
  (( COMP_CWORD == 1 )) && command=
  case "$command $previous" in
{values}
    *) case "$command" in
{options}
      esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  [[ ${#COMPREPLY[@]} -gt 0 || $current == -* ]] || COMPREPLY=($(compgen -f -- "$current"))
}
complete -o filenames -F _chunkgraph chunkgraph
"""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "completion",
        help="print a shell's completion script",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    from chunkgraph.cli.__main__ import build_parser, commands_of

    commands = commands_of(build_parser())
    if args.shell == "fish":
        print("\n".join(_fish(commands)))
    else:
        # zsh runs bash's completion functions.
        before = "autoload -U +X bashcompinit && bashcompinit\n" if args.shell == "zsh" else ""
        print(before + _bash(commands), end="")
    return 0


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options of a command, and its arguments that have choices."""
    return [a for a in parser._actions if a.option_strings or a.choices]


def _words(action: argparse.Action) -> Sequence[str]:
    return [str(choice) for choice in action.choices or ()]


def _bash(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    values, options = [], [f'        "") words={shlex.quote(" ".join(commands))} ;;']
    for name, parser in commands.items():
        names: list[str] = []
        for action in _options(parser):
            names += action.option_strings or _words(action)
            if action.option_strings and action.choices:
                patterns = "|".join(f'"{name} {option}"' for option in action.option_strings)
                values.append(f"    {patterns}) words={shlex.quote(' '.join(_words(action)))} ;;")
        options.append(f"        {name}) words={shlex.quote(' '.join(names))} ;;")
    return _BASH.replace("{values}", "\n".join(values)).replace("{options}", "\n".join(options))


def _fish(commands: Mapping[str, argparse.ArgumentParser]) -> list[str]:
    lines = []
    for name, parser in commands.items():
        lines.append(f"complete -c chunkgraph -f -n __fish_use_subcommand -a {name}")
        condition = f"-n '__fish_seen_subcommand_from {name}'"
        for action in _options(parser):
            words = f" -x -a {shlex.quote(' '.join(_words(action)))}" if action.choices else ""
            flags = "".join(
                f" -l {option[2:]}" if option.startswith("--") else f" -s {option[1:]}"
                for option in action.option_strings
            )
            lines.append(f"complete -c chunkgraph {condition}{flags}{words}")
    return lines
