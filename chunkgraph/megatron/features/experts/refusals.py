"""Rules for mixture-of-experts settings of Megatron that chunk graphs do not support.

A graph needs shapes that are known before the tokens: a fixed, padded capacity of every expert with
a dispatcher that then reads nothing from the device, or a budget of rows for every rank. The rules
of these two are in the section ``moe``.
"""

from __future__ import annotations

from collections.abc import Callable

from chunkgraph.megatron.rules.experts import EXPERT_RULES, uses_dropless
from chunkgraph.megatron.rules.hybrid_ep import ALL_TO_ALL
from chunkgraph.settings.rule import Facts, Rule

__all__ = ["IDLE_RULES", "MOE_RULES", "PADDED_ROWS_RULES"]

_STATIC_DISPATCHERS = ("alltoall", "allgather")
_ROWS = "it changes how many rows an expert gets"


def _rule(text: str, when: Callable[[Facts], object] | None = None) -> Rule:
    """Return a rule for models with experts; by default it applies if the first setting is on."""
    name = text.split(maxsplit=1)[0].removesuffix(":")
    is_on = when or (lambda f: getattr(f, name))
    return Rule(text, lambda f: f.num_moe_experts and is_on(f))


def _balances_by(kind: str) -> Callable[[Facts], bool]:
    def is_kind(f: Facts) -> bool:
        kinds = f.moe_router_load_balancing_type
        return kind in (kinds if isinstance(kinds, (list, tuple)) else [kinds])

    return is_kind


MOE_RULES = (
    _rule("moe_use_legacy_grouped_gemm: its kernels read the token counts on the host"),
    _rule(f"moe_router_padding_for_quantization: {_ROWS}"),
    _rule(f"moe_router_padding_for_fp8: {_ROWS}"),
    _rule("moe_enable_routing_replay: it replays Python state"),
    _rule(
        "moe_router_force_biased: it keeps random numbers drawn in the first forward",
        lambda f: f.moe_router_force_biased is not None,
    ),
    _rule(
        "moe_paged_stash: the order of its pages is Python state, frozen in a replay; {stash=} has "
        "the same purpose"
    ),
    _rule(f"moe_enable_deepep: the rows of a rank depend on the tokens; {ALL_TO_ALL}"),
    _rule(
        f"moe_token_dispatcher_type: unknown; {ALL_TO_ALL}",
        lambda f: f.moe_token_dispatcher_type not in (*_STATIC_DISPATCHERS, "flex"),
    ),
    _rule(
        "moe_permute_fusion moe_token_dispatcher_type: it reads the token counts on the host; "
        "turn the fusion off, or use {moe_token_dispatcher_type=alltoall}",
        lambda f: (
            f.moe_permute_fusion
            and f.moe_token_dispatcher_type == "allgather"
            and not uses_dropless(f)
        ),
    ),
    _rule(
        "moe_router_load_balancing_type: sinkhorn iterates until a value that it reads on the "
        "host is small; a graph has a fixed number of rounds, and only steps of experts that take "
        "all tokens run again if it is too small; leave out the capacity and the flexible "
        "dispatcher",
        lambda f: _balances_by("sinkhorn")(f) and not uses_dropless(f),
    ),
    *EXPERT_RULES,
)


def _padded(text: str, when: Callable[[Facts], object] | None = None) -> Rule:
    """Return a rule for models with experts whose rows may contain no token."""
    setting, _, why = text.partition(": ")
    is_on = when or (lambda f: getattr(f, setting))
    return _rule(f"{setting} packed: {why}", lambda f: f.pads_rows and is_on(f))


PADDED_ROWS_RULES = (
    _padded("moe_router_fusion: its kernel of the losses needs the number of tokens on the host"),
    _padded(
        "moe_permute_fusion: its kernel fills every expert's room from the map of tokens alone, "
        "which leaves out padding; turn the fusion off"
    ),
    _padded(
        "moe_router_load_balancing_type: sinkhorn does not support padding",
        _balances_by("sinkhorn"),
    ),
    _padded(
        "moe_router_load_balancing_type: quantile_balancing does not support padding",
        _balances_by("quantile_balancing"),
    ),
)
"""Rules for packed sequences in rows that may contain no token."""


IDLE_RULES = (
    Rule(
        "moe_router_enable_expert_bias moe_pad_expert_input_to_capacity: Megatron counts the rows "
        "of each expert after padding, when all experts have the same number, so the bias never "
        "changes and balances nothing; balance with {moe_aux_loss_coeff=}",
        lambda f: (
            f.num_moe_experts
            and f.moe_router_enable_expert_bias
            and f.moe_pad_expert_input_to_capacity
        ),
    ),
)
"""Settings that have no effect in Megatron with a fixed capacity, in a graph or not."""
