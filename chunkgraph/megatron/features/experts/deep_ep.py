"""Check where a captured DeepEP dispatch can run: ranks of one node, and the requirements."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.megatron.core.access import import_megatron, versions
from chunkgraph.megatron.features.experts.deep_ep_needs import BACKEND_NAMES, deep_ep_is_missing
from chunkgraph.megatron.features.experts.rank_budget import knows_rank_budget
from chunkgraph.megatron.rules.deep_ep import measures_budget
from chunkgraph.settings.rule import Facts

__all__ = ["expert_ranks", "ranks_of_other_nodes", "refuse_for_deep_ep"]


def refuse_for_deep_ep(facts: Facts) -> None:
    """Check the requirements of DeepEP beyond settings, if a model uses it.

    Args:
        facts: Facts of the model.

    Raises:
        ConfigError: Experts are on several nodes, but DeepEP dispatches within one.
        MissingDependencyError: The machine does not meet a requirement.
    """
    backend = facts.moe_flex_dispatcher_backend if facts.num_moe_experts else None
    if backend not in BACKEND_NAMES:
        return
    if backend == "deepep" and (ranks := expert_ranks()):
        here = dist.get_rank()
        if others := ranks_of_other_nodes(ranks, here, os.environ):
            raise ConfigError(
                f"rank {here}: experts are on the ranks {ranks}, of which {others} are on other "
                "nodes, but DeepEP dispatches in a graph only within a node. Lower "
                "expert_model_parallel_size, number the ranks so that those that share experts "
                "are on one node, or set moe_flex_dispatcher_backend to 'hybridep'."
            )
    if measures_budget(facts) and not knows_rank_budget():
        raise ConfigError(
            f"HybridEP of megatron-core {versions()['megatron_core']} does not report rows without "
            "room. Use 0.18 or later, or set moe_token_dispatcher_type to 'alltoall'."
        )
    if (missing := deep_ep_is_missing(facts)) is not None:
        raise MissingDependencyError(missing)


def expert_ranks() -> list[int]:
    """Return the ranks that share this rank's experts; empty without process groups."""
    state = import_megatron("megatron.core.parallel_state")
    if not (dist.is_initialized() and state.model_parallel_is_initialized()):
        return []
    return dist.get_process_group_ranks(state.get_expert_model_parallel_group())


def ranks_of_other_nodes(
    ranks: Sequence[int], rank: int, environment: Mapping[str, str]
) -> list[int]:
    """Return the ``ranks`` that were not started on the node of ``rank``.

    Args:
        ranks: Global ranks.
        rank: Global rank of this process.
        environment: LOCAL_RANK and LOCAL_WORLD_SIZE as set by torchrun, which numbers the ranks of
            a node consecutively; without them the result is empty.
    """
    local = [environment.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not all(number.isdecimal() for number in local):
        return []
    place, size = map(int, local)
    first = rank - place
    return [r for r in ranks if not first <= r < first + size]
