"""Arguments that the batch script passes to srun, with stand-ins for Slurm's commands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from commands import finished

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "launch_slurm.sbatch"

SRUN = """#!/bin/sh
for argument; do printf '%s\\n' "$argument"; done
printf '%s\\n' "env:$TORCH_ELASTIC_SHUTDOWN_TIMEOUT:$MASTER_ADDR:$MASTER_PORT"
if [ -n "${FAKE_RUNS:-}" ]; then
  while [ "$1" != bash ]; do shift; done
  exec "$@"
fi
exit "${FAKE_CODE:-0}"
"""
SCONTROL = "#!/bin/sh\nprintf 'node7\\nnode8\\n'\n"
JOB = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_GPUS_ON_NODE": "8",
}


class Site:
    """A folder with a configuration and stand-ins for Slurm's commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "run.yaml").touch()
        (folder / "pretrain.py").touch()

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{self.folder}/bin:/usr/bin:/bin", **variables}
        return finished(["bash", str(SCRIPT), *arguments], env, cwd=self.folder)

    def command(self, *arguments: str, **variables: str) -> list[str]:
        """Return the arguments of srun and the line with its environment."""
        result = self.run(*arguments, **{**JOB, **variables})
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_torchrun_is_started_once_on_each_node(site: Site) -> None:
    command = site.command("run.yaml", "train.lr=0.1", "--json", "a b")
    assert command[:5] == [
        *("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"),
        "--export=ALL",
    ]
    torchrun = [
        *("python3", "-m", "chunkgraph.jobs.torchrun", "--nnodes=2", "--nproc-per-node=8"),
        *("--rdzv-backend=c10d", "--rdzv-id=123456", "--rdzv-endpoint=node7:23456"),
    ]
    train = ["-m", "chunkgraph.cli", "train", "run.yaml", "train.lr=0.1", "--json", "a b"]
    # The user's arguments come last.
    assert command[command.index("task") + 1 : -1] == [*torchrun, *train]
    assert command[-1] == "env:110::"


def test_each_task_is_a_rank_where_sbatch_asks_for_more(site: Site) -> None:
    command = site.command(
        *("pretrain.py", "--lr", "0.1"), SLURM_NTASKS_PER_NODE="8", SLURM_CPUS_PER_TASK="12"
    )
    assert {"--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=12"} <= set(command)
    assert "chunkgraph.jobs.torchrun" not in command
    launch = ["python3", "-m", "chunkgraph.launch", "pretrain.py", "--lr", "0.1"]
    assert command[command.index("task") + 1 : -1] == launch
    assert command[-1] == "env:110:node7:23456"


def test_every_site_value_can_be_set(site: Site) -> None:
    (site.folder / "setup.sh").write_text("export CHUNKGRAPH_GRACE_S=${UNSET_HERE}55; false; true")
    command = site.command(
        *("--config", "run.yaml", "pretrain.py"),
        CHUNKGRAPH_NPROC_PER_NODE="4",
        CHUNKGRAPH_PYTHON="/opt/python",
        CHUNKGRAPH_SETUP="./setup.sh",
        CHUNKGRAPH_CONTAINER_IMAGE="registry#team/image:1",
        CHUNKGRAPH_CONTAINER_MOUNTS="/data:/data",
        CHUNKGRAPH_MASTER_HOST="node8",
        CHUNKGRAPH_MASTER_PORT="1234",
        CHUNKGRAPH_SRUN_ARGS="--mpi=none --label",
        CHUNKGRAPH_TORCHRUN_ARGS="--tee 3",
    )
    task = command.index("bash")
    assert command[task - 5 : task] == [
        "--container-image=registry#team/image:1",
        "--container-mounts=/data:/data",
        f"--container-workdir={site.folder}",
        "--mpi=none",
        "--label",
    ]
    started = command[command.index("task") + 1 : -1]
    assert started[0] == "/opt/python"
    assert started[4] == "--nproc-per-node=4"
    assert started[7:10] == ["--rdzv-endpoint=node8:1234", "--tee", "3"]
    assert started[10:] == [
        "-m",
        "chunkgraph.launch",
        "--config",
        "run.yaml",
        "pretrain.py",
    ]
    assert command[-1].startswith("env:55:")


def test_a_container_sees_this_folder_and_runs_its_own_python(site: Site) -> None:
    (site.folder / ".venv" / "bin").mkdir(parents=True)
    (site.folder / ".venv" / "bin" / "python").symlink_to("/bin/true")
    outside = site.command("run.yaml")
    assert outside[outside.index("task") + 1] == f"{site.folder}/.venv/bin/python"
    # The script may exist in the image only.
    inside = site.command("/in/the/image.py", CHUNKGRAPH_CONTAINER_IMAGE="image.sqsh")
    assert f"--container-mounts={site.folder}:{site.folder}" in inside
    assert inside[inside.index("task") + 1] == "python3"


def test_the_exit_code_is_sruns(site: Site) -> None:
    assert site.run("run.yaml", **JOB, FAKE_CODE="7").returncode == 7


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("exit 0", 0),
        ("exit 5", 5),
        # srun reports the highest code. If it ends the other tasks after a failure, the signal may
        # end a rank before its task notices.
        ("kill -TERM $$", 1),
        ("exit 143", 1),
        # The job reports a rank that was killed from outside for lack of memory.
        ("kill -KILL $$", 137),
    ],
)
def test_a_rank_that_slurm_ended_hides_no_failure(site: Site, ends: str, code: int) -> None:
    python = site.folder / "python"
    python.write_text(f"#!/bin/sh\n{ends}\n")
    python.chmod(0o755)
    result = site.run("run.yaml", **JOB, CHUNKGRAPH_PYTHON=str(python), FAKE_RUNS="1")
    assert result.returncode == code, result.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], JOB, "usage: sbatch"),
        (["run.yaml"], {}, "this is no Slurm job; submit it with sbatch"),
        (["train"], JOB, "'train' is neither a .yaml configuration nor a .py script"),
        (["none.yaml"], JOB, "there is no file 'none.yaml' in"),
        (["--config", "run.yaml"], JOB, "needs a script after it"),
        (["run.yaml"], {**JOB, "CHUNKGRAPH_NPROC_PER_NODE": "0"}, "expected a number from 1"),
        (["run.yaml"], {**JOB, "CHUNKGRAPH_SETUP": "./none.sh"}, "'./none.sh' failed"),
        (
            ["run.yaml"],
            {**JOB, "SLURM_NTASKS_PER_NODE": "2", "CHUNKGRAPH_NPROC_PER_NODE": "2"},
            "every task is a rank: unset CHUNKGRAPH_NPROC_PER_NODE",
        ),
    ],
)
def test_wrong_usage_ends_with_2_before_anything_is_started(
    site: Site, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    result = site.run(*arguments, **variables)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_help_names_every_variable_that_is_read(site: Site) -> None:
    result = site.run("--help")
    assert result.returncode == 0
    body = SCRIPT.read_text().partition("\nHELP\n}")[2]
    names = set(re.findall(r"\$\{(CHUNKGRAPH_[A-Z_]+)", body))
    assert len(names) == 10
    assert names == set(re.findall(r"CHUNKGRAPH_[A-Z_]+", result.stdout))


def test_ranks_are_not_waited_for_longer_than_slurm_waits(site: Site) -> None:
    """Slurm kills the job that many seconds after the signal that the script's header requests."""
    signal = re.search(r"^#SBATCH --signal=B:TERM@(\d+)$", SCRIPT.read_text(), re.MULTILINE)
    assert signal is not None
    assert int(site.command("run.yaml")[-1].split(":")[1]) < int(signal[1])
