"""The rules of features that need few of them, from a file, a program or a command line.

They import no torch, so that a command checks a file before it starts a process.
"""

from __future__ import annotations

from collections.abc import Callable

from chunkgraph.errors import TopologyError
from chunkgraph.megatron.rules.experts import EXPERT_RULES
from chunkgraph.schedules import FILE_SUFFIX, Placement, get_family, list_schedules
from chunkgraph.settings.rule import Facts, Rule, recomputes


def _is_named(f: Facts) -> bool:
    name = f.schedule
    return name not in (None, "auto") and not name.endswith(FILE_SUFFIX)


def _is_unknown(f: Facts) -> object:
    known = list_schedules()
    return _is_named(f) and f.schedule not in known and {"known": ", ".join(known)}


def _is_in_v(f: Facts) -> bool:
    known = _is_named(f) and f.schedule in list_schedules()
    return known and get_family(f.schedule).placement is not Placement.LOOP


SCHEDULE_RULES = (
    Rule(
        "schedule: there is no such schedule; use auto, a CSV file of actions, or one of {known}",
        _is_unknown,
    ),
    Rule(
        "schedule: it places stages in a V, but Megatron's pipelines are loops (rank r holds the "
        "stages r, r + size, ...); use zb-h1 or interleaved-zb",
        _is_in_v,
    ),
)
"""Rules of a schedule's name, from a file, a program or a command line."""
SLOT_RULES = (
    Rule(
        "schedule: it holds every microbatch of a step at once, and chunk graphs have slots for a "
        "fixed number; use 1f1b or zb-h1, or train without graphs",
        lambda f: (
            f.captures is not False  # None outside of a configuration file: graphs are on
            and _is_named(f)
            and f.schedule in list_schedules()
            and not get_family(f.schedule).is_bounded
        ),
    ),
)
"""Rules of a schedule that drives chunk graphs."""


def _recomputes_scales(f: Facts) -> bool:
    parts = set(f.recompute_modules or ()) - {"core_attn"}
    how = f.recompute_granularity
    return bool(f.fp8_recipe) and (how == "full" or (how == "selective" and bool(parts)))


FP8_RULES = (
    Rule(
        "recompute_granularity fp8: Transformer Engine's recomputation keeps the scales of the "
        "first pass in a Python queue, which a replay does not advance; recompute only core_attn "
        "({recompute_granularity=selective}), or nothing",
        _recomputes_scales,
    ),
)
"""Rules of a model in FP8."""
RECOMPUTE_RULES = (
    Rule(
        "recompute_granularity hidden_dropout attention_dropout: a replay cannot repeat the "
        "dropout masks of what is recomputed; set the dropout to 0, or recompute parts of a layer "
        "without dropout",
        lambda f: (
            (f.hidden_dropout and f.recompute_granularity == "full")
            or (f.attention_dropout and recomputes(f, "core_attn"))
        ),
    ),
)
"""Rules of a model whose activations are recomputed."""


_UNTRIED = "fused kernels are not supported with marked padding"
STASH_RULES = (
    Rule(
        "stash num_moe_experts: only experts stash; leave it out",
        lambda f: f.stash and not f.num_moe_experts,
    ),
    Rule(
        "stash recompute_granularity recompute_modules: the activations of experts are recomputed "
        "instead of saved; use one of them",
        lambda f: f.stash and recomputes(f, "moe", "moe_act"),
    ),
    Rule("stash fp8: quantized tensors are not stashed; use one of them"),
    Rule("stash max_slot_memory: pages of the stash belong to a slot; use one of them"),
    Rule(f"stash moe_permute_fusion: {_UNTRIED}; use one of them"),
    Rule(f"stash moe_router_fusion: {_UNTRIED}; use one of them"),
)
"""Rules of saved activations of experts in pages."""


