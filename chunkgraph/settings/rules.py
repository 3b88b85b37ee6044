"""What a configuration must satisfy beyond the type of each value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chunkgraph._text import did_you_mean, shown
from chunkgraph.data.vocabulary import NUM_TOKENS
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.schedules import is_legal_count, nearest_legal_counts
from chunkgraph.settings.contexts import check_contexts
from chunkgraph.settings.experts import check_experts
from chunkgraph.settings.hybrid import check_hybrid
from chunkgraph.settings.packing import check_packing
from chunkgraph.settings.setting import check_bounds
from chunkgraph.settings.stash import check_stash

if TYPE_CHECKING:
    from chunkgraph.settings.config import Config

__all__ = ["check_config"]

_LAYER_SPECS = ("auto", "local", "transformer_engine")


def check_config(config: Config) -> None:
    """Check ranges, then what sections demand of each other.

    Raises:
        ConfigError: A value is out of range, or two settings cannot go together.
        TopologyError: The sizes cannot form a pipeline.
    """
    check_bounds(config)
    if not config.train.num_microbatches:
        msg = "train.num_microbatches is empty; give one number for each step, such as [4, 6, 8]."
        raise ConfigError(msg)
    _check_model(config)
    _check_pipeline(config)
    _check_sequence(config)
    _check_microbatches(config)
    _check_recompute(config)
    _check_fp8(config)
    _check_train(config)
    check_packing(config)
    check_contexts(config)
    check_experts(config)
    check_hybrid(config)
    check_stash(config)


def _check_model(config: Config) -> None:
    model = config.model
    if model.hidden_size % model.num_attention_heads:
        msg = (
            f"model.hidden_size ({model.hidden_size}) is not divisible by "
            f"model.num_attention_heads ({model.num_attention_heads}); every head has the same "
            "width. Change one of them."
        )
        raise ConfigError(msg)
    head_size = model.hidden_size // model.num_attention_heads
    if model.position_embedding_type == "rope" and head_size % 2:
        msg = (
            f"model.position_embedding_type rope turns pairs of elements, but a head has "
            f"{head_size} (model.hidden_size / model.num_attention_heads). Make that even, or use "
            "learned_absolute."
        )
        raise ConfigError(msg)
    if model.vocab_size < NUM_TOKENS:
        msg = (
            f"model.vocab_size is {model.vocab_size}, but the text has {NUM_TOKENS} tokens "
            f"(256 bytes and the end of a document). Set it to {NUM_TOKENS} or more."
        )
        raise ConfigError(msg)
    spec = model.layer_spec
    if spec not in _LAYER_SPECS:
        module, colon, function = spec.partition(":")
        parts = [*module.split("."), function]
        if not colon or not all(part.isidentifier() for part in parts):
            msg = (
                f"model.layer_spec is {shown(spec)}; expected auto, local, transformer_engine or "
                f"package.module:function.{did_you_mean(spec, _LAYER_SPECS)}"
            )
            raise ConfigError(msg)


def _check_pipeline(config: Config) -> None:
    model, pipeline = config.model, config.pipeline
    pp, tp = pipeline.pipeline_model_parallel_size, pipeline.tensor_model_parallel_size
    vpp = pipeline.num_model_chunks
    if vpp > 1 and pp == 1:
        msg = (
            f"pipeline.virtual_pipeline_model_parallel_size is {vpp}, but "
            "pipeline.pipeline_model_parallel_size is 1: there is no pipeline to interleave. "
            "Set the former to null, or the latter to 2 or more."
        )
        raise TopologyError(msg)
    num_stages = pp * vpp
    if model.hybrid_layer_pattern is None and model.num_layers % num_stages:
        below = model.num_layers // num_stages * num_stages
        nearest = f"{below} or {below + num_stages}" if below else str(num_stages)
        msg = (
            f"model.num_layers ({model.num_layers}) is not divisible by {num_stages} stages "
            f"(pipeline_model_parallel_size {pp} x {vpp} model chunks each). "
            f"Set model.num_layers to {nearest}, or change the pipeline."
        )
        raise TopologyError(msg)
    for path, size in {
        "model.num_attention_heads": model.num_attention_heads,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.vocab_size": model.vocab_size,
    }.items():
        if size % tp:
            msg = (
                f"{path} ({size}) is not divisible by pipeline.tensor_model_parallel_size ({tp}); "
                "every rank holds an equal share. Change one of them."
            )
            raise TopologyError(msg)


def _check_sequence(config: Config) -> None:
    model, pipeline = config.model, config.pipeline
    tp, cp = pipeline.tensor_model_parallel_size, pipeline.context_parallel_size
    if pipeline.sequence_parallel and tp == 1:
        msg = (
            "pipeline.sequence_parallel is true, but pipeline.tensor_model_parallel_size is 1: "
            "tensor-parallel ranks share the sequence. Set it to 2 or more, or the former to false."
        )
        raise TopologyError(msg)
    split = {
        "pipeline.context_parallel_size": cp if cp > 1 else None,
        "pipeline.sequence_parallel": True if pipeline.sequence_parallel else None,
    }
    for path, value in split.items():
        if value is None or ":" in model.layer_spec:
            continue
        if model.layer_spec == "local" or config.device == "cpu":
            msg = (
                f"{path} is {str(value).lower()}, which Megatron-core's local layers refuse. Set "
                "device=cuda and model.layer_spec=transformer_engine."
            )
            raise ConfigError(msg)
    # Each context-parallel rank holds one of the first parts and one of the last, for balance.
    parts = (2 * cp if cp > 1 else 1) * (tp if pipeline.sequence_parallel else 1)
    if model.seq_length % parts:
        below = model.seq_length // parts * parts
        msg = (
            f"model.seq_length ({model.seq_length}) is not divisible by {parts}, the parts of a "
            f"sequence (context_parallel_size {cp}, two for each rank if above 1"
            f"{f', for each of {tp} tensor-parallel ranks' if pipeline.sequence_parallel else ''})."
            f" Set it to {f'{below} or ' if below else ''}{below + parts}."
        )
        raise TopologyError(msg)


def _check_microbatches(config: Config) -> None:
    pipeline = config.pipeline
    if pipeline.num_model_chunks == 1:
        return
    pp, group = pipeline.pipeline_model_parallel_size, pipeline.microbatch_group_size
    if group < pp:
        msg = (
            f"pipeline.microbatch_group_size_per_vp_stage ({group}) is smaller than "
            f"pipeline.pipeline_model_parallel_size ({pp}); an interleaved pipeline would wait for "
            f"itself. Set it to {pp} or more, or to null."
        )
        raise TopologyError(msg)
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
            raise TopologyError(msg)


def _check_recompute(config: Config) -> None:
    model, pipeline = config.model, config.pipeline
    granularity, modules = model.recompute_granularity, model.recompute_modules
    for path, value in {
        "model.recompute_method": model.recompute_method,
        "model.recompute_num_layers": model.recompute_num_layers,
    }.items():
        if (value is not None) != (granularity == "full"):
            msg = (
                f"{path} is {_yaml(value)}, but model.recompute_granularity is "
                f"{_yaml(granularity)}: give it with full recomputation, and only then."
            )
            raise ConfigError(msg)
    if granularity == "selective" and not modules:
        msg = (
            "model.recompute_modules is empty, so that selective recomputation would recompute "
            "nothing; name parts of a layer, such as [core_attn], or set "
            "model.recompute_granularity=null."
        )
        raise ConfigError(msg)
    if granularity == "selective" and "mlp" in modules and not model.swiglu:
        msg = (
            "model.recompute_modules has mlp, but without model.swiglu the feed-forward layer has "
            "a bias, which Megatron-core hands out of the recomputed part: its own backward then "
            "calls itself without end. Set model.swiglu=true, or leave mlp out."
        )
        raise ConfigError(msg)
    layers = model.num_layers // (pipeline.pipeline_model_parallel_size * pipeline.num_model_chunks)
    group = model.recompute_num_layers
    if group is not None and model.recompute_method == "uniform" and layers % group:
        msg = (
            f"model.recompute_num_layers is {group}, but the {layers} layers of a chunk do not "
            "divide into groups of that size. Choose a divisor, or recompute_method=block."
        )
        raise ConfigError(msg)


def _check_fp8(config: Config) -> None:
    model, tensor_size = config.model, config.pipeline.tensor_model_parallel_size
    if model.fp8 is None:
        return
    if model.layer_spec == "local" or config.device == "cpu":
        msg = (
            f"model.fp8 is {model.fp8}, but only Transformer Engine's layers, on a GPU, have FP8. "
            "Set device=cuda and model.layer_spec=transformer_engine, or model.fp8=null."
        )
        raise ConfigError(msg)
    for path, size in {
        "model.hidden_size": model.hidden_size,
        "model.ffn_hidden_size": model.ffn_hidden_size,
    }.items():
        if size % (16 * tensor_size):
            msg = (
                f"{path} is {size}, but with model.fp8 each of the {tensor_size} tensor-parallel "
                "ranks needs a multiple of 16 of it. Change it, or set model.fp8=null."
            )
            raise ConfigError(msg)
    if model.recompute_granularity == "full" or (
        model.recompute_granularity == "selective" and set(model.recompute_modules) - {"core_attn"}
    ):
        msg = (
            "model.fp8 with recomputation of more than core_attn: Transformer Engine's own "
            "recomputation keeps scales in Python, which chunk graphs do not follow. Set "
            "model.recompute_modules=[core_attn] with selective, or model.fp8=null."
        )
        raise ConfigError(msg)


def _yaml(value: object) -> str:
    return "null" if value is None else str(value)


def _check_train(config: Config) -> None:
    train = config.train
    if train.overlap_param_gather and not (
        train.use_distributed_optimizer and train.overlap_grad_reduce
    ):
        msg = (
            "train.overlap_param_gather gathers what a sharded optimizer updated, bucket by "
            "bucket; it needs train.use_distributed_optimizer=true and "
            "train.overlap_grad_reduce=true."
        )
        raise ConfigError(msg)
    for path, wanted in {
        "train.overlap_grad_reduce": train.overlap_grad_reduce,
        "train.gradient_accumulation_fusion": train.gradient_accumulation_fusion,
        "train.use_distributed_optimizer": train.use_distributed_optimizer,
    }.items():
        if wanted and not train.use_ddp:
            msg = f"{path} is true, but it is a part of DDP and train.use_ddp is false."
            raise ConfigError(msg)
