"""The values of a configuration file, each with its flag in a Megatron pretrain script."""

from __future__ import annotations

from dataclasses import dataclass

from chunkgraph.errors import ConfigError
from chunkgraph.launch.context_flags import CONTEXTS
from chunkgraph.launch.expert_flags import expert_flags
from chunkgraph.launch.stash_flags import STASH
from chunkgraph.settings import (
    CaptureConfig,
    Config,
    ModelConfig,
    PackingConfig,
    PipelineConfig,
    StashConfig,
)

__all__ = ["GRANULARITY", "Off", "Setting", "settings_of", "settings_that_are_off"]

GRANULARITY = "--cuda-graph-granularity"
_VIRTUAL_STAGES = (
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
)
_PACKED_SEQS = "--cuda-graph-max-packed-seqs"
_RECOMPUTATION = ("--recompute-granularity", "--recompute-activations")


@dataclass(frozen=True)
class Setting:
    """A value of the file as a flag.

    Attributes:
        key: where it stands in the file.
        flag: Megatron's flag, or ours.
        values: of the flag, usually one; none where the flag takes none.
        rivals: flags that decide the same thing.
    """

    key: str
    flag: str
    values: tuple[str, ...]
    rivals: tuple[str, ...] = ()


@dataclass(frozen=True)
class Off:
    """A value of the file that asks for nothing, for which there is no flag.

    Attributes:
        key: where it stands in the file.
        flags: those that ask for something after all.
        idle: a value with which they do not.
    """

    key: str
    flags: tuple[str, ...]
    idle: str | None = None


def settings_of(config: Config, *, without_capture: bool) -> list[Setting]:
    """All values that have a flag.

    Args:
        config: the file's contents.
        without_capture: leave out the section ``capture``.

    Raises:
        ConfigError: a value has no flag in Megatron.
    """
    if config.packing.context_parallel_sizes and (not config.capture.enabled or without_capture):
        raise ConfigError(
            f"packing.context_parallel_sizes is {list(config.packing.context_parallel_sizes)}, but "
            "without capture nobody spreads the documents of a pretrain script over ranks. Set it "
            "to [], capture the chunks, or use chunkgraph train."
        )
    if config.packing.pad_seq_to_mult > 1:
        raise ConfigError(
            f"packing.pad_seq_to_mult is {config.packing.pad_seq_to_mult}, but a pretrain script's "
            "data set (--sft) places its documents itself. Set it to 1, or use chunkgraph train."
        )
    if config.model.hybrid_layer_pattern is not None:
        raise ConfigError(
            f"model.hybrid_layer_pattern is {config.model.hybrid_layer_pattern}, which this file "
            "cannot give to a pretrain script yet. Set it to null and give the script Megatron's "
            "own --hybrid-layer-pattern and --spec, or use chunkgraph train."
        )
    found = [*_of_model(config.model), *_of_pipeline(config.pipeline)]
    for key, flag, value in expert_flags(config):
        found.append(Setting(key, flag, () if value is None else (value,)))
    if not config.capture.enabled or without_capture:
        return found
    if config.moe.num_moe_experts is not None:
        drops = config.moe.token_drops
        found.append(Setting("moe.token_drops", "--cuda-graph-token-drops", (drops,)))
    found += [*_of_capture(config.capture), *_of_packing(config.packing)]
    return [*found, *_of_stash(config.stash)]


def settings_that_are_off(config: Config) -> list[Off]:
    """What the file leaves out on purpose and a command line may bring in."""
    model, pipeline = config.model, config.pipeline
    found = {
        Off("model.swiglu", ("--swiglu",)): not model.swiglu,
        Off(
            "model.untie_embeddings_and_output_weights",
            ("--untie-embeddings-and-output-weights",),
        ): not model.untie_embeddings_and_output_weights,
        Off("model.params_dtype", ("--bf16", "--fp16")): model.params_dtype == "float32",
        Off("model.fp8", ("--fp8-format",)): model.fp8 is None,
        Off("model.recompute_granularity", _RECOMPUTATION): model.recompute_granularity is None,
        Off(
            "pipeline.virtual_pipeline_model_parallel_size", _VIRTUAL_STAGES
        ): pipeline.num_model_chunks == 1,
        Off(
            "pipeline.context_parallel_size", ("--context-parallel-size",), "1"
        ): pipeline.context_parallel_size == 1,
        Off("pipeline.sequence_parallel", ("--sequence-parallel",)): not pipeline.sequence_parallel,
        Off("moe.num_moe_experts", ("--num-experts",)): config.moe.num_moe_experts is None,
        Off("capture.enabled", (GRANULARITY,), "layer"): not config.capture.enabled,
        Off("packing.max_packed_seqs", (_PACKED_SEQS,), "0"): not config.packing.max_packed_seqs,
        Off(
            "packing.context_parallel_sizes", (CONTEXTS[0].name,)
        ): not config.packing.context_parallel_sizes,
        Off("stash.enabled", (STASH[0].name,), "no"): not config.stash.enabled,
    }
    return [off for off, is_off in found.items() if is_off]


