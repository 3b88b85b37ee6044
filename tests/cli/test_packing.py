from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

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


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["packing", "--lengths", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_agrees_with_itself(numbers, capsys):
    arguments = (numbers, "--max-packed-tokens", "128", "--num-microbatches", "2", "--json", "-")
    code, out, err = run(capsys, *arguments, "--data-parallel-size", "2", "--target-fallback=10%")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["num_documents"] == 1000
    assert report["microbatches_per_step"] == 4
    assert report["target_fallback_share"] == 0.1
    assert report["capacity_tokens"] == 128
    best = report["recommended"]
    assert best in report["candidates"]
    assert best["fallback_share"] <= 0.1
    assert report["flags"] == [
        *("--cuda-graph-max-packed-seqs", str(best["max_packed_seqs"])),
        *("--cuda-graph-max-packed-tokens", str(best["max_packed_tokens"])),
    ]
    for candidate in report["candidates"]:
        share = candidate["num_misfits"] / report["num_microbatches"]
        assert candidate["fallback_share"] == pytest.approx(1 - (1 - share) ** 4, abs=0.02)
    # The same file and seed give the same answer.
    again = run(capsys, *arguments, "--data-parallel-size", "2", "--target-fallback", "0.1")
    assert again == (code, out, err)
    other = run(capsys, *arguments, "--global-batch-size", "4", "--seed", "1")
    assert other[0] == 2
    assert "leave out --num-microbatches" in other[2]


def test_the_report_fits_80_columns(numbers, capsys):
    code, out, _ = run(capsys, numbers, "--max-packed-tokens", "128", "--max-packed-seqs", "3")
    assert code == 0
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert "Documents of a microbatch" in out
    assert "Recommended: --cuda-graph-max-packed-seqs" in out
    assert "For chunkgraph train: packing.max_packed_seqs=" in out
    assert "too few to distinguish 1%" in out
    # A requested number is shown, however bad it is.
    assert any(line.split()[:2] == ["3", "128"] for line in out.splitlines())


def test_packed_microbatches_are_taken_as_they_are(tmp_path, capsys):
    path = tmp_path / "packs.jsonl"
    path.write_text("\n".join(json.dumps({"lengths": [10] * n}) for n in [1] * 90 + [9] * 10))
    arguments = (str(path), "--num-microbatches", "1", "--json", "-")
    report = json.loads(run(capsys, *arguments, "--target-fallback", "10%")[1])
    assert report["num_microbatches"] == 100
    assert report["documents_per_microbatch"] == {"p50": 1, "p90": 1, "p99": 9, "max": 9}
    # The smallest that holds the largest microbatch, rounded as kernels need it.
    assert report["capacity_tokens"] == 128
    assert report["recommended"]["max_packed_seqs"] == 2
    assert report["recommended"]["num_misfits"] == 10
    strict = json.loads(run(capsys, *arguments, "--target-fallback", "9%")[1])
    assert strict["recommended"]["max_packed_seqs"] == 10
    # Kernels start for 32 either way.
    assert (report["seq_buckets"], strict["seq_buckets"]) == ([], [])
    code, out, _ = run(capsys, *arguments, "--max-packed-tokens", "8")
    assert code == 1
    assert json.loads(out)["recommended"] is None


def test_no_shape_is_reported_and_exits_with_1(tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("100\n" * 10)
    arguments = (str(path), "--max-packed-tokens", "64", "--long-documents")
    code, out, _ = run(capsys, *arguments, "keep")
    assert code == 1
    assert "10 documents of more than 64 tokens: kept: their steps fall back" in out
    assert "No shape of up to 64 tokens" in out
    code, out, _ = run(capsys, *arguments, "truncate")
    assert code == 0
    assert "10 documents of more than 64 tokens: cut to it" in out
    assert "10 microbatches of" in out
    code, out, _ = run(capsys, *arguments, "split")
    assert "split" in out
    assert code == 0


def test_context_parallelism_pads_documents(tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("5\n" * 64)
    arguments = (str(path), "--max-packed-tokens", "64", "--json", "-", "--context-parallel-size")
    alone = json.loads(run(capsys, *arguments, "1")[1])
    shared = json.loads(run(capsys, *arguments, "4")[1])
    assert alone["documents_per_microbatch"]["max"] == 12
    assert shared["documents_per_microbatch"]["max"] == 8
    assert shared["recommended"]["padding_waste"] == pytest.approx(3 / 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-fallback", "1"], "--target-fallback '1' is not a share below 1"),
        (["--target-fallback", "100%"], "is not a share below 1"),
        (["--target-fallback=-1%"], "is not a share below 1"),
        (["--target-fallback", "few"], "Write a percentage, such as 1%"),
        (["--target-fallback", "nan"], "is not a share below 1"),
        (["--max-packed-tokens", "0"], "max_packed_tokens is 0"),
        (["--max-packed-tokens", "10", "--context-parallel-size", "2"], "The next possible value"),
        (["--context-parallel-size", "0"], "context_parallel_size is 0"),
        (["--num-microbatches", "0"], "--num-microbatches 0 is below 1"),
        (["--global-batch-size", "0"], "--global-batch-size 0 is below 1"),
        (["--max-packed-seqs", "1"], "--max-packed-seqs 1 is below 2"),
        (["--seed", "-1"], "--seed -1 is below 0"),
        (["--bytes-per-token", "0"], "--bytes-per-token 0 is not above 0"),
        (["--bytes-per-token", "nan"], "--bytes-per-token nan is not above 0"),
        (["--plot", "none/x.png"], "none does not exist"),
        (["--plot", "x.txt"], "must end in .png, .svg or .pdf"),
    ],
)
def test_wrong_arguments_end_with_2_and_one_line(numbers, capsys, arguments, message):
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    code, out, err = run(capsys, numbers, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_wrong_files_end_with_2_and_one_line(tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    text = tmp_path / "text.txt"
    text.write_text("some words\n")
    for path, message in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        (empty, "no document"),
        (text, "'some words' is not a whole number"),
    ):
        code, out, err = run(capsys, str(path))
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("lengths", "message"),
    [(".", ".: cannot read"), ("/", "/: cannot read"), ("", "Is a directory")],
)
def test_paths_without_a_name_end_with_2_and_one_line(capsys, lengths, message):
    code, out, err = run(capsys, lengths)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_the_default_tokens_are_some_that_offsets_count(tmp_path, capsys):
    """Without a T of the user's, the default holds documents of any length."""
    path = tmp_path / "lengths.txt"
    for content, flags, capacity in (
        ("2147483647\n5", (), 2**31 - 1),
        ("2147483647\n5 6", (), 2**31 - 1),
        ("2147483647", ("--context-parallel-size", "3"), (2**31 - 1) // 6 * 6),
    ):
        path.write_text(content)
        code, out, _ = run(capsys, str(path), "--json", "-", "--target-fallback", "0%", *flags)
        assert code == 0
        assert json.loads(out)["capacity_tokens"] == capacity
    for multiple in ("2147483648", str(10**18)):
        code, _, err = run(capsys, str(path), "--pad-seq-to-mult", multiple)
        assert (code, err.count("\n")) == (2, 1)
        assert f"--pad-seq-to-mult {multiple} pads documents to multiples of {multiple} rows" in err
    code, _, err = run(capsys, str(path), "--max-document-tokens", str(10**12))
    assert code == 2
    assert "max_document_tokens is 1000000000000, more than" in err


def test_labels_stay_inside_the_axes():
    from chunkgraph.cli.packing_plot import _inside

    assert _inside(10, 300, (4, 8)) == {"xytext": (4, 8)}
    assert _inside(298, 300, (4, 8)) == {"xytext": (-4, 8), "ha": "right"}


def test_plot(numbers, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "choice.png"
    code, out, _ = run(capsys, numbers, "--max-packed-tokens", "128", "--plot", str(picture))
    assert code == 0
    assert f"Drawn in {picture}" in out.replace("\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command_without_torch(numbers):
    """The whole command, with torch and matplotlib made impossible to import."""
    code = (
        "import sys\n"
        "for name in ('torch', 'megatron', 'transformer_engine', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "from chunkgraph.cli.__main__ import main\n"
        "sys.exit(main(['packing', '--lengths', *sys.argv[1:]]))\n"
    )

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, numbers, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    done = command()
    assert done.returncode == 0, done.stderr
    assert "Recommended:" in done.stdout
    done = command("--plot", "x.png")
    assert done.returncode == 2
    assert "matplotlib is not installed" in done.stderr


def test_the_help_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["packing", "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_limit_on_documents(numbers, capsys):
    limited = (numbers, "--max-packed-tokens", "128", "--max-document-tokens", "40", "--json", "-")
    report = json.loads(run(capsys, *limited)[1])
    assert report["max_document_tokens"] == 40
    assert report["num_documents_above_capacity"] == 200
    assert report["flags"][-2:] == ["--cuda-graph-max-document-tokens", "40"]
    assert report["recommended"]["num_misfits"] == 0  # they were cut
    kept = json.loads(run(capsys, *limited, "--long-documents", "keep")[1])
    assert kept["candidates"][-1]["num_misfits"] > 0.2 * kept["num_microbatches"]
    code, out, _ = run(capsys, *limited[:-2])
    assert code == 0
    assert "packing.max_document_tokens=40" in out
    assert max(map(len, out.splitlines()[1:])) <= 80
    for wrong, message in (("0", "is below 1"), ("129", "more than max_packed_tokens 128")):
        code, _, err = run(capsys, *limited[:3], "--max-document-tokens", wrong)
        assert code == 2
        assert message in err


def test_documents_are_padded(numbers, capsys):
    arguments = (numbers, "--max-packed-tokens", "512", "--json", "-")
    plain = json.loads(run(capsys, *arguments)[1])
    report = json.loads(run(capsys, *arguments, "--pad-seq-to-mult", "64")[1])
    assert (plain["pad_seq_to_mult"], report["pad_seq_to_mult"]) == (1, 64)
    # A microbatch has room for eight of them at most, and none has half a block to spare.
    assert report["documents_per_microbatch"]["max"] == 8 < plain["documents_per_microbatch"]["max"]
    assert report["num_microbatches"] > plain["num_microbatches"]
    assert report["recommended"]["padding_waste"] > plain["recommended"]["padding_waste"] + 0.1
    code, out, _ = run(capsys, *arguments[:-2], "--pad-seq-to-mult", "64")
    assert code == 0
    assert "Recommended for chunkgraph train: packing.max_packed_seqs=9" in out
    assert "packing.pad_seq_to_mult=64" in out
    # There are flags for padded data alone, and nothing states that the user's data are padded.
    assert "--cuda-graph" not in out
    assert "for them\nleave out --pad-seq-to-mult" in out
    assert (report["flags"], plain["flags"][0]) == (None, "--cuda-graph-max-packed-seqs")
    assert max(map(len, out.splitlines()[1:])) <= 80
    # The default T holds the longest in blocks.
    code, out, _ = run(capsys, numbers, "--json", "-", "--pad-seq-to-mult", "100")
    assert json.loads(out)["capacity_tokens"] == 4100
    for wrong, message in (("0", "is below 1"), ("100", "not a multiple of 100")):
        code, _, err = run(capsys, *arguments, "--pad-seq-to-mult", wrong)
        assert code == 2
        assert message in err


@pytest.fixture
def packed(tmp_path: Path):
    """Return a writer of 100 microbatches, every twentieth with ``most`` short documents."""

    def write(most: int, others: int, tokens: int = 1) -> str:
        path = tmp_path / "packed.txt"
        counts = [most if i % 20 == 0 else others for i in range(100)]
        path.write_text("\n".join(" ".join([str(tokens)] * n) for n in counts))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("most", "others", "tokens", "default", "fewer"),
    [
        (300, 40, 40, [64, 128], []),  # the default has graphs for 64
        (300, 10, 40, [64, 128], []),  # 64 cost hardly more than 32
        (99, 12, 40, [], [32]),  # there is no default
        (60, 12, 40, [], []),  # all are cheap
        (99, 60, 40, [], []),  # not fewer than half
        (180, 150, 40, [64], [0]),  # no microbatch has so few
        (3199, 1200, 1, [64, 128, 256, 512, 1024], [1536]),
        (300, 40, 1, [32, 64, 128], []),  # in short rows there are graphs for 32
        (300, 10, 1, [32, 64, 128], []),
        (60, 12, 1, [32], []),
        (99, 60, 1, [32], [0]),
        (30, 12, 1, [], []),
    ],
)
def test_fewer_sequences_are_recommended_where_the_default_does_not_have_them(
    packed, capsys, most, others, tokens, default, fewer
):
    arguments = (packed(most, others, tokens), "--target-fallback", "0%")
    report = json.loads(run(capsys, *arguments, "--json", "-")[1])
    assert report["recommended"]["max_packed_seqs"] == most + 1
    assert (report["default_seq_buckets"], report["seq_buckets"]) == (default, fewer)
    output = run(capsys, *arguments)[1]
    assert max(map(len, output.splitlines()[1:])) <= 80
    assert ("--cuda-graph-packed-seq-buckets" in output) == bool(fewer)
    if default:
        assert f"By default there are graphs for {default[0]}" in output
    if fewer == [0]:
        assert "--cuda-graph-packed-seq-buckets 0 (packing.seq_buckets=[])" in output
    elif fewer:
        assert f"90% of the microbatches have at most {others} documents." in output
        assert f"packing.seq_buckets={str(fewer).replace(' ', '')}" in output


def test_short_length_buckets_change_the_default(packed, capsys):
    """In rows of 2400 there are no graphs for 32, but with some of 600 there are."""
    arguments = (packed(60, 12, 40), "--target-fallback", "0%")
    assert json.loads(run(capsys, *arguments, "--json", "-")[1])["default_seq_buckets"] == []
    output = run(capsys, *arguments)[1]
    assert "--cuda-graph-packed-buckets 0.25 0.5" in output
    assert "By default there are then graphs for 32 sequences too" in output
    longer = run(capsys, packed(60, 12, 200), *arguments[1:])[1]
    assert "--cuda-graph-packed-buckets 0.25 0.5" in longer
    assert "graphs for 32" not in longer


def test_rows_of_a_rank_decide_the_default(packed, capsys):
    arguments = (packed(60, 12, 32), "--target-fallback", "0%", "--json", "-")
    assert json.loads(run(capsys, *arguments)[1])["default_seq_buckets"] == []
    shared = json.loads(run(capsys, *arguments, "--context-parallel-size", "2")[1])
    assert 1024 < shared["recommended"]["max_packed_tokens"] <= 2 * 1024
    assert shared["default_seq_buckets"] == [32]


def test_dummies_of_a_limit_on_documents_count_as_sequences(packed, capsys):
    """With dummies, kernels for the default's 64 start as for 128, so graphs are for fewer."""
    limited = ("--target-fallback", "0%", "--max-document-tokens", "64", "--json", "-")
    report = json.loads(run(capsys, packed(500, 40), *limited)[1])
    assert report["default_seq_buckets"] == [32, 64, 128]
    assert report["recommended"]["max_packed_tokens"] == 512
    assert report["seq_buckets"] == [64 - 7, 128 - 7]
    report = json.loads(run(capsys, packed(500, 20), *limited)[1])
    assert report["seq_buckets"] == [32 - 7, 64 - 7, 128 - 7]


def test_a_number_of_sequences_that_costs_the_same_is_reported(tmp_path, capsys):
    path = tmp_path / "packed.txt"
    path.write_text("\n".join(["1 " * 40] * 5 + ["3 " * 35] * 95))
    output = run(capsys, str(path), "--target-fallback", "50%", "--num-microbatches", "1")[1]
    assert "--cuda-graph-max-packed-seqs 36" in output
    assert "0.00% with N = 64, for which attention's kernels take as long" in output
    (tokens,) = re.findall(r"--cuda-graph-max-packed-tokens (\d+)", output)
    assert f"T defaults to the sequence length: leave it out if that is {tokens}" in output


def test_a_number_that_costs_the_same_is_reported_though_it_is_no_candidate(tmp_path, capsys):
    """Candidates are powers of two up to the most documents, here 16."""
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(["90 " * 13] * 2 + ["100 " * 12] * 98))
    arguments = (str(path), "--target-fallback", "5%", "--num-microbatches", "1")
    output = run(capsys, *arguments)[1]
    assert "--cuda-graph-max-packed-seqs 13" in output
    assert "2.00% of the steps run eagerly" in output
    assert "0.00% with N = 32, for which attention's kernels take as long" in output
    report = json.loads(run(capsys, *arguments, "--json", "-")[1])
    assert 32 not in {candidate["max_packed_seqs"] for candidate in report["candidates"]}
