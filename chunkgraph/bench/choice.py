"""The variants of ``chunkgraph bench`` by name, and those that a configuration supports."""

from __future__ import annotations

import dataclasses
from itertools import chain

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.schedules import (
    Placement,
    ScheduleFamily,
    check_step,
    get_family,
    list_schedules,
)
from chunkgraph.settings import Config
from chunkgraph.settings.experts import uses_dropless
from chunkgraph.settings.setting import settings_of

__all__ = [
    "FROZEN",
    "PROMISED",
    "UNCOMPARED",
    "VARIANTS",
    "chosen_variants",
    "config_of",
    "run_as",
    "schedule_of",
    "torch_class",
    "torch_schedule",
]

VARIANTS = (
    *("eager", "eager_dropless", "eager_stash", "chunk", "chunk_capacity"),
    *("transformer_engine", "local", "full_iteration"),
)
"""All variants but those of schedules, in the order in which they run."""

_TORCH_CLASSES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""Classes of torch by schedule; ``eager`` and ``chunk`` have the first one."""

_SCHEDULES = {f"{kind}_{name}": name for name in list_schedules() for kind in ("chunk", "eager")}

_MEGATRON = (
    *VARIANTS,
    *(f"chunk_{n}" for n in list_schedules() if get_family(n).placement is Placement.LOOP),
)

_TORCH = ("eager", "chunk", *(n for n, s in _SCHEDULES.items() if s in _TORCH_CLASSES))

_TORCH_SETTINGS = (
    *("name", "device", "bench", "run", "pipeline.pipeline_model_parallel_size"),
    *("model.num_layers", "model.hidden_size", "model.ffn_hidden_size", "model.seq_length"),
    *("model.num_attention_heads", "model.params_dtype", "model.layer_spec"),
    *("train.num_microbatches", "train.micro_batch_size", "train.seed", "train.lr"),
    *("train.deterministic", "train.compare"),
    *("capture.num_warmup_steps", "capture.shared_slots"),
    *("capture.verify", "capture.num_verify_steps", "capture.on_failure"),
)
"""Settings and sections that have an effect on torch pipelines."""

PROMISED = ("eager", "chunk")
"""Variants that must run and be equal."""

FROZEN = ("eager_stash", "transformer_engine", "local", "full_iteration")
"""Megatron's graphs and stash, which cannot change the number of microbatches."""

UNCOMPARED = ("eager_dropless", "chunk_capacity")
"""Variants with other results than eager."""


def chosen_variants(text: str | None, config: Config) -> tuple[str, ...]:
    """Return the variants of ``--variants``, or by default all that the configuration supports.

    Raises:
        ConfigError: A variant is unknown, or the configuration does not support it.
    """
    if sizes := config.packing.context_parallel_sizes:
        msg = (
            f"packing.context_parallel_sizes is {list(sizes)}, but bench does not support "
            "microbatches of several context-parallel sizes. Set it to []."
        )
        raise ConfigError(msg)
    if config.bench.runtime == "torch":
        _check_torch(config)
    if text is None and config.bench.runtime == "torch":
        pairs = [(f"eager_{n}", f"chunk_{n}") for n in dict.fromkeys(config.bench.schedules)]
        return _checked("bench.schedules", ("eager", "chunk", *chain(*pairs)), config)
    if text is None:
        candidates: tuple[str, ...] = VARIANTS if config.device == "cuda" else PROMISED
        names = tuple(name for name in candidates if _why_not(name, config) is None)
        return names + _checked("bench.schedules", _named_schedules(config), config)
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    _checked("--variants", names, config)
    if not names or len(set(names)) < len(names):
        msg = f"--variants {text!r}: name at least one, and each only once."
        raise ConfigError(msg)
    return names


def schedule_of(name: str) -> str | None:
    """Return the schedule that a variant is named after; None for the other variants."""
    return _SCHEDULES.get(name)


def _named_schedules(config: Config) -> tuple[str, ...]:
    return tuple(f"chunk_{name}" for name in dict.fromkeys(config.bench.schedules))


def _checked(where: str, names: tuple[str, ...], config: Config) -> tuple[str, ...]:
    """Return ``names``, which must exist and be supported by the configuration."""
    known = _TORCH if config.bench.runtime == "torch" else _MEGATRON
    for name in names:
        if name not in known:
            msg = f"{where}: unknown variant {name!r}; choose from {', '.join(known)}."
            raise ConfigError(msg)
        why = _why_not(name, config)
        if why is not None:
            raise ConfigError(f"{where}: {why}")
        config_of(name, config)
    return names


