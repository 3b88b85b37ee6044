"""The launcher on a Megatron that defines ``--cuda-graph-granularity`` itself."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_arguments import arguments
from training_needs import NEEDS_TRAINING
from upstream_chunks import capture, define_flags

from chunkgraph.errors import ConfigError
from chunkgraph.launch.arguments import settle_arguments
from chunkgraph.launch.flags import add_flags, explain_in_one_line

pytestmark = [pytest.mark.megatron, NEEDS_TRAINING]

ROOT = Path(__file__).parents[2]
FORMS = ("local", "transformer_engine")
OURS, MEGATRONS = "they take over Megatron's --cuda-graph-granularity", "Megatron captures chunks"


def parsed(line: str, *, has_chunks: bool = True) -> argparse.Namespace:
    """Parse flags with a parser that has Megatron's own, and those of chunk graphs."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    implementations = ("none", *FORMS, "full_iteration")
    parser.add_argument("--cuda-graph-impl", choices=implementations, default="none")
    if has_chunks:
        define_flags(parser)
    add_flags(parser)
    explain_in_one_line(parser)
    defaults = vars(arguments(cuda_graph_granularity="layer"))
    of_line = parser.parse_args(line.split())
    return argparse.Namespace(**{**defaults, **vars(of_line)})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("line", "is_ours"),
    [
        ("--cuda-graph-granularity chunk", True),
        ("--cuda-graph-granularity chunk --chunkgraph", True),
        ("--cuda-graph-granularity layer --chunkgraph", True),
        ("--chunkgraph", True),
        ("--cuda-graph-impl FORM --chunkgraph", True),
        ("--cuda-graph-impl FORM --cuda-graph-granularity chunk --chunkgraph", True),
        ("--cuda-graph-impl FORM --cuda-graph-granularity chunk", False),
        ("--cuda-graph-impl FORM", None),
        ("", None),
    ],
)
def test_who_captures(
    form: str, line: str, is_ours: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parsed(line.replace("FORM", form))
    given = args.cuda_graph_impl, args.cuda_graph_granularity
    flags = settle_arguments(args, on_cpu=True)
    assert (flags is not None) == bool(is_ours)
    told = capsys.readouterr().out
    assert (MEGATRONS in told) == (is_ours is False)
    if flags is None:  # all of Megatron's is left to Megatron
        assert (args.cuda_graph_impl, args.cuda_graph_granularity) == given
        assert ("--chunkgraph would replace its graphs" in told) == (is_ours is False)
    else:
        capture(args, form)  # which neither refuses nor captures
        assert MEGATRONS not in capsys.readouterr().out
        assert (args.cuda_graph_impl, args.cuda_graph_granularity) == ("none", "layer")
        lines = [text for text in flags.turned_off if OURS in text]
        assert len(lines) == (given[1] == "chunk")


@pytest.mark.parametrize("line", ["--cuda-graph-granularity chunk", "--chunkgraph"])
@pytest.mark.parametrize("form", FORMS)
def test_without_graphs_of_chunks_in_megatron_the_launcher_captures(form: str, line: str) -> None:
    args = parsed(f"--cuda-graph-impl {form} {line}", has_chunks=False)
    flags = settle_arguments(args, on_cpu=True)
    assert flags is not None
    assert args.cuda_graph_impl == "none"
    assert not any(OURS in text for text in flags.turned_off)


def test_our_flags_next_to_megatrons_graphs_are_an_error() -> None:
    line = "--cuda-graph-impl local --cuda-graph-granularity chunk --cuda-graph-verify poison"
    with pytest.raises(ConfigError, match="no effect with Megatron's --cuda-graph-impl local"):
        settle_arguments(parsed(line), on_cpu=True)
    with pytest.raises(ConfigError, match="no effect with --cuda-graph-granularity layer"):
        settle_arguments(parsed("--cuda-graph-verify poison"), on_cpu=True)


FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --position-embedding-type rope --micro-batch-size 2 "
    "--global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 63 --mock-data "
    "--num-workers 0 --log-interval 1 --lr 1e-3 --eval-iters 0 --eval-interval 10 --train-iters 3"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "flags", "is_ours"),
    [
        ("local", "--cuda-graph-granularity chunk", True),
        ("local", "--cuda-graph-impl local --cuda-graph-granularity chunk", False),
        ("transformer_engine", "--cuda-graph-impl transformer_engine --chunkgraph", True),
    ],
)
def test_a_script_trains(
    form: str,
    flags: str,
    is_ours: bool,
    tmp_path: Path,
    run_ranks: Callable[..., tuple[list[int], str]],
) -> None:
    stand_in = ROOT / "tests" / "support" / "upstream_chunks.py"
    script = ROOT / "scripts" / "pretrain_gpt.py"
    line = [str(stand_in), form, str(script), *FLAGS, *flags.split()]
    codes, output = run_ranks([*line, "--data-cache-path", str(tmp_path / "cache")], 1, tmp_path)
    assert codes == [0], output[-4000:]
    assert ("captured 2 graphs" in output) == is_ours
    assert (f"Megatron captures chunks with {form}" in output) == (not is_ours)
    assert (OURS in output) == ("granularity" in flags and is_ours)
    assert "iteration        3/" in output
