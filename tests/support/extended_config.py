"""Configurations of tests with values that a file has no key for.

A field of Megatron's TransformerConfig may stand in the sections ``model`` and ``moe``, options of
`attach`, of DDP and of packed shapes in ``capture``, ``train`` and ``packing``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from chunkgraph import settings
from chunkgraph.settings import Config


def config_from_mapping(raw: Mapping[str, Any]) -> Config:
    """Return the configuration, with Megatron's fields in ``model.transformer_config``."""
    own, others = _split(raw)
    assert not others
    return settings.config_from_mapping(own)


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
    fields: dict[str, Any] = {}
    for section, values in raw.items():
        kind: Any = Config.model_fields[section].annotation
        known = getattr(kind, "model_fields", None)
        if known is None:
            own[section] = values
            continue
        own[section] = {name: value for name, value in values.items() if name in known}
        more = {name: value for name, value in values.items() if name not in known}
        if section in ("model", "moe"):
            if "position_embedding_type" in more:
                others["model"] = {"kind": more.pop("position_embedding_type")}
            fields |= more
        elif more:
            others[section] = more
    if fields:
        model = own["model"]
        own["model"] = {
            **model,
            "transformer_config": {**model.get("transformer_config", {}), **fields},
        }
    return own, others


def _extend_model(undo: ExitStack, values: dict[str, Any]) -> None:
    from megatron.core.models import gpt

    whole = partial(gpt.GPTModel)

    def positioned(**options: Any) -> Any:
        return whole(**{**options, "position_embedding_type": values["kind"]})

    undo.enter_context(mock.patch.object(gpt, "GPTModel", positioned))


def _extend_capture(undo: ExitStack, values: dict[str, Any]) -> None:
    from chunkgraph.trainer import trained_model

    options = partial(trained_model.CaptureOptions, **values)
    undo.enter_context(mock.patch.object(trained_model, "CaptureOptions", options))


def _extend_train(undo: ExitStack, values: dict[str, Any]) -> None:
    from chunkgraph.trainer import model

    assert values == {"use_ddp": False}, values

    def leave_bare(config: Config, _: Any, chunks: list[Any], options: Any) -> list[Any]:
        from megatron.core.distributed import DistributedDataParallelConfig

        for chunk in chunks:
            # Megatron's optimizer reads it from every chunk, wrapped or not.
            chunk.ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options)
        return chunks

    undo.enter_context(mock.patch.object(model, "_wrap_for_data_parallel", leave_bare))


def _extend_packing(undo: ExitStack, values: dict[str, Any]) -> None:
    from context_sizes import RandomSizes

    from chunkgraph.megatron.features.packing.banks import PackedBanks
    from chunkgraph.trainer import batches

    if values.pop("context_parallel_schedule", "smallest") == "random":
        scheduled = batches.PackedBatches._scheduled_step

        def at_random(self: Any, step: int, count: int) -> Any:
            most = self.banks.limits.max_packed_seqs - 1
            sizes = RandomSizes(f"{self._config.train.seed} {step}", most)
            with mock.patch.object(batches, "SmallestSizes", return_value=sizes):
                return scheduled(self, step, count)

        undo.enter_context(mock.patch.object(batches.PackedBatches, "_scheduled_step", at_random))
    if sizes := values.pop("captured_context_parallel_sizes", ()):
        make = PackedBanks.of_limits

        def of_sizes(*args: Any, **options: Any) -> PackedBanks:
            banks = make(*args, **options)
            banks.keys = tuple(key for key in banks.keys if key.size in sizes)
            return banks

        undo.enter_context(mock.patch.object(PackedBanks, "of_limits", staticmethod(of_sizes)))
    if values:
        kind, pads = batches.PackedShape, values.get("pad_seq_to_mult", 1) > 1

        def shape(*sizes: int, counts_padding: bool, **options: Any) -> Any:
            return kind(*sizes, counts_padding=counts_padding or pads, **options, **values)

        undo.enter_context(mock.patch.object(batches, "PackedShape", shape))


_PATCHES = {
    "model": _extend_model,
    "capture": _extend_capture,
    "train": _extend_train,
    "packing": _extend_packing,
}
