"""Merge a configuration file into the flags of a Megatron pretrain script.

The sections ``model``, ``pipeline``, ``moe``, ``capture``, ``packing`` and ``stash`` become flags.
``train``, ``data`` and ``run`` apply to ``chunkgraph train`` only; a pretrain script gets its
steps, data and tokenizer from its own flags.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkgraph.launch.flags import GRANULARITY, flag_of
from chunkgraph.launch.megatron_flags import flag_values
from chunkgraph.settings import Config, settings_of

__all__ = ["merge_flags"]

_SEQS = flag_of("packing.max_packed_seqs")
_SWITCHES = {"stash.enabled": "false", "packing.max_packed_seqs": "0", "capture.verify": "none"}
"""Switches and their off values; a flag that needs a switch is refused if the switch is off."""


def merge_flags(
    config: Config, script_args: Sequence[str], *, source: str
) -> tuple[list[str], list[str]]:
    """Prepend the file's values to the flags of the command line, which take precedence.

    Args:
        config: The contents of the file.
        script_args: Flags on the command line.
        source: Name of the file, for notes.

    Returns:
        All flags, and a note for each value of the file that the command line overrides.

    Raises:
        ConfigError: A value has no flag in Megatron.
    """
    line_flags = _flags_on(script_args)
    flags: list[str] = []
    notes: list[str] = []
    turned_off = line_flags.get(GRANULARITY) == ("layer",)
    if turned_off and config.capture.enabled:
        notes.append(f"{GRANULARITY} layer on the command line turns off capture of {source}")
    off = {path for path, value in _SWITCHES.items() if line_flags.get(flag_of(path)) == (value,)}
    idle = {item.path for item in settings_of(Config) if item.switch in off}
    # Includes values of the section that map to Megatron's own flags.
    has_no_packing = "packing.max_packed_seqs" in off
    for setting in flag_values(config, without_capture=turned_off):
        is_unpacked = has_no_packing and setting.key.startswith("packing.")
        if setting.key in idle or (is_unpacked and setting.flag != _SEQS):
            continue  # the note of the switch covers it
        names = (setting.flag, *setting.rivals)
        override = next((name for name in names if name in line_flags), None)
        if override is None:
            flags += [setting.flag, *setting.values]
        elif override != setting.flag or line_flags[override] != setting.values:
            shown = " ".join([override, *line_flags[override]])
            notes.append(f"{shown} on the command line replaces {setting.key} of {source}")
    return [*flags, *script_args], notes


def _flags_on(script_args: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the flags of a command line, each with its arguments."""
    flags: dict[str, tuple[str, ...]] = {}
    name = ""
    for arg in script_args:
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            flags[name] = (value,) if equals else ()
        elif name:
            flags[name] = (*flags[name], arg)
    return flags
