"""One rank of the launcher in this process: its changes to Megatron, and its messages."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_needs import NEEDS_TRAINING

pytestmark = [pytest.mark.megatron, NEEDS_TRAINING]

FLAGS = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"]
FLAGS += ["--seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "8"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore variables that the program sets; with them Megatron refuses FSDP in later jobs."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def _parsed(flags: Sequence[str]) -> dict[str, object]:
    """Parse these flags with Megatron's parser, in this process, without validation."""
    from megatron.training import arguments

    old = sys.argv
    sys.argv = ["script", *FLAGS, *flags]
    try:
        return vars(arguments.parse_args())
    finally:
        sys.argv = old


def test_layer_changes_nothing_and_chunk_turns_off_megatrons_graphs() -> None:
    from chunkgraph.megatron.cpu.pretrain import cpu_pretrain_host

    with cpu_pretrain_host():
        from megatron.training import training

        from chunkgraph.launch.hooks import enable

        own = ["--cuda-graph-impl", "local", "--transformer-impl", "local"]
        names = ("train", "get_forward_backward_func", "training_log", "print_rank_last")
        originals = {name: getattr(training, name) for name in names}
        before = _parsed(own)
        hooks = enable(on_cpu=True)
        try:
            assert enable() is hooks  # a script that calls it under the launcher
            layer = _parsed([*own, "--cuda-graph-granularity", "layer"])
            added = {name for name in layer if name not in before}
            assert {name: layer[name] for name in before} == before
            assert {layer[name] for name in added} == {None, False, "layer"}
            assert type(layer["cuda_graph_warmup_steps"]) is int  # Megatron's own default
            assert hooks.flags is None
            schedule = object()
            assert hooks.wrap_schedule(schedule) is schedule  # type: ignore[arg-type]
            with hooks.training(model=object()):  # attaching to it would fail
                assert hooks.graphs is None

            chunk = _parsed([*own, "--cuda-graph-granularity", "chunk"])
            assert chunk["cuda_graph_impl"] == "none"
            assert hooks.flags is not None
            assert hooks.flags.capture.num_warmup_steps == 1  # as in a configuration
            assert type(chunk["cuda_graph_warmup_steps"]) is int
        finally:
            hooks.disable()
        assert {name: getattr(training, name) for name in names} == originals
        assert _parsed(own) == before


def test_the_scripts_exit_code_is_the_ranks(tmp_path: Path, monkeypatch: Any) -> None:
    from chunkgraph.launch.__main__ import run_script
    from chunkgraph.launch.flags import parse_options

    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "exits.py"
    script.write_text("import sys\nsys.exit(int(sys.argv[1]))\n", encoding="utf-8")
    for code in (0, 7):
        options = parse_options(["--device", "cpu", str(script), str(code)], "launch")
        assert run_script(options) == code


