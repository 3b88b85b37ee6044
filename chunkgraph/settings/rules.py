"""Check a configuration file: the rules of its sections and between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chunkgraph._text import did_you_mean, shown
from chunkgraph.data.counts import check_counts
from chunkgraph.data.vocabulary import NUM_TOKENS
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.schedules import is_legal_count, nearest_legal_counts
from chunkgraph.settings.models import Config
from chunkgraph.settings.packing import PACKING_FILE_RULES
from chunkgraph.settings.rule import Facts, Rule, check
from chunkgraph.settings.schedules import (
    FILE_SUFFIX,
    SCHEDULE_RULES,
    SLOT_RULES,
    read_matching_schedule,
)
from chunkgraph.settings.words import facts_of

__all__ = ["check_config"]

_LAYER_SPECS = ("auto", "local", "transformer_engine")


def check_config(config: Config) -> None:
    """Check the settings against each other.

    Raises:
        ConfigError: settings cannot go together.
        ScheduleError: the schedule's file holds no valid schedule.
        TopologyError: the sizes cannot form a pipeline.
    """
    if config.data.document_counts:
        check_counts(config.data.document_counts, "data.document_counts")
    _check_layer_spec(config.model.layer_spec)
    check(_RULES, facts_of(config), "these settings cannot go together:")
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
    msg = (
        f"model.layer_spec is {shown(spec)}; expected auto, local, transformer_engine or "
        f"package.module:function.{did_you_mean(spec, _LAYER_SPECS)}"
    )
    raise ConfigError(msg)


def _check_microbatches(config: Config) -> None:
    pipeline = config.pipeline
    if pipeline.num_model_chunks == 1:
        return
    is_from_file = pipeline.schedule.endswith(FILE_SUFFIX)
    if is_from_file and config.train.compare == "none":
        return  # no step runs under Megatron's interleaved schedule
    group, pp = pipeline.microbatch_group_size, pipeline.pipeline_model_parallel_size
    sizes: dict[str, Any] = {
        "num_ranks": pp,
        "num_chunks": pipeline.num_model_chunks,
        "group_size": group,
    }
    for step, count in enumerate(config.train.num_microbatches):
        if not is_legal_count(count, **sizes):
            reason = (
                f"is smaller than a microbatch group of {group}"
                if count < group
                else f"leaves a last group of {count % group}, smaller than the pipeline size {pp}"
            )
            nearest = " or ".join(map(str, nearest_legal_counts(count, **sizes)))
            msg = (
                f"train.num_microbatches[{step}] is {count}, which {reason}: no interleaved "
                f"schedule of {pipeline.num_model_chunks} model chunks exists for it. "
                f"The nearest legal count is {nearest}."
            )
            if is_from_file:
                msg += " The file may have others if train.compare is none."
            raise TopologyError(msg)


def _head_size(f: Facts) -> int:
    return int(f.hidden_size // f.num_attention_heads)


def _num_stages(f: Facts) -> int:
    return int(f.pipeline_model_parallel_size * (f.virtual_pipeline_model_parallel_size or 1))


def _uneven_stages(f: Facts) -> object:
    stages = _num_stages(f)
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


def _is_uneven(name: str, *, in_fp8: bool = False) -> Callable[[Facts], object]:
    def is_uneven(f: Facts) -> object:
        parts = f.tensor_model_parallel_size * (16 if in_fp8 else 1)
        return (f.fp8 or not in_fp8) and getattr(f, name) % parts

    return is_uneven


def _is_local_with(name: str) -> Callable[[Facts], bool]:
    def is_local(f: Facts) -> bool:
        value = getattr(f, name)
        return (value is True or value > 1) and ":" not in f.layer_spec and _is_local(f)

    return is_local


def _with_experts(
    text: str, when: Callable[[Facts], object], error: type[ConfigError] = ConfigError
) -> Rule:
    return Rule(text, lambda f: f.num_moe_experts is not None and when(f), error)


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
        "virtual_pipeline_model_parallel_size pipeline_model_parallel_size: there is no pipeline "
        "to interleave; leave the former out, or make the latter 2 or more",
        lambda f: (
            (f.virtual_pipeline_model_parallel_size or 1) > 1
            and f.pipeline_model_parallel_size == 1
        ),
        TopologyError,
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
        "microbatch_group_size_per_vp_stage pipeline_model_parallel_size: an interleaved pipeline "
        "would deadlock; leave the former out, or make it no smaller than the latter",
        lambda f: (
            (f.virtual_pipeline_model_parallel_size or 1) > 1
            and (f.microbatch_group_size_per_vp_stage or f.pipeline_model_parallel_size)
            < f.pipeline_model_parallel_size
        ),
        TopologyError,
    ),
    Rule(
        "recompute_granularity recompute_modules: selective recomputation would recompute "
        "nothing; name parts of a layer, such as core_attn",
        lambda f: f.recompute_granularity == "selective" and not f.recompute_modules,
    ),
    Rule(
        "recompute_modules swiglu: without SwiGLU the feed-forward layer has a bias, which "
        "Megatron-core returns from the recomputed part, so that its backward recurses forever; "
        "use {swiglu=true}, or leave mlp out",
        lambda f: (
            f.recompute_granularity == "selective" and "mlp" in f.recompute_modules and not f.swiglu
        ),
    ),
    Rule(
        "fp8: only Transformer Engine's layers on a GPU support FP8; use {device=cuda} and "
        "{layer_spec=transformer_engine}, or leave it out",
        lambda f: f.fp8 and _is_local(f),
    ),
    *(
        Rule(
            f"{setting} fp8 tensor_model_parallel_size: the share of each tensor-parallel rank "
            "must be a multiple of 16; change it, or train without FP8",
            _is_uneven(setting, in_fp8=True),
        )
        for setting in ("hidden_size", "ffn_hidden_size")
    ),
    Rule(
        "expert_model_parallel_size num_moe_experts: there are no experts to split; change one of "
        "them",
        lambda f: f.num_moe_experts is None and f.expert_model_parallel_size > 1,
        TopologyError,
    ),
    _with_experts(
        "moe_router_topk num_moe_experts: a token cannot go to more experts than there are",
        lambda f: f.moe_router_topk > f.num_moe_experts,
    ),
    _with_experts(
        "expert_model_parallel_size data_parallel_size: data-parallel ranks split the experts, so "
        "the former must divide the latter; change one of them",
        lambda f: f.data_parallel_size % f.expert_model_parallel_size,
        TopologyError,
    ),
    _with_experts(
        "num_moe_experts tensor_model_parallel_size: Megatron trains experts on several "
        "tensor-parallel ranks only with sequence parallelism; use {sequence_parallel=true}",
        lambda f: f.tensor_model_parallel_size > 1 and not f.sequence_parallel,
        TopologyError,
    ),
    _with_experts(
        "moe_layer_freq num_layers: the former needs one number for each layer of the model, 1 "
        "(experts) or 0 (feed-forward)",
        lambda f: (
            f.moe_layer_freq is not None
            and (len(f.moe_layer_freq) != f.num_layers or set(f.moe_layer_freq) - {0, 1})
        ),
    ),
    *SCHEDULE_RULES,
    *SLOT_RULES,
    *PACKING_FILE_RULES,
)
