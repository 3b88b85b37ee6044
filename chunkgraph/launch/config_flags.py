"""A configuration file as flags of a Megatron pretrain script.

``model``, ``pipeline``, ``moe``, ``capture``, ``packing`` and ``stash`` have flags there.
``train``, ``data``, ``bench`` and ``run`` belong to ``chunkgraph train`` and ``bench``; a pretrain
script gets its steps, its data and its tokenizer from its own flags.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkgraph.launch.flags import GRANULARITY, flag_of
from chunkgraph.launch.megatron_flags import flag_values, settings_that_are_off
from chunkgraph.settings import Config, settings_of

__all__ = ["merge_flags"]

_SEQS = flag_of("packing.max_packed_seqs")
_SWITCHES = {"stash.enabled": "false", "packing.max_packed_seqs": "0", "capture.verify": "none"}
"""Settings whose flags, with these values, leave others without effect, which are refused then."""


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

    off = {path for path, value in _SWITCHES.items() if given.get(flag_of(path)) == (value,)}
    idle = {item.path for item in settings_of(Config) if item.needs in off}
    # Also what the section asks of Megatron by a flag of Megatron's own.
    has_no_packing = "packing.max_packed_seqs" in off
    for setting in flag_values(config, without_capture=turned_off):
        is_unpacked = has_no_packing and setting.key.startswith("packing.")
        if setting.key in idle or (is_unpacked and setting.flag != _SEQS):
            continue  # the note of the switch says it
        decided = next((n for n in (setting.flag, *setting.rivals) if n in given), None)
        if decided is None:
            flags += [setting.flag, *setting.values]
        elif decided != setting.flag or given[decided] != setting.values:
            note(decided, setting.key)
    for left_off in settings_that_are_off(config):
        for name in left_off.flags:
            if name in given and given[name] != (left_off.idle,):
                note(name, left_off.key)
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