def test_a_script_that_has_no_use_for_the_flags_is_reported(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would train eagerly without a message."""
    from chunkgraph.launch.__main__ import run_script
    from chunkgraph.launch.flags import parse_options

    monkeypatch.setattr(sys, "path", list(sys.path))
    chunk = ["--cuda-graph-granularity", "chunk"]
    parses = "from megatron.training import arguments\narguments.parse_args()\n"
    for text, arguments, message in (
        ("pass\n", [], ""),
        ("pass\n", chunk, "own.py trained nothing with Megatron's pretrain()"),
        (parses, FLAGS, ""),
        (parses, [*FLAGS, *chunk], "own.py trained nothing with Megatron's pretrain()"),
    ):
        monkeypatch.setattr(sys, "argv", sys.argv)
        script = tmp_path / "own.py"
        script.write_text(text, encoding="utf-8")
        assert (
            run_script(parse_options(["--device", "cpu", str(script), *arguments], "launch")) == 0
        )
        error = capsys.readouterr().err
        assert ("WARNING: chunk graphs: " in error) == bool(message)
        assert message in error


def test_a_flag_that_the_script_defines_too_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    from chunkgraph.errors import ConfigError
    from chunkgraph.launch.__main__ import run_script
    from chunkgraph.launch.flags import parse_options

    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "own.py"
    script.write_text(
        "from megatron.training import arguments\n"
        "def own(parser):\n"
        "    parser.add_argument_group('own').add_argument('--pipeline-schedule')\n"
        "    return parser\n"
        "arguments.parse_args(own)\n"
    )
    with pytest.raises(ConfigError, match=r"own.py: argument --pipeline-schedule: .* rename the"):
        run_script(parse_options(["--device", "cpu", str(script), *FLAGS], "launch"))


def test_the_host_reads_nothing_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from chunkgraph.launch.patches import UnitScale, _reductions
    from chunkgraph.megatron.cpu.pretrain import cpu_pretrain_host

    with cpu_pretrain_host():
        hooks: Any = SimpleNamespace(always_succeeds=True)
        succeeded, maximum = _reductions(hooks).values()
    norm, loss = torch.tensor([2.0], dtype=torch.float64), torch.tensor([3.0])
    scale = UnitScale(torch.ones(1))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "item", lambda _: pytest.fail("a read"))
        assert succeeded(True, group=None) is True
        largest = maximum(norm, group=None)
        assert scale.item() == 1.0
        scaled = scale * loss
    assert (largest.shape, largest.dtype, float(largest)) == ((), torch.float32, 2.0)
    assert torch.equal(scaled, loss)
    assert maximum(None) is None
    assert maximum(0.1) == float(torch.tensor(0.1))  # as Megatron rounds it


def test_numbers_are_written_later_as_they_were() -> None:
    from chunkgraph.launch.patches import LateNumbers
    from chunkgraph.megatron.cpu.pretrain import cpu_pretrain_host

    written: list[Any] = []
    tensorboard = SimpleNamespace(add_scalar=lambda *args: written.append(args), flush=lambda: None)
    wandb = SimpleNamespace(
        log=lambda values, step: written.append((values, step)),
        finish=lambda: written.append("finished"),
    )
    with cpu_pretrain_host():
        numbers = LateNumbers()
        with numbers.delayed(tensorboard, wandb):
            loss = torch.tensor(2.0)
            tensorboard.add_scalar("loss", loss, 1)
            wandb.log({"loss": loss, "rate": 0.5}, 1)
            loss.fill_(3.0)
            assert written == []
            numbers.write()
            assert written == [("loss", 2.0, 1), ({"loss": 2.0, "rate": 0.5}, 1)]
            tensorboard.add_scalar("loss", loss, 2)
            wandb.finish()  # Megatron finishes it when a run ends early
            assert written[2:] == [("loss", 3.0, 2), "finished"]
            tensorboard.add_scalar("loss", 4.0, 3)
        assert written[4:] == [("loss", 4.0, 3)]
        tensorboard.add_scalar("loss", 5.0, 4)
        assert written[5:] == [("loss", 5.0, 4)]
        for error in (SystemExit, RuntimeError):
            written.clear()
            with contextlib.suppress(error), numbers.delayed(tensorboard, None):
                tensorboard.add_scalar("loss", 6.0, 5)
                raise error
            assert written == [("loss", 6.0, 5)]


def test_a_device_that_never_finishes_keeps_no_run_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an error, numbers that the device has computed are written, and no others."""
    from chunkgraph.launch import patches

    written: list[Any] = []
    tensorboard = SimpleNamespace(add_scalar=lambda *args: written.append(args), flush=lambda: None)
    is_done = [True, False, True]
    events = [SimpleNamespace(record=lambda: None, query=lambda i=i: i) for i in is_done]
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.pop(0))
    monkeypatch.setattr(patches, "_PATIENCE_S", 0.05)
    numbers = patches.LateNumbers()
    with contextlib.suppress(RuntimeError), numbers.delayed(tensorboard, None):
        for iteration in (1, 2, 3):
            tensorboard.add_scalar("loss", 6.0, iteration)
        raise RuntimeError
    assert written == [("loss", 6.0, 1)]
