from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from chunkgraph.cli.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    """A thousand documents of 1 to 50 tokens."""
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(1 + 7 * i % 50) for i in range(1000)))
    return str(path)


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["packing", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def row_of(out: str, name: str) -> list[str]:
    """Return the cells of a table's row after its name."""
    (line,) = (line for line in out.splitlines() if line.strip().startswith(name))
    return line.strip().removeprefix(name).split()


def test_the_report_names_flags_and_settings(numbers, capsys):
    code, out, err = run(capsys, numbers, "--max-packed-tokens", 128)
    assert (code, err) == (0, "")
    assert "Documents: 1000\n" in out
    assert len(row_of(out, "Documents of a microbatch")) == 4
    assert "  --cuda-graph-max-packed-seqs 32 --cuda-graph-max-packed-tokens 128\n" in out
    assert out.count("Recommended") == 1
    words = " ".join(out.split())
    (fewest,) = re.findall(r"Reason: (\d+) sequences are the fewest .* no longer for 32\.", words)
    assert float(row_of(out, fewest)[2].rstrip("%")) <= 1
    assert "0.00% of the steps run eagerly, target 1.00%" in out
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert "\x1b" not in out
    assert run(capsys, numbers, "--max-packed-tokens", 128)[1] == out  # the order is fixed


def test_the_recommended_number_is_the_largest_that_costs_the_same(tmp_path, capsys):
    """35 would meet the target, and attention's kernels take as long for 64."""
    path = tmp_path / "packed.txt"
    path.write_text("\n".join(["1 " * 40] * 5 + ["3 " * 34] * 95))
    out = run(capsys, path, "--target-fallback", "50%", "--global-batch-size", 1)[1]
    assert row_of(out, "35")[1:3] == ["5", "5.00%"]
    assert row_of(out, "64")[1:3] == ["0", "0.00%"]
    assert "--cuda-graph-max-packed-seqs 64 " in out


def test_an_array_is_read_like_text(numbers, tmp_path, capsys):
    path = tmp_path / "lengths.npy"
    np.save(path, np.loadtxt(numbers, dtype=np.int32))
    assert run(capsys, path)[1].splitlines()[1:] == run(capsys, numbers)[1].splitlines()[1:]


def test_packed_microbatches_are_taken_as_they_are(tmp_path, capsys):
    path = tmp_path / "packs.txt"
    path.write_text("\n".join("10 " * n for n in [1] * 90 + [9] * 10))
    code, out, _ = run(capsys, path, "--target-fallback", "0%")
    assert code == 0
    assert row_of(out, "Documents of a microbatch") == ["1", "1", "9", "9"]
    # The smallest that holds the largest microbatch, rounded as kernels need it.
    assert "Microbatches of up to 128 tokens: 100; in a step: 8" in out
    code, out, _ = run(capsys, path, "--max-packed-tokens", 8)
    assert code == 1
    assert "longer than 8 tokens, never fit: 180" in out
    assert "No shape of up to 8 tokens keeps eager steps" in out


def test_long_documents_are_cut_and_short_rows_padded(tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("5\n" * 64 + "100\n")
    plain = run(capsys, path, "--max-packed-tokens", 64)[1]
    assert "longer than 64 tokens, cut: 1" in plain
    assert row_of(plain, "Documents of a microbatch")[-1] == "12"
    shared = run(capsys, path, "--max-packed-tokens", 64, "--context-parallel-size", 4)[1]
    assert row_of(shared, "Documents of a microbatch")[-1] == "8"


def test_graphs_for_fewer_sequences_are_named(tmp_path, capsys):
    path = tmp_path / "packed.txt"
    path.write_text("\n".join(" ".join(["40"] * (300 if i % 20 == 0 else 40)) for i in range(100)))
    out = run(capsys, path, "--target-fallback", "0%")[1]
    assert "Graphs for fewer sequences are captured too: 64 128 256." in out


def test_buckets_of_lengths_are_recommended_where_they_save_rows(tmp_path, capsys):
    path = tmp_path / "packed.txt"
    path.write_text("400\n" + "30 30\n" * 40)
    out = run(capsys, path)[1]
    assert "--cuda-graph-packed-buckets 0.25 0.5" in out
    plain, bucketed = re.findall(r"([\d.]+)%\s+(?:of the rows|with length)", " ".join(out.split()))
    assert float(bucketed) < float(plain) - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-fallback", "1"], "--target-fallback '1' is not a share below 1"),
        (["--target-fallback", "few"], "Write a percentage, such as 1%"),
        (["--target-fallback", "nan"], "is not a share below 1"),
        (["--max-packed-tokens", "0"], "max_packed_tokens is 0"),
        (["--max-packed-tokens", "10", "--context-parallel-size", "2"], "The next possible value"),
        (["--context-parallel-size", "0"], "--context-parallel-size 0 is below 1"),
        (["--global-batch-size", "0"], "--global-batch-size 0 is below 1"),
        (["--plot", "none/x.png"], "none does not exist"),
        (["--plot", "x.txt"], "must end in .png, .svg or .pdf"),
    ],
)
def test_wrong_arguments_end_with_2_and_one_line(numbers, capsys, arguments, message):
    code, out, err = run(capsys, numbers, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_wrong_files_end_with_2_and_one_line(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some words\n")
    for path, message in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        ("/", "/: cannot read"),
        (tmp_path / "text.txt", "'some words' is not a whole number"),
    ):
        code, out, err = run(capsys, path)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_the_default_tokens_are_some_that_offsets_count(tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("2147483647\n5")
    assert f"up to {2**31 - 1} tokens" in run(capsys, path)[1]
    shared = run(capsys, path, "--context-parallel-size", 3)[1]
    assert f"up to {(2**31 - 1) // 6 * 6} tokens" in shared


def test_plot(numbers, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "choice.svg"
    assert run(capsys, numbers, "--max-packed-tokens", 128, "--plot", picture)[0] == 0
    assert "recommended: N = 32" in picture.read_text()