def _of_model(model: ModelConfig) -> list[Setting]:
    if model.layer_spec not in ("auto", "local", "transformer_engine"):
        raise ConfigError(
            f"model.layer_spec {model.layer_spec} cannot be given to a pretrain script by this "
            "name. Set it to auto, and give the script --spec."
        )
    found = [
        Setting("model.num_layers", "--num-layers", (str(model.num_layers),)),
        Setting("model.hidden_size", "--hidden-size", (str(model.hidden_size),)),
        Setting("model.ffn_hidden_size", "--ffn-hidden-size", (str(model.ffn_hidden_size),)),
        Setting(
            "model.num_attention_heads", "--num-attention-heads", (str(model.num_attention_heads),)
        ),
        Setting("model.seq_length", "--seq-length", (str(model.seq_length),)),
        Setting("model.seq_length", "--max-position-embeddings", (str(model.seq_length),)),
        Setting(
            "model.position_embedding_type",
            "--position-embedding-type",
            (model.position_embedding_type,),
        ),
        Setting("model.normalization", "--normalization", (model.normalization,)),
        Setting("model.hidden_dropout", "--hidden-dropout", (repr(model.hidden_dropout),)),
        Setting("model.attention_dropout", "--attention-dropout", (repr(model.attention_dropout),)),
    ]
    if model.swiglu:
        found.append(Setting("model.swiglu", "--swiglu", ()))
        # As `chunkgraph train` builds it: gated layers have no biases, nor have those beside them.
        found.append(Setting("model.swiglu", "--disable-bias-linear", ()))
    if model.untie_embeddings_and_output_weights:
        flag = "--untie-embeddings-and-output-weights"
        found.append(Setting("model.untie_embeddings_and_output_weights", flag, ()))
    if model.params_dtype == "bfloat16":
        found.append(Setting("model.params_dtype", "--bf16", (), rivals=("--fp16",)))
    if model.fp8 is not None:
        found.append(Setting("model.fp8", "--fp8-format", (model.fp8,)))
        found.append(Setting("model.fp8_recipe", "--fp8-recipe", (model.fp8_recipe,)))
    if model.layer_spec != "auto":
        found.append(Setting("model.layer_spec", "--transformer-impl", (model.layer_spec,)))
    return [*found, *_of_recomputation(model)]


def _of_recomputation(model: ModelConfig) -> list[Setting]:
    granularity = model.recompute_granularity
    if granularity is None:
        return []
    found = [
        Setting(
            "model.recompute_granularity", _RECOMPUTATION[0], (granularity,), _RECOMPUTATION[1:]
        )
    ]
    if granularity == "selective":
        flag = "--recompute-modules"
        return [*found, Setting("model.recompute_modules", flag, model.recompute_modules)]
    if model.recompute_method is not None:
        method = (model.recompute_method,)
        found.append(Setting("model.recompute_method", "--recompute-method", method))
    if model.recompute_num_layers is not None:
        layers = (str(model.recompute_num_layers),)
        found.append(Setting("model.recompute_num_layers", "--recompute-num-layers", layers))
    return found


def _of_pipeline(pipeline: PipelineConfig) -> list[Setting]:
    found = [
        Setting(
            "pipeline.pipeline_model_parallel_size",
            "--pipeline-model-parallel-size",
            (str(pipeline.pipeline_model_parallel_size),),
        ),
        Setting(
            "pipeline.tensor_model_parallel_size",
            "--tensor-model-parallel-size",
            (str(pipeline.tensor_model_parallel_size),),
        ),
    ]
    if pipeline.context_parallel_size > 1:
        size = str(pipeline.context_parallel_size)
        found.append(Setting("pipeline.context_parallel_size", "--context-parallel-size", (size,)))
    if pipeline.sequence_parallel:
        found.append(Setting("pipeline.sequence_parallel", "--sequence-parallel", ()))
    if pipeline.num_model_chunks > 1:
        found.append(
            Setting(
                "pipeline.virtual_pipeline_model_parallel_size",
                "--num-virtual-stages-per-pipeline-rank",
                (str(pipeline.num_model_chunks),),
                rivals=_VIRTUAL_STAGES,
            )
        )
        found.append(
            Setting(
                "pipeline.microbatch_group_size_per_vp_stage",
                "--microbatch-group-size-per-virtual-pipeline-stage",
                (str(pipeline.microbatch_group_size),),
            )
        )
    return found


