"""Write the settings page of the documentation: every setting, its default, values and flag."""

from __future__ import annotations

from typing import Any

import yaml

from chunkgraph.settings.reference import grouped
from chunkgraph.settings.setting import ANY, Setting

__all__ = ["settings_page"]

_HEADER = """\
# Settings

Every setting of a configuration file, as `chunkgraph config --markdown` prints it. A file holds
only what differs from the defaults, and may extend another one (`extends: base.yaml`, relative to
itself). Where a setting has a flag, `chunkgraph launch` takes it from the command line of a
pretrain script, or gives it to the script from `--config`; flags in italics are Megatron's own.

Overrides on a command line are `section.key=value`. `chunkgraph config CONFIG` shows what a
configuration resolves to and where each value comes from. `chunkgraph config --schema` prints a
JSON schema, with which an editor completes and checks a file that begins with `#
yaml-language-server: $schema=FILE`.
"""
_COLUMNS = "| setting | default | flag | meaning |\n|---|---|---|---|"


def settings_page() -> str:
    """Return the page in Markdown."""
    blocks = [_HEADER]
    for section, about, settings in grouped():
        title = f"## `{section}`\n\n{about}" if section else "## Top level"
        rows = "\n".join(_row(item) for item in settings)
        blocks.append(f"{title}\n\n{_COLUMNS}\n{rows}\n")
    return "\n".join(blocks)


def _row(item: Setting) -> str:
    default = "required" if item.is_required else f"`{_inline(item.default)}`"
    flag = f"`{item.flag}`" if item.flag else f"*`{item.megatron}`*" if item.megatron else ""
    meaning = " ".join([item.help, *_limits(item)]).replace("|", "\\|").replace("*", "\\*")
    return f"| `{item.name}` | {default} | {flag} | {meaning} |"


def _limits(item: Setting) -> list[str]:
    limits = []
    if item.choices:
        values = [f"`{choice}`" for choice in item.choices]
        limits.append(f"One of {', '.join([*values, *(['`null`'] if item.is_optional else [])])}.")
    elif item.bounds is not ANY:
        limits.append(f"{'Each number' if item.is_list else 'It'} must be {item.bounds}.")
    if item.needs is not None:
        limits.append(f"Needs `{item.needs}`.")
    return limits


def _inline(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
