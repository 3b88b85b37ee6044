"""List the settings of the models with their paths, flags and defaults."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from chunkgraph.settings.models import Flag, Needs, Section

_MEGATRON_FLAGS = {
    "capture.num_warmup_steps": "--cuda-graph-warmup-steps",
    "model.fp8": "--fp8-format",
    "moe.num_moe_experts": "--num-experts",
    "pipeline.microbatch_group_size_per_vp_stage": (
        "--microbatch-group-size-per-virtual-pipeline-stage"
    ),
    "pipeline.virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
}
"""Flags of Megatron that are not spelled like the setting."""
_NAMED_ALIKE = ("model.", "pipeline.", "moe.", "train.overlap_", "train.use_")
"""Prefixes of the settings that share their names with Megatron's flags."""
_WITHOUT_FLAG = {
    "model.vocab_size",
    "model.params_dtype",
    "model.hybrid_layer_pattern",
    "model.layer_spec",
    "model.transformer_config",
    "pipeline.data_parallel_size",
}
"""Settings of these sections that have no flag, or several."""


@dataclass(frozen=True)
class Setting:
    """A setting of a model.

    Attributes:
        path: Dotted path, such as ``capture.scope``.
        field: Pydantic's description of the field.
        switch: Dotted path of the setting without which this one has no effect, or None.
    """

    path: str
    field: FieldInfo
    switch: str | None

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def help(self) -> str:
        """Return the meaning, in sentences."""
        return " ".join((self.field.description or "").split())

    @property
    def default(self) -> Any:
        """Return the default; None for a required setting."""
        return None if self.field.is_required() else self.field.default

    @property
    def flag(self) -> str | None:
        """Return the flag that chunkgraph adds to a pretrain script, or None."""
        return next((one.name for one in self.field.metadata if isinstance(one, Flag)), None)

    @property
    def dest(self) -> str:
        """Return the name of the flag's parsed argument."""
        return str(self.flag).removeprefix("--").replace("-", "_")

    @property
    def megatron(self) -> str | None:
        """Return the flag of Megatron's own command line, or None."""
        is_named_alike = (
            self.path.startswith(_NAMED_ALIKE)
            and self.path not in _WITHOUT_FLAG
            and self.flag is None
        )
        spelled = f"--{self.name.replace('_', '-')}" if is_named_alike else None
        return _MEGATRON_FLAGS.get(self.path, spelled)

    @property
    def is_optional(self) -> bool:
        """Return whether null is a value."""
        return type(None) in get_args(self.field.annotation)

    @property
    def is_list(self) -> bool:
        """Return whether values are lists."""
        return get_origin(self._hint) is tuple

    @property
    def kind(self) -> type:
        """Return the type of a value, or of each value of a list."""
        hint = _bare(get_args(self._hint)[0]) if self.is_list else self._hint
        kind: type = str if self.choices else hint
        return kind

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the possible words; empty for a number, a list or free text."""
        return get_args(self._hint) if get_origin(self._hint) is Literal else ()

    @property
    def _hint(self) -> Any:
        return _bare(self.field.annotation)


def _bare(hint: Any) -> Any:
    """Return a type without null and annotations."""
    if get_origin(hint) in (Union, types.UnionType):
        return _bare(next(arm for arm in get_args(hint) if arm is not type(None)))
    return _bare(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def settings_of(section: type[Section], prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a section and of the sections in it, in order."""
    for name, field in section.model_fields.items():
        path, kind = f"{prefix}{name}", field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from settings_of(kind, f"{path}.")
            continue
        needed = next((one.path for one in field.metadata if isinstance(one, Needs)), None)
        if section.switch not in (None, name):
            needed = f"{prefix}{section.switch}"
        yield Setting(path, field, needed)
