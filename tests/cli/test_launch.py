"""``chunkgraph launch`` until it starts processes."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import pytest
from launch_flags import merged

from chunkgraph.cli.__main__ import main
from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import FLAGS, GraphFlags, add_flags, parse_options, read_flags
from chunkgraph.settings import CaptureConfig, load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain.py"
    path.write_text("raise SystemExit(0)\n", encoding="utf-8")
    return path


def test_help_fits_on_two_screens_and_names_every_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main(["launch", "--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 80
    text = "\n".join(lines)
    for item in FLAGS:
        choices = ("false", "true") if item.kind is bool else item.choices
        assert item.flag in text
        assert ",".join(choices) in text


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (["--nproc-per-node", "0"], [], "--nproc-per-node 0: there must be at least one process"),
        (["--nproc-per-node", "1000000"], [], "the run needs 1000000 GPUs, one for each rank"),
        (["--device", "cpu", "--nproc-per-node", "1000000"], [], "1000000 processes are too many"),
        (
            [],
            ["--cuda-graph-granularity", "chnk"],
            "pretrain.py: argument --cuda-graph-granularity: inv",
        ),
        ([], ["--cuda-graph-verify=all"], "-verify: invalid choice: 'all' (choose from "),
        ([], ["--cuda-graph-on-failure"], "--cuda-graph-on-failure: expected one argument."),
        ([], ["--cuda-graph-max-packed-tokens", "many"], "invalid int value: 'many'"),
        (["--config", "nowhere.yaml"], [], "nowhere.yaml"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    before: list[str],
    after: list[str],
    message: str,
    script: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["launch", *before, str(script), *after]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_script_is_an_error_that_names_where_flags_belong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", str(tmp_path / "none.py"), "--num-layers", "2"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["launch", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_a_configuration_becomes_flags(script: Path) -> None:
    path = CONFIGS / "cpu" / "gpt_pp2_vpp2_cpu.yaml"
    options = parse_options(["--config", str(path), str(script), "--train-iters", "3"], "launch")
    config = load_config(path)
    flags = list(options.script_args)
    assert options.nproc_per_node == config.pipeline.world_size
    assert flags[-3:] == ["--chunkgraph", "--train-iters", "3"]
    for name, value in {
        "--num-layers": config.model.num_layers,
        "--pipeline-model-parallel-size": 2,
        "--num-virtual-stages-per-pipeline-rank": 2,
        "--cuda-graph-warmup-steps": config.capture.num_warmup_steps,
    }.items():
        assert flags[flags.index(name) + 1] == str(value)


def test_the_command_line_wins() -> None:
    """As the last value of a flag; a rival of a flag, which Megatron refuses next to it, alone."""
    config = load_config(CONFIGS / "cpu" / "gpt_pp2_vpp2_cpu.yaml")
    overrides = ["--num-layers=64", "--num-layers-per-virtual-pipeline-stage=1"]
    flags = merged(config, overrides)
    assert flags[-len(overrides) :] == overrides
    assert "--num-layers" in flags
    assert "--num-virtual-stages-per-pipeline-rank" not in flags


def test_experts_become_flags() -> None:
    config = load_config(CONFIGS / "gpu" / "moe_pp2_ep2.yaml")
    flags = merged(config)
    values = dict(itertools.pairwise(flags))
    assert values["--num-experts"] == "64"
    assert values["--expert-model-parallel-size"] == "2"
    assert values["--moe-layer-freq"] == "[0,1,1,1,1,1,1,1]"
    assert values["--moe-expert-capacity-factor"] == "2.0"
    assert values["--moe-pad-expert-input-to-capacity"].startswith("--")  # no value
    assert "--moe-z-loss-coeff" not in flags
    assert values["--cuda-graph-token-drops"] == "count"
    dense = merged(load_config(CONFIGS / "cpu" / "gpt_pp2_cpu.yaml"))
    assert not [flag for flag in dense if "moe" in flag or "expert" in flag or "drops" in flag]


def test_tensor_parallel_ranks_hold_experts_whole_as_in_train() -> None:
    shared = ["pipeline.tensor_model_parallel_size=2", "pipeline.sequence_parallel=true"]
    for changes, size in (([], None), (shared, "1")):
        flags = merged(load_config(CONFIGS / "gpu" / "moe_pp2_ep2.yaml", changes))
        assert dict(itertools.pairwise(flags)).get("--expert-tensor-parallel-size") == size


def _parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuda-graph-warmup-steps", type=int, default=3)
    add_flags(parser)
    return parser.parse_args(argv)


def test_flags_as_values() -> None:
    assert read_flags(_parse()) is None
    assert read_flags(_parse("--cuda-graph-granularity", "chunk")) == GraphFlags(
        capture=CaptureConfig(num_warmup_steps=1)
    )
    everything = read_flags(
        _parse(
            *("--cuda-graph-granularity", "chunk", "--cuda-graph-chunk-scope", "chunk"),
            *("--cuda-graph-verify", "poison"),
            *("--cuda-graph-on-failure", "eager", "--cuda-graph-warmup-steps", "2"),
        )
    )
    assert everything == GraphFlags(
        capture=CaptureConfig(
            scope="chunk",
            verify="poison",
            on_failure="eager",
            num_warmup_steps=2,
        )
    )


def test_a_capture_without_warmup_steps_comes_after_the_first_step() -> None:
    """Recipes for Megatron's own graphs set 0; its chunk graphs need the inputs of a step."""
    flags = read_flags(
        _parse("--cuda-graph-granularity", "chunk", "--cuda-graph-warmup-steps", "0")
    )
    assert flags is not None
    assert flags.capture.num_warmup_steps == 1


def test_flags_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="no effect with --cuda-graph-granularity layer"):
        read_flags(_parse("--cuda-graph-verify", "poison"))
    with pytest.raises(ConfigError, match="num_warmup_steps is -1; it must be"):
        read_flags(_parse("--cuda-graph-granularity", "chunk", "--cuda-graph-warmup-steps", "-1"))