def _of_capture(capture: CaptureConfig) -> list[Setting]:
    found = [
        Setting("capture.enabled", GRANULARITY, ("chunk",)),
        Setting("capture.scope", "--cuda-graph-chunk-scope", (capture.scope,)),
        Setting(
            "capture.num_warmup_steps",
            "--cuda-graph-warmup-steps",
            (str(capture.num_warmup_steps),),
        ),
        Setting("capture.memory_plan", "--cuda-graph-memory-plan", (capture.memory_plan,)),
        Setting(
            "capture.shared_slots",
            "--cuda-graph-shared-slots",
            ("yes" if capture.shared_slots else "no",),
        ),
        Setting(
            "capture.memset_kernels",
            "--cuda-graph-memset-kernels",
            ("yes" if capture.memset_kernels else "no",),
        ),
        Setting("capture.verify", "--cuda-graph-verify", (capture.verify,)),
    ]
    if capture.verify != "none":
        counts = {
            "num_verify_steps": capture.num_verify_steps,
            "verify_every": None if capture.verify_every == 1 else capture.verify_every,
        }
        found += [
            Setting(f"capture.{key}", f"--cuda-graph-{key.replace('_', '-')}", (str(number),))
            for key, number in counts.items()
            if number is not None
        ]
    return [*found, Setting("capture.on_failure", "--cuda-graph-on-failure", (capture.on_failure,))]


def _of_packing(packing: PackingConfig) -> list[Setting]:
    """Its documents come from the script's own data, for which the script has a flag."""
    if not packing.max_packed_seqs:
        return []
    found = [Setting("packing.max_packed_seqs", _PACKED_SEQS, (str(packing.max_packed_seqs),))]
    if packing.max_packed_tokens is not None:
        tokens = (str(packing.max_packed_tokens),)
        found.append(Setting("packing.max_packed_tokens", "--cuda-graph-max-packed-tokens", tokens))
    if packing.max_document_tokens is not None:
        longest = (str(packing.max_document_tokens),)
        found.append(
            Setting("packing.max_document_tokens", "--cuda-graph-max-document-tokens", longest)
        )
    if packing.buckets:
        sizes = tuple(f"{size:.17g}" for size in packing.buckets)
        found.append(Setting("packing.buckets", "--cuda-graph-packed-buckets", sizes))
    if packing.seq_buckets is not None:
        counts = tuple(map(str, packing.seq_buckets or (0,)))
        found.append(Setting("packing.seq_buckets", "--cuda-graph-packed-seq-buckets", counts))
    return [*found, *_of_contexts(packing)]


def _of_contexts(packing: PackingConfig) -> list[Setting]:
    sizes = packing.context_parallel_sizes
    if not sizes:
        return []
    key = "packing.context_parallel_sizes"
    captured = packing.cuda_graph_cp_sizes or sizes
    eager = [size for size in sizes if size not in captured]
    switch, eager_flag, schedule_flag = (flag.name for flag in CONTEXTS)
    found = [Setting(key, switch, tuple(map(str, captured)))]
    if eager:
        found.append(Setting("packing.cuda_graph_cp_sizes", eager_flag, tuple(map(str, eager))))
    schedule = (packing.context_parallel_schedule,)
    found.append(Setting("packing.context_parallel_schedule", schedule_flag, schedule))
    # As in `chunkgraph train`: the mean over the step's tokens, whoever works on them.
    return [*found, Setting(key, "--calculate-per-token-loss", ())]


def _of_stash(stash: StashConfig) -> list[Setting]:
    if not stash.enabled:
        return []
    switch, *others = STASH
    found = [Setting("stash.enabled", switch.name, ("yes",))]
    for flag in others:
        value = getattr(stash, flag.field)
        if value is not None:
            found.append(Setting(f"stash.{flag.field}", flag.name, (flag.text_of(value),)))
    return found
