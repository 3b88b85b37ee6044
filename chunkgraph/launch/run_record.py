"""Report a run with chunk graphs: a line at its start and after the capture, and a file."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from chunkgraph import __version__
from chunkgraph._text import format_bytes
from chunkgraph.engine import CaptureReport
from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import GraphFlags
from chunkgraph.megatron.attachment import MegatronChunkGraphs
from chunkgraph.megatron.core.access import versions
from chunkgraph.megatron.features.packing.banks import PackedBanks

__all__ = ["RECORD_NAME", "capture_line", "save_run_record", "start_line"]

RECORD_NAME = "chunkgraph.yaml"
"""Name of the record in the run's folder."""

_MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "seq_length",
    "padded_vocab_size",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "add_bias_linear",
    "hidden_dropout",
    "attention_dropout",
    "untie_embeddings_and_output_weights",
    "bf16",
    "fp16",
    "fp8",
    "fp8_recipe",
    "transformer_impl",
    "te_rng_tracker",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "mtp_num_layers",
    "hybrid_layer_pattern",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
)
_EXPERTS = (
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "moe_expert_capacity_factor",
    "moe_expert_rank_capacity_factor",
    "cuda_graph_expert_rank_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
)
"""Arguments of models with experts."""

_PIPELINE = (
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_vp_stage",
    "tensor_model_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "expert_model_parallel_size",
    "data_parallel_size",
)


def start_line(graphs: MegatronChunkGraphs, flags: GraphFlags, record: Path | None) -> str:
    """Return a line about the upcoming capture on this rank.

    Args:
        graphs: The attached graphs.
        flags: Flags of chunk graphs.
        record: The file that `save_run_record` wrote, or None.
    """
    slots = graphs.num_slots
    saved = (
        f"settings in {record}"
        if record is not None
        else "settings not saved (neither --save nor --run-dir is set)"
    )
    scope: str = graphs.scope.scope
    if graphs.scope.why_block:
        scope += f" (no whole chunk with {graphs.scope.why_block})"
    num_steps = flags.capture.num_warmup_steps
    steps = f"{num_steps} eager step{'s' if num_steps > 1 else ''}"
    return (
        f"chunk graphs: scope {scope}, {_slots(slots, are_shared=False)} on rank 0 "
        f"({_num_graphs(graphs)} graphs), verify {flags.capture.verify}; "
        f"capture after {steps}; {saved}"
    )


def capture_line(report: CaptureReport, expert_dispatch: str = "", rank: int = 0) -> str:
    """Return a line about the finished capture on this rank.

    Args:
        report: The report of the capture.
        expert_dispatch: See `MegatronChunkGraphs.expert_dispatch`.
        rank: This rank.
    """
    total = report.slot_bytes + report.scratch_bytes + report.static_bytes
    slots = _slots(report.num_slots, report.shared_slots)
    return (
        f"chunk graphs: captured {report.num_graphs} graphs, {slots} on rank {rank}, "
        f"in {report.duration_ms / 1e3:.2f} s; {format_bytes(total)}: slots "
        f"{format_bytes(report.slot_bytes)}, scratch {format_bytes(report.scratch_bytes)}, static "
        f"{format_bytes(report.static_bytes)}"
        + (f"; experts: {expert_dispatch}" if expert_dispatch else "")
        + (f"; memset nodes were kept: {report.memsets_kept}" if report.memsets_kept else "")
    )


def save_run_record(
    graphs: MegatronChunkGraphs,
    flags: GraphFlags,
    args: argparse.Namespace,
    run_dir: Path | None,
) -> Path | None:
    """Write the resolved settings into ``run_dir``, or Megatron's ``--save`` folder.

    Args:
        graphs: The attached graphs.
        flags: Flags of chunk graphs.
        args: Megatron's arguments, validated and completed by it.
        run_dir: The folder; None for Megatron's ``--save`` folder.

    Returns:
        The file, or None if the run has neither folder.

    Raises:
        ConfigError: The folder cannot be written.
    """
    save = getattr(args, "save", None)
    folder = run_dir or (Path(save) if save else None)
    if folder is None:
        return None
    settings = flags.as_dict()
    model = (*_MODEL, *(_EXPERTS if getattr(args, "num_experts", None) else ()))
    record: dict[str, Any] = {
        "chunkgraph": __version__,
        "versions": versions(),
        "command": list(sys.argv),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "model": {name: _plain(getattr(args, name, None)) for name in model},
        **settings,
        "pipeline": {
            **{name: _plain(getattr(args, name, None)) for name in _PIPELINE},
            **settings["pipeline"],
        },
        "cuda_graph_granularity": "chunk",
        "packing": {**settings["packing"], **_resolved_packing(graphs.site.packing)},
        "capture": {**settings["capture"], "scope": graphs.scope.scope},
        "graphs_of_rank_0": _graphs(graphs),
    }
    path = folder / RECORD_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        partial.write_text(yaml.safe_dump(record, sort_keys=False), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from None
    return path


def _resolved_packing(banks: PackedBanks | None) -> dict[str, Any]:
    """Return the settings whose defaults the banks have resolved."""
    if banks is None:
        return {}
    shape, limits = banks.largest_shape, banks.limits
    return {
        "max_packed_tokens": limits.max_tokens_per_rank if limits else shape.max_packed_tokens,
        "seq_buckets": sorted(banks.seq_counts)[:-1],
    }


def _graphs(graphs: MegatronChunkGraphs) -> dict[str, Any]:
    """Return the graphs of this rank, with packed shapes and context-parallel sizes if any."""
    record: dict[str, Any] = {
        "slots_per_chunk": list(graphs.num_slots),
        "num_graphs": _num_graphs(graphs),
    }
    if graphs.packed_shapes:
        record["packed_shapes"] = [
            {"max_packed_seqs": one.max_packed_seqs, "max_packed_tokens": one.max_packed_tokens}
            for one in graphs.packed_shapes
        ]
    if graphs.context_banks:
        record["context_banks"] = [
            {
                "context_parallel_size": key.size,
                "tokens_per_rank": key.num_tokens,
                "max_packed_seqs": key.shape.max_packed_seqs,
            }
            for key in graphs.context_banks
        ]
    return record


def _num_graphs(graphs: MegatronChunkGraphs) -> int:
    return 2 * sum(graphs.num_slots) * graphs.num_banks


def _plain(value: Any) -> Any:
    """Convert a value to types that YAML supports."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _slots(num_slots: tuple[int, ...], are_shared: bool) -> str:
    if are_shared and len(num_slots) > 1:
        count = num_slots[0]
        return f"{count} slot{'s' if count > 1 else ''} shared by {len(num_slots)} chunks"
    counts = " + ".join(str(n) for n in num_slots)
    return f"{counts} slot{'s' if num_slots != (1,) else ''}"
