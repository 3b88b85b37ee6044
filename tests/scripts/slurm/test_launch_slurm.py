from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_needs import HAS_MEGATRON

ROOT = Path(__file__).parents[3]
SCRIPT = str(ROOT / "scripts" / "launch_slurm.sbatch")
CONFIG = str(ROOT / "configs" / "cpu" / "gpt_pp2_cpu.yaml")
SMALL = ("model.num_layers=2", "model.hidden_size=32", "train.num_microbatches=[2,3]")

# Arguments of sbatch and variables that start two ranks.
BY_TORCHRUN: tuple[list[str], dict[str, str]] = ([], {"CHUNKGRAPH_NPROC_PER_NODE": "2"})
BY_SRUN: tuple[list[str], dict[str, str]] = (["--ntasks-per-node=2"], {})
BOTH = pytest.mark.parametrize(
    "way", [pytest.param(BY_TORCHRUN, id="torchrun"), pytest.param(BY_SRUN, id="srun")]
)


# No `megatron` marker: its releases make no difference to Slurm.
TRAINS = pytest.mark.skipif(not HAS_MEGATRON, reason="megatron-core is not installed")
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(150)]


class Submitted:
    """Jobs of one test, and their output."""

    def __init__(self, slurm: Any, marked: Any, folder: Path) -> None:
        self.slurm, self.marked = slurm, marked
        self.log = folder / "log"

    def submit(self, way: tuple[list[str], dict[str, str]], *arguments: str) -> str:
        options, variables = way
        environment = {
            **self.marked.environment,
            "CHUNKGRAPH_PYTHON": sys.executable,
            "GLOO_SOCKET_IFNAME": "lo",
            # Each test process has its own Slurm, and all of them number jobs from one.
            "CHUNKGRAPH_MASTER_PORT": str(self.slurm.free_port()),
            **variables,
        }
        return self.slurm.submit(
            *(*options, SCRIPT, *arguments),
            environment=environment,
            folder=self.marked.folder,
            log=self.log,
        )

    def run(self, way: tuple[list[str], dict[str, str]], *arguments: str) -> tuple[str, int]:
        return self.slurm.wait(self.submit(way, *arguments))


@pytest.fixture
def jobs(slurm: Any, marked: Any, tmp_path: Path) -> Submitted:
    return Submitted(slurm, marked, tmp_path)


# As in `test_launch_local`, with ranks of Slurm; cases with torchrun are below.
@TRAINS
def test_a_configuration_trains_on_two_ranks(jobs: Submitted, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    ended = jobs.run(BY_SRUN, CONFIG, *SMALL, "--json", str(table))
    log = jobs.log.read_text()
    assert ended == ("COMPLETED", 0), log
    assert log.count("parameters after the run: equal") == 1
    assert json.loads(table.read_text())["ok"] is True
    assert jobs.marked.is_alone()


@BOTH
@TRAINS
def test_a_configuration_that_fails_fails_the_job(jobs: Submitted, way: Any) -> None:
    ended = jobs.run(way, CONFIG, "pipeline.pipeline_model_parallel_size=4")
    log = jobs.log.read_text()
    assert ended == ("FAILED", 2), log
    assert log.count("error: The configuration needs 4 processes") == 1
    assert jobs.marked.is_alone()


def test_a_job_whose_script_ends_well_is_completed(jobs: Submitted, tmp_path: Path) -> None:
    script = tmp_path / "pretrain.py"
    # One write: with PYTHONUNBUFFERED, print writes word by word, and the ranks' words mix.
    script.write_text("import os\nos.write(1, f'rank {os.environ[\"RANK\"]}\\n'.encode())\n")
    ended = jobs.run(BY_TORCHRUN, str(script))
    log = jobs.log.read_text()
    assert ended == ("COMPLETED", 0), log
    assert "rank 0" in log
    assert "rank 1" in log
    assert jobs.marked.is_alone()


@BOTH
def test_a_scripts_exit_code_is_the_jobs(jobs: Submitted, way: Any, tmp_path: Path) -> None:
    # Slurm has to end the other rank, whose exit code must not count.
    script = tmp_path / "pretrain.py"
    script.write_text(
        "import os, sys, time\nos.write(1, f'arguments {sys.argv[1:]}\\n'.encode())\n"
        "sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)\n"
    )
    ended = jobs.run(way, str(script), "--train-iters", "2")
    log = jobs.log.read_text()
    assert ended == ("FAILED", 3), log
    assert "arguments ['--train-iters', '2']" in log
    assert jobs.marked.is_alone()


SAVES = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
terms = []
signal.signal(signal.SIGTERM, lambda *_: terms.append(1))
(folder / f"ready{rank}").touch()
while not terms:
    time.sleep(0.05)
time.sleep(7)  # longer than this Slurm waits before it kills
(folder / f"saved{rank}").touch()
"""


@BOTH
def test_ranks_may_save_before_the_job_is_ended(
    jobs: Submitted, slurm: Any, way: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text(SAVES)
    job = jobs.submit(way, str(script), str(tmp_path))
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
    # Slurm sends this signal 120 s before the time limit, by `--signal=B:TERM@120`.
    slurm.call("scancel", "--batch", "--signal=TERM", job)
    state, code = slurm.wait(job)
    log = jobs.log.read_text()
    assert len(list(tmp_path.glob("saved*"))) == 2, log
    assert "SIGTERM; the ranks get 110 s to save" in log
    # torchrun's exit code is that of the signal; ranks that end well have 0.
    assert (state, code) == (("FAILED", 143) if way is BY_TORCHRUN else ("COMPLETED", 0)), log
    assert jobs.marked.is_alone()
