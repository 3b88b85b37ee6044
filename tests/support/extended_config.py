"""Configurations of tests with values that a file has no key for.

These are fields of Megatron's TransformerConfig in the sections ``model`` and ``moe``, and options
of `attach` and of packed shapes in the sections ``capture``, ``stash`` and ``packing``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from chunkgraph import settings
from chunkgraph.settings import Config

_DERIVED = ("moe_pad_expert_input_to_capacity",)


@contextmanager
def extended(raw: Mapping[str, Any]) -> Iterator[Config]:
    """Yield the configuration; inside the block the trainer adds the values beyond it."""
    own, others = _split(raw)
    with ExitStack() as undo:
        for section, values in others.items():
            _PATCHES[section](undo, values)
        yield settings.config_from_mapping(own)


def _split(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    own: dict[str, Any] = {}
    others: dict[str, dict[str, Any]] = {}
    for section, values in raw.items():
        field = Config.model_fields[section].annotation
        known: Any = getattr(field, "model_fields", None)
        if known is None:
            own[section] = values
            continue
        own[section] = {name: value for name, value in values.items() if name in known}
        more = {n: v for n, v in values.items() if n not in known and n not in _DERIVED}
        if more:
            others[section] = more
    return own, others


def _extend_model(undo: ExitStack, values: dict[str, Any]) -> None:
    from chunkgraph.trainer import model

    make = model._transformer_config
    if kind := values.pop("position_embedding_type", None):
        from megatron.core.models import gpt

        whole = gpt.GPTModel

        def positioned(**options: Any) -> Any:
            return whole(**{**options, "position_embedding_type": kind})

        undo.enter_context(mock.patch.object(gpt, "GPTModel", positioned))

    def extended_config(config: Config, device: Any, options: Mapping[str, Any]) -> Any:
        return make(config, device, {**values, **options})

    undo.enter_context(mock.patch.object(model, "_transformer_config", extended_config))


def _extend_capture(undo: ExitStack, values: dict[str, Any]) -> None:
    from chunkgraph.trainer import trained_model

    options = partial(trained_model.CaptureOptions, **values)
    undo.enter_context(mock.patch.object(trained_model, "CaptureOptions", options))


def _extend_stash(undo: ExitStack, values: dict[str, Any]) -> None:
    from chunkgraph.memory.stash import StashOptions
    from chunkgraph.trainer import trained_model

    def options(stash: Any) -> StashOptions | None:
        return StashOptions(**values) if stash.enabled else None

    undo.enter_context(mock.patch.object(trained_model, "stash_options", options))


def _extend_train(undo: ExitStack, values: dict[str, Any]) -> None:
    from chunkgraph.trainer import model

    assert values == {"use_ddp": False}

    def leave_bare(config: Config, _: Any, chunks: list[Any], options: Any) -> list[Any]:
        from megatron.core.distributed import DistributedDataParallelConfig

        for chunk in chunks:
            # Megatron's optimizer reads it from every chunk, wrapped or not.
            chunk.ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options)
        return chunks

    undo.enter_context(mock.patch.object(model, "_wrap_for_data_parallel", leave_bare))


def _extend_packing(undo: ExitStack, values: dict[str, Any]) -> None:
    from chunkgraph.megatron.features.packing.banks import PackedBanks
    from chunkgraph.packing import RandomSizes
    from chunkgraph.trainer import batches

    if values.pop("context_parallel_schedule", "smallest") == "random":
        schedule = batches.schedule_contexts

        def at_random(lengths: Any, limits: Any, _: Any) -> Any:
            return schedule(lengths, limits, RandomSizes(str(lengths), limits.max_packed_seqs - 1))

        undo.enter_context(mock.patch.object(batches, "schedule_contexts", at_random))
    if sizes := values.pop("captured_context_parallel_sizes", ()):
        make = partial(PackedBanks.of_limits, cuda_graph_cp_sizes=sizes)
        undo.enter_context(mock.patch.object(PackedBanks, "of_limits", staticmethod(make)))
    if values:
        kind, pads = batches.PackedShape, values.get("pad_seq_to_mult", 1) > 1

        def shape(*sizes: int, counts_padding: bool, **options: Any) -> Any:
            return kind(*sizes, counts_padding=counts_padding or pads, **options, **values)

        undo.enter_context(mock.patch.object(batches, "PackedShape", shape))


_PATCHES = {
    "model": _extend_model,
    "moe": _extend_model,
    "capture": _extend_capture,
    "stash": _extend_stash,
    "train": _extend_train,
    "packing": _extend_packing,
}


_FIELDS: dict[int, tuple[Config, dict[str, Any]]] = {}


def config_from_mapping(raw: Mapping[str, Any]) -> Config:
    """Return the configuration, and keep Megatron's fields beyond it for `build_model`."""
    own, others = _split(raw)
    config = settings.config_from_mapping(own)
    _FIELDS[id(config)] = config, {**others.get("model", {}), **others.get("moe", {})}
    return config


def build_model(config: Config, device: Any, **options: Any) -> Any:
    """Build the chunks of a configuration of `config_from_mapping` in this module."""
    from chunkgraph.trainer import model

    fields = {**_FIELDS[id(config)][1], **(options.pop("transformer_options", None) or {})}
    return model.build_model(config, device, transformer_options=fields, **options)
