"""Refusals of Megatron's command line list all problems at once, in the names of its flags."""

from __future__ import annotations

import re
from typing import Any

import pytest
from launch_arguments import megatron_parser
from training_needs import NEEDS_TRAINING

from chunkgraph.errors import ConfigError
from chunkgraph.launch.arguments import refuse_changed_arguments, settle_arguments
from chunkgraph.megatron.cpu.pretrain import cpu_flags
from chunkgraph.settings import Config, settings_of

pytestmark = [pytest.mark.megatron, NEEDS_TRAINING]

CHUNK = "--cuda-graph-granularity chunk --transformer-impl local "
GROUPED = "--num-experts 8 --bf16 --moe-grouped-gemm "
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0 "
WHOLE = "--cuda-graph-chunk-scope chunk "
EXPERTS = "--num-experts 8 --moe-token-dispatcher-type "


def refusal(arguments: str, *, on_cpu: bool = True) -> str:
    """Return the refusal of these flags."""
    args = megatron_parser().parse_args(f"{CHUNK}{arguments}".split())
    with pytest.raises(ConfigError) as error:
        settle_arguments(args, on_cpu=on_cpu)
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--use-megatron-fsdp",
            "--use-megatron-fsdp: fused kernels would add gradients to buffers that move",
        ),
        (
            "--use-megatron-fsdp --fsdp-double-buffer",
            "--use-megatron-fsdp with --fsdp-double-buffer: its pool",
        ),
        (
            "--overlap-moe-expert-parallel-comm",  # tied embeddings, fused accumulation
            "--overlap-moe-expert-parallel-comm: graphs train without it",
        ),
        (
            f"{NO_DROPOUT}{EXPERTS}alltoall --recompute-granularity full --moe-input-jitter-eps .1",
            "  - --recompute-granularity full with --moe-input-jitter-eps 0.1 ",
        ),
        ("--moe-routing-trace-path traces", "--moe-routing-trace-path: its hooks run in"),
        (f"{WHOLE}--defer-embedding-wgrad-compute", "chunk with --defer-embedding-wgrad-compute: "),
        (
            f"{NO_DROPOUT}{GROUPED}--fp8-format hybrid",
            "this recipe; use --fp8-recipe tensorwise or --fp8-recipe blockwise, or use --moe-",
        ),
    ],
)
def test_what_the_arguments_can_tell_is_refused_before_the_model_is_built(
    arguments: str, message: str
) -> None:
    assert message in refusal(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            f"{NO_DROPOUT}--recompute-granularity full",
            "would read the random state in a capture; use --te-rng-tracker",
        ),
        (f"{NO_DROPOUT}--num-experts 8", "  - without --bf16 or --moe-expert-capacity-factor"),
    ],
)
def test_what_a_gpu_cannot_capture_is_refused_before_the_model_is_built(
    arguments: str, message: str
) -> None:
    assert message in refusal(arguments, on_cpu=False)
    args = megatron_parser().parse_args(f"{CHUNK}{arguments}".split())
    assert settle_arguments(args, on_cpu=True) is not None


def test_all_problems_stand_in_one_message() -> None:
    message = refusal("--num-experts 8 --moe-enable-routing-replay --qk-clip")
    assert message.count("\n  - ") == 2
    for start in ("--qk-clip: ", "--moe-enable-routing-replay: "):
        assert f"\n  - {start}" in message


def test_arguments_that_the_script_changes_later_are_looked_at_again() -> None:
    """Megatron's `maybe_enable_modelopt` changes arguments after parsing."""
    args = megatron_parser().parse_args(CHUNK.split())
    assert settle_arguments(args, on_cpu=True) is not None
    refuse_changed_arguments(args)
    args.modelopt_enabled = True
    with pytest.raises(ConfigError, match="--modelopt-enabled: its distillation schedules"):
        refuse_changed_arguments(args)


