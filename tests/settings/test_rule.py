"""Rules, and their messages for a file, a program and a command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.megatron.rules.features import FILE_RULES, STASH_RULES
from chunkgraph.settings import rules as file_rules
from chunkgraph.settings.rule import Facts, Rule, Words, check, recomputes, refusals
from chunkgraph.settings.words import FILE, FLAGS, PROGRAM, settings_by_fact

_STASHED = {"stash": True, "num_moe_experts": 4, "fp8": "e4m3"}


def _facts(words: Words, **values: Any) -> Facts:
    return Facts(values.get, words)


def test_a_feature_that_is_no_single_value_has_its_own_words() -> None:
    (refusal,) = refusals(STASH_RULES, _facts(PROGRAM, **_STASHED))
    assert refusal.startswith("stash=StashConfig(...) with fp8='e4m3': quantized tensors")
    assert refusals(STASH_RULES, _facts(PROGRAM, **{**_STASHED, "fp8": None})) == []


@pytest.mark.parametrize(
    ("words", "prefix"),
    [
        (
            FILE,
            "model.fp8 is null with model.recompute_modules=[mlp, moe]: use model.swiglu=true, ",
        ),
        (PROGRAM, "fp8=None with recompute_modules=['mlp', 'moe']: use gated_linear_unit=True, "),
        (FLAGS, "--recompute-modules mlp moe without --fp8-format: use --swiglu, "),
    ],
)
def test_a_text_names_settings_and_values(words: Words, prefix: str) -> None:
    text = "fp8 recompute_modules: use {swiglu=true}, {tokens} tokens"
    rule = Rule(text, lambda _: {"tokens": 7})
    facts = _facts(words, recompute_modules=("mlp", "moe"))
    assert rule.refusal(facts) == f"{prefix}7 tokens"


def test_a_rule_without_a_condition_is_of_settings_that_are_all_on() -> None:
    rule = Rule("fp8 num_moe_experts=: why")
    assert rule.refusal(_facts(FLAGS, fp8="hybrid")) == ""
    message = rule.refusal(_facts(FLAGS, fp8="hybrid", num_moe_experts=4))
    assert message == "--fp8-format hybrid with --num-experts: why"


def test_all_broken_rules_stand_in_one_message_of_the_special_kind() -> None:
    rules = (Rule("fp8: first"), Rule("swiglu: second", error=TopologyError))
    facts = _facts(FILE, fp8="hybrid", swiglu=True)
    with pytest.raises(TopologyError) as error:
        check(rules, facts, "no:")
    assert (
        str(error.value) == "no:\n  - model.fp8 is hybrid: first\n  - model.swiglu is true: second"
    )
    with pytest.raises(ConfigError, match=r"^model.fp8 is hybrid: first\.$"):
        check(rules[:1], facts, "no:")
    check(rules, _facts(FILE), "no:")


def test_recomputation_of_a_part() -> None:
    assert recomputes(_facts(FILE, recompute_granularity="full"), "moe")
    some = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    assert recomputes(_facts(FILE, **some), "mlp", "moe")
    assert not recomputes(_facts(FILE, **some), "mlp")
    assert not recomputes(_facts(FILE, recompute_modules=["moe"]), "moe")


def _names_read_by(rules: Iterable[Rule]) -> set[str]:
    """Return all names that rules read, for several values that every setting has in turn."""
    names: set[str] = set()
    for value in (None, 1, 1.0, "flex", "selective", ("moe",)):

        def value_of(name: str, value: Any = value) -> Any:
            names.add(name)
            return value

        for rule in rules:
            try:
                rule.refusal(Facts(value_of, FILE))
            except (
                TypeError,
                ValueError,
                AttributeError,
            ):  # the value has another type than the setting
                continue
    return names


def test_the_rules_of_a_file_ask_for_settings_that_there_are() -> None:
    known = set(settings_by_fact())
    others = {"bf16", "element_bytes", "is_attached", "on_gpu", "packed", "page_bytes"}
    # Of Megatron, derived from other settings or not in a file.
    megatrons = {
        *(
            "add_bias_linear",
            "attention_dropout",
            "hidden_dropout",
            "moe_layer_freq",
            "expert_tensor_parallel_size",
            "fp16",
            "fp4",
            "moe_grouped_gemm",
        ),
        *(
            "moe_flex_dispatcher_backend",
            "moe_latent_size",
            "moe_permute_fusion",
            "splits_backward",
        ),
        *("moe_pad_expert_input_to_capacity", "moe_permute_fusion_into_hybridep", "mtp_num_layers"),
        *("moe_router_dtype", "moe_router_fusion", "moe_shared_expert_overlap"),
        *("use_transformer_engine_op_fuser",),
    }
    names = _names_read_by((*file_rules._RULES, *FILE_RULES))
    assert names - known - others - megatrons == set()
    assert len(names & known) > 30


@pytest.mark.megatron
@pytest.mark.every_release
def test_the_rules_of_a_model_ask_for_fields_that_megatron_has() -> None:
    from dataclasses import fields

    from megatron.core.transformer import TransformerConfig

    from chunkgraph.megatron.features import FEATURES

    known = set(settings_by_fact())
    known |= {field.name for field in fields(TransformerConfig)}
    rules = [rule for kind in FEATURES for rule in kind.rules]
    facts = {
        *("bf16", "changes_size", "element_bytes", "has_transformer_engine", "is_attached"),
        "is_fully_sharded",
        *("is_rng_graph_safe", "num_model_chunks"),
        *("keeps_transposes", "on_gpu", "packed", "page_bytes", "pads_rows", "splits_backward"),
        *("ddp_at_once", "layers_at_once", "use_megatron_fsdp", "use_torch_fsdp2"),
    }
    # Of Megatron's DistributedDataParallelConfig.
    facts |= {"fsdp_double_buffer", "nccl_ub", "num_distributed_optimizer_instances"}
    # Fields of some releases of Megatron, or of some of its config classes.
    some = {
        *("fp8_param_gather", "fp4", "qk_layernorm"),
        *("expert_gtp_weight_remat_size", "gtp_weight_remat_size", "moe_paged_stash"),
        *("experimental_attention_variant", "moe_permute_fusion_into_hybridep", "moe_latent_size"),
        *("fine_grained_activation_offloading", "moe_enable_routing_replay"),
        *("moe_hybridep_pad_uneven_dispatch_inputs", "moe_router_force_biased"),
        "moe_router_padding_for_quantization",
        *("moe_use_legacy_grouped_gemm", "overlap_dispatch_backward_with_experts_wgrad"),
        *("cross_entropy_fusion_impl", "te_rng_tracker", "use_mamba_mem_eff_path"),
        "use_transformer_engine_op_fuser",
        *("num_microbatches_with_partial_activation_checkpoints", "quant_recipe", "use_kitchen"),
    }
    assert _names_read_by(rules) - known - facts - some == set()