def _why_not(name: str, config: Config) -> str | None:
    """Return why a configuration does not support a variant; None if it does."""
    moe, num_seqs = config.moe, config.packing.max_packed_seqs
    if config.bench.runtime == "torch":
        return _why_not_schedule(torch_schedule(name).name, config)
    if (schedule := schedule_of(name)) is not None:
        return _why_not_schedule(schedule, config)
    if name in UNCOMPARED and moe.num_moe_experts is None:
        return f"{name} is for experts, and moe.num_moe_experts is null."
    if uses_dropless(moe):
        if name == "eager_dropless":
            return "eager_dropless is eager, as moe.moe_expert_capacity_factor is null."
        if name == "full_iteration":
            return (
                "full_iteration captures experts whose dispatch reads token counts on the host, as "
                "moe.moe_expert_capacity_factor is null. Leave it out."
            )
    elif name == "chunk_capacity":
        return "chunk_capacity is compared with experts that take all tokens, without a capacity."
    if name == "eager_stash":
        if moe.num_moe_experts is None or moe.moe_flex_dispatcher_backend != "hybridep":
            return (
                "eager_stash is Megatron's stash, which only supports HybridEP, but "
                f"moe.moe_flex_dispatcher_backend is {moe.moe_flex_dispatcher_backend or 'null'}."
            )
        if not config.stash.enabled:
            return "eager_stash is compared with chunkgraph's stash, but stash.enabled is false."
    if num_seqs and name == "eager_dropless":
        return (
            "eager_dropless is Megatron's own dispatch, which sends experts rows without a token "
            f"too; packing.max_packed_seqs is {num_seqs}. Leave it out, or set that to 0."
        )
    if num_seqs and name in FROZEN:
        return (
            f"{name} does not support packed sequences, but packing.max_packed_seqs is {num_seqs}. "
            f"Leave {name} out, or set max_packed_seqs to 0."
        )
    return None


def _why_not_schedule(schedule: str, config: Config) -> str | None:
    pipeline = config.pipeline
    num_ranks, num_chunks = pipeline.pipeline_model_parallel_size, pipeline.num_model_chunks
    if config.bench.runtime == "torch":
        num_chunks = get_family(schedule).num_chunks or 2
        if config.model.num_layers % (num_ranks * num_chunks):
            return (
                f"{schedule} has {num_chunks} stages on each of {num_ranks} ranks, and "
                f"model.num_layers is {config.model.num_layers}; make it a multiple of "
                f"{num_ranks * num_chunks}."
            )
    try:
        for count in set(config.train.num_microbatches):
            check_step(
                schedule,
                num_ranks=num_ranks,
                num_chunks=num_chunks,
                num_microbatches=count,
                group_size=pipeline.microbatch_group_size_per_vp_stage,
            )
    except TopologyError as error:
        return str(error)
    return None


def torch_schedule(name: str) -> ScheduleFamily:
    """Return the schedule of a variant of torch pipelines."""
    return get_family(schedule_of(name) or next(iter(_TORCH_CLASSES)))


def torch_class(schedule: str) -> str:
    """Return the name of torch's class for a schedule."""
    return _TORCH_CLASSES[schedule]


def _check_torch(config: Config) -> None:
    """Refuse settings without an effect on torch pipelines."""
    for item in settings_of(Config):
        section, _, key = item.path.rpartition(".")
        value = getattr(getattr(config, section) if section else config, key)
        if value != item.default and not {item.path, section} & {*_TORCH_SETTINGS}:
            msg = f"{item.path} has no effect with bench.runtime=torch. Leave it out."
            raise ConfigError(msg)
    if config.model.layer_spec not in ("auto", "local", "transformer_engine"):
        msg = (
            f"model.layer_spec is {config.model.layer_spec}, a layer of Megatron's. With "
            "bench.runtime=torch use local (torch's modules) or transformer_engine."
        )
        raise ConfigError(msg)


def run_as(name: str) -> str:
    """Return the variant that the workers run."""
    if name in _SCHEDULES or name in ("eager_dropless", "chunk_capacity"):
        return name.partition("_")[0]
    return name


def config_of(name: str, config: Config) -> Config:
    """Return the configuration for the workers of a variant; only the command compares.

    ``eager_dropless`` is Megatron's training without dropped tokens: an all-to-all of exactly the
    routed tokens, whose counts the host reads, without a capacity. ``chunk_capacity`` is chunk
    graphs whose experts have room for an even load, as many rows as without a capacity.
    """
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compare="none"))
    if config.bench.runtime == "torch":
        return config
    if name != "chunk":  # the others run Megatron's own schedule
        schedule = schedule_of(name) or "auto"
        pipeline = dataclasses.replace(config.pipeline, schedule=schedule)
        config = dataclasses.replace(config, pipeline=pipeline)
    if name == "chunk_capacity":
        moe = dataclasses.replace(
            config.moe,
            moe_expert_capacity_factor=1.0,
            moe_pad_expert_input_to_capacity=True,
            token_drops="count",
        )
        return dataclasses.replace(config, moe=moe)
    if name != "eager_dropless":
        return config
    return dataclasses.replace(
        config,
        moe=dataclasses.replace(
            config.moe,
            moe_token_dispatcher_type="alltoall",
            moe_flex_dispatcher_backend=None,
            moe_expert_rank_capacity_factor=None,
            moe_expert_capacity_factor=None,
            moe_pad_expert_input_to_capacity=False,
            use_transformer_engine_op_fuser=False,
            token_drops="count",
        ),
        capture=dataclasses.replace(config.capture, enabled=False),
        stash=dataclasses.replace(config.stash, enabled=False),
    )
