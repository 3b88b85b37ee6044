"""Chunk graphs in NeMo-RL's Megatron policy worker; see docs/rl.md."""

from __future__ import annotations

from importlib import import_module

from chunkgraph.engine import CaptureOptions
from chunkgraph.integrations.attached import AttachedModels, Keywords, Packing, drawn, refuse

_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"


def install(packing: Packing, options: CaptureOptions | None = None) -> AttachedModels:
    """Let the policy worker of this process replay graphs, which sleep from a refit on.

    Args:
        packing: See `attach`. Rows hold the longest pack with its padding.
        options: See `AttachedModels`.
    """
    steps = import_module("nemo_rl.models.megatron.train")
    offload = import_module(_WORKER).MegatronPolicyWorkerImpl, "offload_before_refit"
    return AttachedModels(steps, offload, _with_packings, packing, options)


def _with_packings(keywords: Keywords) -> Keywords:
    """Read the offsets of a step's microbatches; refuse what no graph can hold."""
    batches, keywords = drawn(keywords)
    params = [batch.packed_seq_params for batch in batches]
    step = keywords["forward_step_func"].keywords
    refuse(
        "NeMo-RL",
        {
            "policy.sequence_packing.enabled=false": None in params,
            "router replay": step.get("use_router_replay", False),
        },
    )
    return {**keywords, "packings": [p.cu_seqlens_q_padded.diff().tolist() for p in params]}
