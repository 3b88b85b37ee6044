"""Completion scripts work in each shell."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from chunkgraph.cli.__main__ import main


def script(capsys: pytest.CaptureFixture[str], shell: str) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("chunkgraph pl", {"plan"}),
        ("chunkgraph plan --gp", {"--gpu-memory"}),
        ("chunkgraph plan --schedule zb", {"zb-h1", "zb-v"}),
        ("chunkgraph completion z", {"zsh"}),
        ("chunkgraph launch --device c", {"cuda", "cpu"}),
    ],
)
def test_bash_completes(capsys: pytest.CaptureFixture[str], line: str, expected: set[str]) -> None:
    words = line.split(" ")
    program = (
        f"{script(capsys, 'bash')}\nCOMP_WORDS=({' '.join(words)}); "
        f"COMP_CWORD={len(words) - 1}; _chunkgraph; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert set(done.stdout.split()) == expected


def test_zsh_and_fish_have_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert script(capsys, "zsh").startswith("autoload -U +X bashcompinit")
    fish = script(capsys, "fish")
    assert "-n __fish_use_subcommand -a launch" in fish
    assert "complete -c chunkgraph -n '__fish_seen_subcommand_from plan' -l gpu-memory" in fish
