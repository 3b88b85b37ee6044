"""Check a configuration file: the rules of its sections and between them."""

from __future__ import annotations

from collections.abc import Callable

from chunkgraph._text import did_you_mean, shown
from chunkgraph.data import NUM_TOKENS
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.schedules import (
    FILE_SUFFIX,
    check_step,
    megatron_schedule_name,
    read_matching_schedule,
)
from chunkgraph.settings.listing import settings_of
from chunkgraph.settings.models import Settings
from chunkgraph.settings.rule import Facts, Rule, check
from chunkgraph.settings.words import facts_of

_LAYER_SPECS = ("auto", "local", "transformer_engine")


def check_settings(config: Settings) -> None:
    """Check the settings against each other.

    Raises:
        ConfigError: settings conflict.
        ScheduleError: the schedule's file holds no valid schedule.
        TopologyError: the sizes cannot form a pipeline.
    """
    _check_layer_spec(config.model.layer_spec)
    _check_more_fields(config)
    # The features import this package. Their rules import no torch.
    from chunkgraph.megatron.rules.features import FILE_RULES

    rules = (*_RULES, *FILE_RULES)
    check(rules, facts_of(config), "these settings conflict:")
    pipeline = config.pipeline
    read_matching_schedule(
        pipeline.schedule,
        pipeline.pipeline_model_parallel_size,
        pipeline.num_model_chunks,
        config.train.num_microbatches,
        "train.num_microbatches",
    )
    _check_microbatches(config)


def _check_layer_spec(spec: str) -> None:
    module, colon, function = spec.partition(":")
    parts = [*module.split("."), function]
    if spec in _LAYER_SPECS or (colon and all(part.isidentifier() for part in parts)):
        return
    raise ConfigError(
        f"model.layer_spec is {shown(spec)}; expected auto, local, transformer_engine or "
        f"package.module:function.{did_you_mean(spec, _LAYER_SPECS)}"
    )


def _check_more_fields(config: Settings) -> None:
    """Check that ``model.transformer_config`` sets no field that has its own setting."""
    own = {item.name: item.path for item in settings_of(Settings)}
    for name in config.model.transformer_config:
        if name in own:
            raise ConfigError(f"model.transformer_config.{name}: set {own[name]} instead.")


def _check_microbatches(config: Settings) -> None:
    """Check that Megatron's own schedule, which eager steps run, exists for every step."""
    pipeline, num_chunks = config.pipeline, config.pipeline.num_model_chunks
    is_from_file = pipeline.schedule.endswith(FILE_SUFFIX)
    if is_from_file and config.train.compare == "none":
        return
    for step, count in enumerate(config.train.num_microbatches):
        try:
            check_step(
                megatron_schedule_name(num_chunks),
                num_ranks=pipeline.pipeline_model_parallel_size,
                num_microbatches=count,
                num_chunks=num_chunks,
                group_size=pipeline.microbatch_group_size,
            )
        except TopologyError as error:
            hint = ". The file may have others if train.compare is none." if is_from_file else ""
            where = f"train.num_microbatches[{step}] is {count}"
            raise TopologyError(f"{where}: {error}{hint}") from None