CONTEXT_RULES = (
    Rule(
        "context_parallel_sizes context_parallel_size: the groups are formed from the "
        "data-parallel ranks; use {context_parallel_size=1}",
        lambda f: f.context_parallel_sizes and (f.context_parallel_size or 1) > 1,
    ),
    Rule(
        "context_parallel_sizes fp8: scales of ranks whose microbatches have several sizes are not "
        "supported; use one of them"
    ),
    Rule(
        "context_parallel_sizes mtp_num_layers: multi-token prediction sees only the rows on its "
        "rank; use one of them"
    ),
    Rule(
        "context_parallel_sizes hybrid_layer_pattern: a Mamba mixer splits its heads over the "
        "ranks that it was built for; use one of them"
    ),
    Rule(
        "context_parallel_sizes recompute_modules: moe and mla_up_proj would be recomputed with "
        "the context-parallel group of another microbatch; leave them out",
        lambda f: (
            f.context_parallel_sizes
            and f.recompute_granularity == "selective"
            and not {"moe", "mla_up_proj"}.isdisjoint(f.recompute_modules or ())
        ),
    ),
)
"""Rules of microbatches that have a context-parallel size each."""
BUCKETS_RULE = Rule(
    "context_parallel_sizes buckets: the training loop does not support several lengths with "
    "several sizes; use one of them"
)
HYBRID_RULES = (
    Rule("fp8 hybrid_layer_pattern: the two are not supported together; use one of them"),
)
"""Rules of a hybrid model, from a file, a program or a command line."""


def _packed(text: str, when: Callable[[Facts], object]) -> Rule:
    """Return a rule that applies only to packed documents."""
    return Rule(text, lambda f: f.packed and when(f))


def _idle(name: str) -> Rule:
    return Rule(
        f"{name} max_packed_seqs: packing is off; leave the former out, or set the latter",
        lambda f: not f.max_packed_seqs and getattr(f, name),
    )


IDLE_RULES = tuple(
    map(_idle, ("max_packed_tokens", "buckets", "seq_buckets", "context_parallel_sizes"))
)
"""Rules of settings that have no effect without packed sequences."""


def _other_length(f: Facts) -> object:
    pattern = f.hybrid_layer_pattern
    if pattern is None:
        return False
    count = len(pattern.replace("|", ""))
    return count != f.num_layers and {"count": count}


def _other_stages(f: Facts) -> object:
    pattern = f.hybrid_layer_pattern
    if pattern is None:
        return False
    parts, num_chunks = pattern.split("|"), f.virtual_pipeline_model_parallel_size or 1
    num_stages = f.pipeline_model_parallel_size * num_chunks
    is_marked = len(parts) == num_stages and all(parts)
    is_equal = len(parts) == num_chunks == 1 and f.num_layers % num_stages == 0
    return not (is_marked or is_equal) and {"parts": len(parts), "stages": num_stages}


def _other_experts(f: Facts) -> object:
    pattern = f.hybrid_layer_pattern
    return pattern is not None and ("E" in pattern) != (f.num_moe_experts is not None)


FILE_RULES = (
    *SCHEDULE_RULES,
    *SLOT_RULES,
    *FP8_RULES,
    *RECOMPUTE_RULES,
    *CONTEXT_RULES,
    *EXPERT_RULES,
    *HYBRID_RULES,
    *STASH_RULES,
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
        lambda f: f.fp8 and (f.layer_spec == "local" or f.device == "cpu"),
    ),
    Rule(
        "moe_layer_freq hybrid_layer_pattern: the pattern decides which layers have experts; leave "
        "the former out"
    ),
    Rule(
        "max_packed_seqs: one sequence takes the remaining rows; use 2 or more, or 0 for no packed "
        "sequences",
        lambda f: f.max_packed_seqs not in (None, 0) and f.max_packed_seqs < 2,
    ),
    *IDLE_RULES,
    _packed(
        "micro_batch_size max_packed_seqs: a packed microbatch is one row of documents; use "
        "{micro_batch_size=1} and a larger {max_packed_tokens=}",
        lambda f: f.micro_batch_size != 1,
    ),
    _packed(
        "layer_spec device max_packed_seqs: Megatron's local attention does not support packed "
        "sequences; use {layer_spec=transformer_engine} on a GPU, or your own layer spec "
        "(package.module:function) with an attention that does",
        lambda f: f.layer_spec == "local" or (f.layer_spec, f.device) == ("auto", "cpu"),
    ),
    BUCKETS_RULE,
    Rule(
        "num_layers hybrid_layer_pattern: the pattern has {count} layers, and {num_layers=} counts "
        "layers of every kind; use {count}",
        _other_length,
    ),
    Rule(
        "hybrid_layer_pattern pipeline_model_parallel_size: stages of the pattern: {parts}, of "
        "the pipeline: {stages}; separate as many stages by |, each with a layer, or use no | "
        "for equal stages of one model chunk a rank",
        _other_stages,
        TopologyError,
    ),
    Rule(
        "hybrid_layer_pattern num_moe_experts: E stands for a layer with experts; set both or none",
        _other_experts,
    ),
)
"""Rules of features that a configuration file can turn on."""
