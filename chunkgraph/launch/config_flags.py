"""A configuration file as flags of a Megatron pretrain script.

``model``, ``pipeline``, ``moe``, ``capture``, ``packing`` and ``stash`` have flags there.
``train``, ``data``, ``bench`` and ``run`` belong to ``chunkgraph train`` and ``bench``; a pretrain
script gets its steps, its data and its tokenizer from its own flags.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkgraph.launch.context_flags import CONTEXTS
from chunkgraph.launch.flags import COUNTS, PACKING
from chunkgraph.launch.megatron_flags import GRANULARITY, settings_of, settings_that_are_off
from chunkgraph.launch.stash_flags import STASH
from chunkgraph.settings import Config

__all__ = ["merge_flags"]

_SWITCHES = {
    STASH[0].name: ("no", [flag.name for flag in STASH[1:]]),
    PACKING[0].name: ("0", [flag.name for flag in (*PACKING[1:], *CONTEXTS)]),
    "--cuda-graph-verify": ("none", [flag.name for flag in COUNTS]),
}
"""Flags with the value that leaves others without effect, which are refused then."""


def merge_flags(
    config: Config, script_args: Sequence[str], *, source: str
) -> tuple[list[str], list[str]]:
    """Put the file's values in front of the command line's flags, which win.

    Args:
        config: the file's contents.
        script_args: flags on the command line.
        source: names the file in notes.

    Returns:
        All flags, and a note for each value of the file that the command line replaces with
        another.

    Raises:
        ConfigError: a value has no flag in Megatron.
    """
    given = _given(script_args)
    flags: list[str] = []
    notes: list[str] = []
    turned_off = given.get(GRANULARITY) == ("layer",)
    if turned_off and config.capture.enabled:
        notes.append(f"{GRANULARITY} layer on the command line turns off capture of {source}")

    def note(name: str, key: str) -> None:
        shown = " ".join([name, *given[name]])
        notes.append(f"{shown} on the command line replaces {key} of {source}")

    idle = {
        name
        for switch, (off_value, names) in _SWITCHES.items()
        if given.get(switch) == (off_value,)
        for name in names
    }
    # Also what the section asks of Megatron by a flag of Megatron's own.
    has_no_packing = given.get(PACKING[0].name) == ("0",)
    for setting in settings_of(config, without_capture=turned_off):
        is_unpacked = has_no_packing and setting.key.startswith("packing.")
        if setting.flag in idle or (is_unpacked and setting.flag != PACKING[0].name):
            continue  # the note of the switch says it
        decided = next((n for n in (setting.flag, *setting.rivals) if n in given), None)
        if decided is None:
            flags += [setting.flag, *setting.values]
        elif decided != setting.flag or given[decided] != setting.values:
            note(decided, setting.key)
    for off in settings_that_are_off(config):
        for name in off.flags:
            if name in given and given[name] != (off.idle,):
                note(name, off.key)
    return [*flags, *script_args], notes


def _given(script_args: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The flags of a command line, each with the values behind it."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for arg in script_args:
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            found[name] = (value,) if equals else ()
        elif name:
            found[name] = (*found[name], arg)
    return found
