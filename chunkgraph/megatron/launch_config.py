"""A configuration file as flags of a Megatron pretrain script.

``model``, ``pipeline``, ``moe`` and ``capture`` have their flags there. ``train``, ``data``,
``bench`` and ``run`` belong to ``chunkgraph train`` and ``bench``; a pretrain script gets its
steps, its data and its tokenizer from its own flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunkgraph.config import CaptureConfig, Config
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.launch_experts import expert_flags

__all__ = ["merge_flags"]

_GRANULARITY = "--cuda-graph-granularity"
_VIRTUAL_STAGES = (
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
)


@dataclass(frozen=True)
class _Setting:
    """A value of the file as a flag.

    Attributes:
        key: where it stands in the file.
        flag: Megatron's flag, or ours.
        value: of the flag; None for a flag without one.
        rivals: flags that decide the same thing.
    """

    key: str
    flag: str
    value: str | None
    rivals: tuple[str, ...] = ()


def merge_flags(
    config: Config, script_args: Sequence[str], *, source: str
) -> tuple[list[str], list[str]]:
    """Put the file's values in front of the command line's flags, which win.

    Args:
        config: the file's contents.
        script_args: flags on the command line.
        source: names the file in notes.

    Returns:
        All flags, and a note for each value of the file that the command line replaces with
        another.

    Raises:
        ConfigError: a value has no flag in Megatron.
    """
    given = _given(script_args)
    flags: list[str] = []
    notes: list[str] = []
    turned_off = given.get(_GRANULARITY) == "layer"
    if turned_off and config.capture.enabled:
        notes.append(f"{_GRANULARITY} layer on the command line turns off capture of {source}")
    for setting in _settings(config, without_capture=turned_off):
        decided = next((n for n in (setting.flag, *setting.rivals) if n in given), None)
        if decided is None:
            flags += [setting.flag] if setting.value is None else [setting.flag, setting.value]
        elif decided != setting.flag or given[decided] != setting.value:
            value = given[decided]
            shown = decided if value is None else f"{decided} {value}"
            notes.append(f"{shown} on the command line replaces {setting.key} of {source}")
    return [*flags, *script_args], notes


def _settings(config: Config, *, without_capture: bool) -> list[_Setting]:
    model, pipeline, capture = config.model, config.pipeline, config.capture
    if model.layer_spec not in ("auto", "local", "transformer_engine"):
        raise ConfigError(
            f"model.layer_spec {model.layer_spec} cannot be given to a pretrain script by this "
            "name. Set it to auto, and give the script --spec."
        )
    if config.packing.max_packed_seqs:
        raise ConfigError(
            "packing.max_packed_seqs is set, but a pretrain script reads its own data, which is "
            "not packed into fixed shapes. Set it to 0, or use chunkgraph train."
        )
    if config.stash.enabled:
        raise ConfigError(
            "stash.enabled is true, but a pretrain script cannot stash yet. Set it to false, or "
            "use chunkgraph train."
        )
    if config.moe.token_drops == "rerun":
        raise ConfigError(
            "moe.token_drops is rerun, but the steps of a pretrain script are not run anew yet. "
            "Set it to raise, or use chunkgraph train."
        )
    found = [
        _Setting("model.num_layers", "--num-layers", str(model.num_layers)),
        _Setting("model.hidden_size", "--hidden-size", str(model.hidden_size)),
        _Setting("model.ffn_hidden_size", "--ffn-hidden-size", str(model.ffn_hidden_size)),
        _Setting(
            "model.num_attention_heads", "--num-attention-heads", str(model.num_attention_heads)
        ),
        _Setting("model.seq_length", "--seq-length", str(model.seq_length)),
        _Setting("model.seq_length", "--max-position-embeddings", str(model.seq_length)),
        _Setting(
            "model.position_embedding_type",
            "--position-embedding-type",
            model.position_embedding_type,
        ),
        _Setting("model.normalization", "--normalization", model.normalization),
        _Setting("model.hidden_dropout", "--hidden-dropout", repr(model.hidden_dropout)),
        _Setting("model.attention_dropout", "--attention-dropout", repr(model.attention_dropout)),
        _Setting(
            "pipeline.pipeline_model_parallel_size",
            "--pipeline-model-parallel-size",
            str(pipeline.pipeline_model_parallel_size),
        ),
        _Setting(
            "pipeline.tensor_model_parallel_size",
            "--tensor-model-parallel-size",
            str(pipeline.tensor_model_parallel_size),
        ),
    ]
    if pipeline.context_parallel_size > 1:
        size = str(pipeline.context_parallel_size)
        found.append(_Setting("pipeline.context_parallel_size", "--context-parallel-size", size))
    if pipeline.sequence_parallel:
        found.append(_Setting("pipeline.sequence_parallel", "--sequence-parallel", None))
    if model.swiglu:
        found.append(_Setting("model.swiglu", "--swiglu", None))
    if model.untie_embeddings_and_output_weights:
        flag = "--untie-embeddings-and-output-weights"
        found.append(_Setting("model.untie_embeddings_and_output_weights", flag, None))
    if model.params_dtype == "bfloat16":
        found.append(_Setting("model.params_dtype", "--bf16", None, rivals=("--fp16",)))
    if model.fp8 is not None:
        found.append(_Setting("model.fp8", "--fp8-format", model.fp8))
        found.append(_Setting("model.fp8_recipe", "--fp8-recipe", model.fp8_recipe))
    if model.layer_spec != "auto":
        found.append(_Setting("model.layer_spec", "--transformer-impl", model.layer_spec))
    if pipeline.num_model_chunks > 1:
        found.append(
            _Setting(
                "pipeline.virtual_pipeline_model_parallel_size",
                "--num-virtual-stages-per-pipeline-rank",
                str(pipeline.num_model_chunks),
                rivals=_VIRTUAL_STAGES,
            )
        )
        found.append(
            _Setting(
                "pipeline.microbatch_group_size_per_vp_stage",
                "--microbatch-group-size-per-virtual-pipeline-stage",
                str(pipeline.microbatch_group_size),
            )
        )
    found += [_Setting(*setting) for setting in expert_flags(config)]
    if not capture.enabled or without_capture:
        return found
    if config.moe.num_moe_experts is not None:
        found.append(
            _Setting("moe.token_drops", "--cuda-graph-token-drops", config.moe.token_drops)
        )
    return [
        *found,
        _Setting("capture.enabled", _GRANULARITY, "chunk"),
        _Setting("capture.scope", "--cuda-graph-chunk-scope", capture.scope),
        _Setting(
            "capture.num_warmup_steps", "--cuda-graph-warmup-steps", str(capture.num_warmup_steps)
        ),
        _Setting("capture.memory_plan", "--cuda-graph-memory-plan", capture.memory_plan),
        _Setting("capture.verify", "--cuda-graph-verify", capture.verify),
        *_verify_counts(capture),
        _Setting("capture.on_failure", "--cuda-graph-on-failure", capture.on_failure),
    ]


def _verify_counts(capture: CaptureConfig) -> list[_Setting]:
    """Which steps are verified, where any is and the configuration says."""
    if capture.verify == "none":
        return []
    counts = {
        "num_verify_steps": capture.num_verify_steps,
        "verify_every": None if capture.verify_every == 1 else capture.verify_every,
    }
    return [
        _Setting(f"capture.{key}", f"--cuda-graph-{key.replace('_', '-')}", str(number))
        for key, number in counts.items()
        if number is not None
    ]


def _given(script_args: Sequence[str]) -> dict[str, str | None]:
    """The flags of a command line, each with the first value behind it."""
    found: dict[str, str | None] = {}
    for i, arg in enumerate(script_args):
        if not arg.startswith("--"):
            continue
        name, equals, value = arg.partition("=")
        following = script_args[i + 1] if i + 1 < len(script_args) else None
        if equals:
            found[name] = value
        else:
            found[name] = None if following is None or following.startswith("--") else following
    return found
