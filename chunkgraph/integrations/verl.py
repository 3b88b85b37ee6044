"""Chunk graphs in verl's Megatron engine, for actors, critics and references.

A module that verl imports in its workers, named by ``actor_rollout_ref.model.external_lib``::

    from chunkgraph.integrations import verl
    from chunkgraph.megatron import PackingOptions
    from chunkgraph.packing import PackedShape

    verl.install(PackingOptions(PackedShape(64, 8192), buckets=[0.25, 0.5]))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chunkgraph.errors import ConfigError
from chunkgraph.integrations.attached import AttachedModels, Keywords, call_before, drawn
from chunkgraph.megatron.site import config_of

if TYPE_CHECKING:
    from chunkgraph.engine import CaptureOptions
    from chunkgraph.megatron.features.packing.bank import PackingOptions
    from chunkgraph.packing import PackedShape

_ENGINE = "verl.workers.engine.megatron.transformer_impl"
_PACKING = "verl.models.mcore.util"


def install(
    packing: PackedShape | PackingOptions, options: CaptureOptions | None = None
) -> AttachedModels:
    """Let every Megatron engine of this process replay graphs, which sleep between its contexts.

    Args:
        packing: See `attach`. Rows hold ``max_token_len_per_gpu`` times the context-parallel size,
            and the padding of sequences.
        options: See `AttachedModels`.

    Returns:
        The graphs of each engine, by the first chunk of its ``module``.
    """
    engine = import_module(_ENGINE)
    models = AttachedModels(engine, _with_packings, packing, options)

    def sleep(self: Any, device: str, *_: Any, **__: Any) -> None:
        if device == "cpu" and hasattr(self, "module"):
            models.sleep(self.module)

    call_before(engine.MegatronEngine, "to", sleep)  # when a context ends, and after a refit
    return models


def _with_packings(keywords: Keywords) -> Keywords:
    """Pack sequences as the forward step will.

    Raises:
        ConfigError: The engine does not pack sequences, or sizes of context parallelism change.
    """
    engine = keywords["forward_step_func"].func.__self__
    settings, config = engine.engine_config, config_of(engine.module[0])
    if not settings.use_remove_padding or getattr(settings, "dynamic_context_parallel", False):
        raise ConfigError(
            "Chunk graphs in verl need packed sequences of one context-parallel size. Set "
            "use_remove_padding=True and dynamic_context_parallel=False, or leave install() out."
        )
    options = {"use_fp8_padding": config.fp8 in ("e4m3", "hybrid")}
    if getattr(settings, "pad_to_length", False):
        options["pad_to_length_bucket"] = settings.pad_to_length_bucket
    pack = import_module(_PACKING).preprocess_thd_engine
    batches, keywords = drawn(keywords)
    packings = []
    for batch in batches:
        _, params, _ = pack(batch["input_ids"], pre_process=False, **options)
        packings.append(params.cu_seqlens_q.diff().tolist())
    return {**keywords, "packings": packings}