@pytest.mark.parametrize(
    "arguments",
    [
        (
            "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --fp8-param-gather "
            "--test-mode --qk-layernorm --distribute-saved-activations "
            "--fine-grained-activation-offloading --hybrid-context-parallel "
            "--experimental-attention-variant dsa"
        ),
        (
            f"{EXPERTS}alltoall --moe-expert-capacity-factor 100 "
            "--moe-pad-expert-input-to-capacity --moe-router-load-balancing-type sinkhorn "
            "--moe-shared-expert-overlap --expert-model-parallel-size 3 "
            "--use-transformer-engine-op-fuser --moe-router-fusion "
            "--moe-enable-deepep --moe-router-padding-for-quantization --moe-router-force-biased 1"
        ),
        (
            f"{EXPERTS}flex --moe-flex-dispatcher-backend hybridep --moe-latent-size 8 "
            "--moe-expert-capacity-factor 2 --moe-permute-fusion-into-hybridep "
            "--moe-pad-expert-input-to-capacity --fp8-format hybrid "
            "--expert-tensor-parallel-size 2 --recompute-granularity selective "
            "--recompute-modules moe_act"
        ),
        (
            f"{EXPERTS}alltoall --moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity "
            "--cuda-graph-stash true --recompute-granularity selective --recompute-modules moe "
            "--cuda-graph-token-drops rerun --fp8-format hybrid --moe-router-fusion "
            "--hidden-size 64"
        ),
        (
            f"{EXPERTS}alltoall --sft --cuda-graph-max-packed-seqs 4 --cuda-graph-cp-sizes 1 2 "
            "--seq-length 18 --moe-router-load-balancing-type quantile_balancing"
        ),
        (
            "--use-transformer-engine-op-fuser --fp8-format hybrid --fp8-recipe mxfp8 "
            "--recompute-granularity full"
        ),
        (
            "--fp4-format e2m1 --use-megatron-fsdp --yaml-cfg x --optimizer-cuda-graph "
            "--cuda-graph-chunk-scope block"
        ),
    ],
)
def test_refusals_speak_in_flags_that_can_be_typed(arguments: str) -> None:
    message = refusal(arguments, on_cpu=False)
    assert message.count("\n  - ") >= 1
    flags = set(re.findall(r"(?<![\w-])--[\w-]+", message))
    assert flags - set(megatron_parser()._option_string_actions) == set()
    assert re.findall(r"=(?:True|False|None|')|with without", message) == []
    assert not [line for line in message.splitlines()[1:] if not line.startswith("  ")]
    dests = {action.dest for action in megatron_parser()._actions if "_" in action.dest}
    settings = {item.name for item in settings_of(Config) if "_" in item.name}
    settings |= {"gated_linear_unit", "fp8_param", "params_dtype"}
    assert (dests | settings) & set(re.findall(r"(?<![\w-])\w+", message)) == set()


def test_flags_that_change_no_result_are_turned_off_and_named() -> None:
    names = ("fine-grained-activation-offloading", "delay-wgrad-compute")
    flags = " ".join(f"--{name}" for name in names)
    untied = "--untie-embeddings-and-output-weights --pipeline-model-parallel-size 2"
    transfers = "--overlap-moe-expert-parallel-comm"
    args = megatron_parser().parse_args(f"{CHUNK}{flags} {untied} {transfers}".split())
    settled = settle_arguments(args, on_cpu=True)
    assert settled is not None
    assert not args.fine_grained_activation_offloading
    assert not args.delay_wgrad_compute
    for line, name in zip(settled.turned_off, names, strict=True):
        assert line.startswith(f"chunk graphs: training runs without --{name}, with the same")
    assert "--cuda-graph-max-slot-memory moves them to the host" in settled.turned_off[0]
    assert "--delay-wgrad-compute: weight" in refusal(f"{flags} {untied}")
    plain = megatron_parser().parse_args(
        f"--cuda-graph-granularity layer {flags} {transfers}".split()
    )
    assert settle_arguments(plain, on_cpu=True) is None
    assert plain.fine_grained_activation_offloading
    assert plain.delay_wgrad_compute


@pytest.mark.parametrize("strategy", [[], ["--async-strategy", "mcore"]])
def test_a_checkpoint_worker_that_needs_a_gpu_is_refused_on_a_cpu(strategy: Any) -> None:
    """It would fail on a division by the number of GPUs, and its rank would wait for ever."""
    both = ["--async-save", "--use-persistent-ckpt-worker", *strategy]
    with pytest.raises(ConfigError, match=r"--use-persistent-ckpt-worker .* needs a GPU"):
        cpu_flags(both)
    cpu_flags(["--async-save", *strategy])
    cpu_flags(["--use-persistent-ckpt-worker", *strategy])
