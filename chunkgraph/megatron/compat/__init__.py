"""Every private name of Megatron-core that chunkgraph touches, and every patch, in one place.

Features are detected, never versions: each helper looks for the name it needs and says clearly
what is missing when a release has moved it. Nothing here imports Megatron at import time, so that
:mod:`chunkgraph.megatron.cpu_host` can prepare a machine without CUDA or triton first.
"""

from __future__ import annotations

from chunkgraph.megatron.compat.access import (
    import_megatron,
    patch_attributes,
    private_names,
    refuse_other_releases,
    versions,
    watch_results,
)
from chunkgraph.megatron.compat.attention_choice import same_attention
from chunkgraph.megatron.compat.backward_pass import is_in_backward
from chunkgraph.megatron.compat.capture import capture_flag, global_buffers
from chunkgraph.megatron.compat.context_attention import (
    is_latent_attention,
    let_latent_attention_turn,
    make_attention_stream,
)
from chunkgraph.megatron.compat.context_routing import follow_in_router
from chunkgraph.megatron.compat.data_iterators import look_ahead, num_microbatches_at
from chunkgraph.megatron.compat.data_parallel import (
    DDP_MODULE,
    call_parameter_gather_hooks,
    gathers_parameters,
    gradient_marker,
    is_fully_sharded,
    unwrap_ddp,
)
from chunkgraph.megatron.compat.expert_counts import LOAD_OF
from chunkgraph.megatron.compat.expert_room import factor_for_all, set_capacity_factor
from chunkgraph.megatron.compat.expert_rows import moe_layers_of, watch_expert_rows
from chunkgraph.megatron.compat.fp8 import Fp8State, fp8_is_installed, fp8_recipe, reset_fp8
from chunkgraph.megatron.compat.fused_operations import fused_operations_anew
from chunkgraph.megatron.compat.gloo import share_gloo_device
from chunkgraph.megatron.compat.hybrid import (
    can_recompute_hybrid_layers,
    has_mamba_kernels,
    hybrid_names,
    is_hybrid_model,
    is_stack,
    local_stack,
    mamba_mixers_of,
    packed_mamba_rows,
    room_behind,
    with_room,
)
from chunkgraph.megatron.compat.mamba_padding import clear_mamba_padding, rows_behind_documents
from chunkgraph.megatron.compat.moe_dispatch import patch_router, static_dispatch
from chunkgraph.megatron.compat.moe_padding import PaddedRouting, kept_of_tokens
from chunkgraph.megatron.compat.moe_state import (
    ExpertState,
    forget_expert_metrics,
    routers_of,
    scale_expert_metrics,
    take_expert_metrics,
)
from chunkgraph.megatron.compat.p2p import (
    Direction,
    ReceiveBuffers,
    default_groups,
    is_pipelining_schedule,
    is_plain_communicator,
    make_communicator,
)
from chunkgraph.megatron.compat.packed_rope import forget_rope_rows, packed_rope, rope_rows
from chunkgraph.megatron.compat.padded_rows import PaddedRows
from chunkgraph.megatron.compat.parameter_gather import ParameterGates
from chunkgraph.megatron.compat.pretrain import (
    PretrainHooks,
    count_documents_on_cpu,
    patch_pretrain,
    pretrain_arguments,
    pretrain_hooks,
    tensorboard_writers,
)
from chunkgraph.megatron.compat.process_groups import before_groups_end
from chunkgraph.megatron.compat.random_state import (
    HostGenerator,
    RandomStates,
    graph_safe_generators,
    patch_rng,
    preserve_rng,
    rng_is_graph_safe,
    seed_model_parallel,
)
from chunkgraph.megatron.compat.rank_budget import (
    RankBudget,
    flex_backend,
    knows_rank_budget,
    rank_factor_for_all,
    uses_rank_budget,
)
from chunkgraph.megatron.compat.recompute import recomputing
from chunkgraph.megatron.compat.running_metrics import running_metrics
from chunkgraph.megatron.compat.token_drops import TokenDrops
from chunkgraph.megatron.compat.token_prediction import TokenPrediction
from chunkgraph.megatron.compat.triton_stub import TritonStubFinder
from chunkgraph.megatron.compat.worst_case_dispatch import use_worst_case_dispatch

__all__ = [
    "DDP_MODULE",
    "LOAD_OF",
    "Direction",
    "ExpertState",
    "Fp8State",
    "HostGenerator",
    "PaddedRouting",
    "PaddedRows",
    "ParameterGates",
    "PretrainHooks",
    "RandomStates",
    "RankBudget",
    "ReceiveBuffers",
    "TokenDrops",
    "TokenPrediction",
    "TritonStubFinder",
    "before_groups_end",
    "call_parameter_gather_hooks",
    "can_recompute_hybrid_layers",
    "capture_flag",
    "clear_mamba_padding",
    "count_documents_on_cpu",
    "default_groups",
    "factor_for_all",
    "flex_backend",
    "follow_in_router",
    "forget_expert_metrics",
    "forget_rope_rows",
    "fp8_is_installed",
    "fp8_recipe",
    "fused_operations_anew",
    "gathers_parameters",
    "global_buffers",
    "gradient_marker",
    "graph_safe_generators",
    "has_mamba_kernels",
    "hybrid_names",
    "import_megatron",
    "is_fully_sharded",
    "is_hybrid_model",
    "is_in_backward",
    "is_latent_attention",
    "is_pipelining_schedule",
    "is_plain_communicator",
    "is_stack",
    "kept_of_tokens",
    "knows_rank_budget",
    "let_latent_attention_turn",
    "local_stack",
    "look_ahead",
    "make_attention_stream",
    "make_communicator",
    "mamba_mixers_of",
    "moe_layers_of",
    "num_microbatches_at",
    "packed_mamba_rows",
    "packed_rope",
    "patch_attributes",
    "patch_pretrain",
    "patch_rng",
    "patch_router",
    "preserve_rng",
    "pretrain_arguments",
    "pretrain_hooks",
    "private_names",
    "rank_factor_for_all",
    "recomputing",
    "refuse_other_releases",
    "reset_fp8",
    "rng_is_graph_safe",
    "room_behind",
    "rope_rows",
    "routers_of",
    "rows_behind_documents",
    "running_metrics",
    "same_attention",
    "scale_expert_metrics",
    "seed_model_parallel",
    "set_capacity_factor",
    "share_gloo_device",
    "static_dispatch",
    "take_expert_metrics",
    "tensorboard_writers",
    "unwrap_ddp",
    "use_worst_case_dispatch",
    "uses_rank_budget",
    "versions",
    "watch_expert_rows",
    "watch_results",
    "with_room",
]
