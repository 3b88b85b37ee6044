"""Chunk graphs in NeMo-RL's Megatron policy worker.

A worker of your own, named by ``Policy(worker_extension_cls_fqn=...)``::

    from chunkgraph.integrations import nemo_rl
    from chunkgraph.megatron import PackingOptions
    from chunkgraph.packing import PackedShape

    nemo_rl.install(PackingOptions(PackedShape(64, 8192), buckets=[0.25, 0.5]))

    @ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
    class GraphedWorker(MegatronPolicyWorkerImpl):
        pass
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chunkgraph.errors import ConfigError
from chunkgraph.integrations.attached import AttachedModels, Keywords, call_before, drawn

if TYPE_CHECKING:
    from chunkgraph.engine import CaptureOptions
    from chunkgraph.megatron.features.packing.bank import PackingOptions
    from chunkgraph.packing import PackedShape

_STEPS = "nemo_rl.models.megatron.train"
_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"


def install(
    packing: PackedShape | PackingOptions, options: CaptureOptions | None = None
) -> AttachedModels:
    """Let the policy worker of this process replay graphs, which sleep from a refit on.

    Args:
        packing: See `attach`. Rows hold the longest pack with its padding.
        options: See `AttachedModels`.

    Returns:
        The graphs of the policy, by its model.
    """
    models = AttachedModels(import_module(_STEPS), _with_packings, packing, options)

    def sleep(*_: Any) -> None:
        models.sleep()

    call_before(import_module(_WORKER).MegatronPolicyWorkerImpl, "offload_before_refit", sleep)
    return models


def _with_packings(keywords: Keywords) -> Keywords:
    """Read the offsets of a step's microbatches, which the worker has packed.

    Raises:
        ConfigError: A microbatch is not packed.
    """
    batches, keywords = drawn(keywords)
    packings = []
    for number, batch in enumerate(batches):
        if batch.packed_seq_params is None:
            raise ConfigError(
                f"Microbatch {number} is not packed, and chunk graphs in NeMo-RL need packed "
                "sequences. Set policy.sequence_packing.enabled=true, or leave install() out."
            )
        packings.append(batch.packed_seq_params.cu_seqlens_q_padded.diff().tolist())
    return {**keywords, "packings": packings}