def _head_size(f: Facts) -> int:
    return int(f.hidden_size // f.num_attention_heads)


def _uneven_stages(f: Facts) -> object:
    stages = f.pipeline_model_parallel_size * (f.virtual_pipeline_model_parallel_size or 1)
    if f.hybrid_layer_pattern is not None or f.num_layers % stages == 0:
        return False
    below = f.num_layers // stages * stages
    return {"stages": stages, "nearest": f"{below} or {below + stages}" if below else stages}


def _sequence_parts(f: Facts) -> object:
    # Each context-parallel rank holds a part from the first half and one from the last.
    cp, tp = f.context_parallel_size, f.tensor_model_parallel_size
    parts = (2 * cp if cp > 1 else 1) * (tp if f.sequence_parallel else 1)
    below = f.seq_length // parts * parts
    nearest = f"{below} or {below + parts}" if below else f"{parts}"
    return f.seq_length % parts and {"parts": parts, "nearest": nearest}


def _is_local(f: Facts) -> bool:
    return bool(f.layer_spec == "local" or f.device == "cpu")


def _is_uneven(name: str) -> Callable[[Facts], object]:
    return lambda f: getattr(f, name) % f.tensor_model_parallel_size


def _is_local_with(name: str) -> Callable[[Facts], bool]:
    def is_local(f: Facts) -> bool:
        value = getattr(f, name)
        return (value is True or value > 1) and ":" not in f.layer_spec and _is_local(f)

    return is_local


_RULES = (
    Rule(
        "num_microbatches: set one number for each step, such as [4, 6, 8]",
        lambda f: not f.num_microbatches,
    ),
    Rule(
        "hidden_size num_attention_heads: every head has the same width; make the former a "
        "multiple of the latter",
        lambda f: f.hidden_size % f.num_attention_heads,
    ),
    Rule(
        "hidden_size num_attention_heads: rotary positions rotate pairs of elements, but a head "
        "has {width}; make that even",
        lambda f: (
            f.hidden_size % f.num_attention_heads == 0
            and _head_size(f) % 2
            and {"width": _head_size(f)}
        ),
    ),
    Rule(
        f"vocab_size: the text has {NUM_TOKENS} tokens (256 bytes and the end of a document); "
        f"make it {NUM_TOKENS} or more",
        lambda f: f.vocab_size < NUM_TOKENS,
    ),
    Rule(
        "num_layers: not divisible by {stages} stages ({pipeline_model_parallel_size}, "
        "{virtual_pipeline_model_parallel_size}); make it {nearest}, or change the pipeline",
        _uneven_stages,
        TopologyError,
    ),
    *(
        Rule(
            f"{setting} tensor_model_parallel_size: every rank holds an equal share, but the "
            "former is not divisible by the latter; change one of them",
            _is_uneven(setting),
            TopologyError,
        )
        for setting in ("num_attention_heads", "ffn_hidden_size", "vocab_size")
    ),
    Rule(
        "expert_model_parallel_size: it does not divide the ranks of a pipeline stage; change it, "
        "or {data_parallel_size}",
        lambda f: (
            f.tensor_model_parallel_size
            * f.context_parallel_size
            * f.data_parallel_size
            % f.expert_model_parallel_size
        ),
        TopologyError,
    ),
    Rule(
        "sequence_parallel tensor_model_parallel_size: tensor-parallel ranks split the sequence; "
        "make the latter 2 or more, or leave the former out",
        lambda f: f.sequence_parallel and f.tensor_model_parallel_size == 1,
        TopologyError,
    ),
    *(
        Rule(
            f"{setting}: Megatron-core's local layers refuse it; use {{device=cuda}} and "
            "{layer_spec=transformer_engine}",
            _is_local_with(setting),
        )
        for setting in ("context_parallel_size", "sequence_parallel")
    ),
    Rule(
        "seq_length: it is not divisible by {parts}, the number of parts of a sequence: two per "
        "context-parallel rank, times the tensor-parallel ranks ({context_parallel_size}, "
        "{tensor_model_parallel_size}, {sequence_parallel}); make it {nearest}",
        _sequence_parts,
        TopologyError,
    ),
    Rule(
        "recompute_modules: Megatron recomputes these on GPUs only; leave out layernorm, moe_act, "
        "mla_up_proj, or use {device=cuda}",
        lambda f: (
            f.device == "cpu"
            and f.recompute_granularity == "selective"
            and not {"layernorm", "moe_act", "mla_up_proj"}.isdisjoint(f.recompute_modules)
        ),
    ),
    Rule(
        "num_moe_experts tensor_model_parallel_size: Megatron trains experts on tensor-parallel "
        "ranks only with sequence parallelism; use {sequence_parallel=true}",
        lambda f: (
            f.num_moe_experts and f.tensor_model_parallel_size > 1 and not f.sequence_parallel
        ),
    ),
    Rule(
        "num_moe_experts: Megatron's local experts train without biases only, if one rank has all "
        "of them; use {swiglu=true}, or add_bias_linear: false in model.transformer_config",
        lambda f: (
            f.num_moe_experts
            and f.expert_model_parallel_size == 1
            and (not f.swiglu if f.add_bias_linear is None else f.add_bias_linear)
            and ":" not in f.layer_spec
            and _is_local(f)
        ),
    ),
    Rule(
        "overlap_param_gather: it gathers the parameters of a sharded optimizer; use "
        "{use_distributed_optimizer=true} and {overlap_grad_reduce=true}",
        lambda f: (
            f.overlap_param_gather and not (f.use_distributed_optimizer and f.overlap_grad_reduce)
        ),
    ),
)
