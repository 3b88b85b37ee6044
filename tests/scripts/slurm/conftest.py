"""A Slurm of one node for the tests, with its own daemons, ports and files, without root."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import finished

# No accounting, no cgroups, no hardware plugins. More CPUs than the machine has, so that jobs
# and their ranks fit on any machine. Immediate decisions, since tests wait for them.
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,sched_interval=1
ReturnToService=2
KillWait=5
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=10 State=UP
"""


class Slurm:
    """The running daemons.

    Args:
        folder: A short path: that of a socket has at most 107 characters.
        free_port: Returns ports for the daemons.
    """

    def __init__(self, folder: Path, free_port: Callable[[], int]) -> None:
        self.folder, self.free_port = folder, free_port
        path = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"
        self.environment = {"PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
        self._processes = ExitStack()

    def start(self) -> None:
        """Start the daemons and wait until the node takes jobs."""
        folder = self.folder
        folder.chmod(0o755)  # munged insists that others can reach its socket
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        config = SLURM_CONF.format(
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            folder=folder,
            ctld_port=self.free_port(),
            slurmd_port=self.free_port(),
        )
        (folder / "slurm.conf").write_text(config)
        (folder / "cgroup.conf").write_text(self._cgroup_conf())
        self._daemon(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={folder}/munge.socket", f"--log-file={folder}/munged.log"),
            *(f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"),
        )
        self._wait_for((folder / "munge.socket").exists)
        self._daemon("slurmctld", "-D", "-c", "-f", f"{folder}/slurm.conf")
        self._daemon("slurmd", "-D", "-f", f"{folder}/slurm.conf")
        self._wait_for(lambda: self.call("sinfo", "--noheader", "--format=%T") == "idle")

    def stop(self) -> None:
        """End the daemons, and jobs that a failed test leaves."""
        try:
            self.call("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}")
            self._wait_for(lambda: self.call("squeue", "--noheader") == "")
        finally:
            self._processes.close()

    def call(self, *command: str) -> str:
        """Return the standard output of a Slurm command."""
        return finished(command, {**os.environ, **self.environment}).stdout.strip()

    def submit(self, *command: str, environment: Mapping[str, str], folder: Path, log: Path) -> str:
        """Submit a job with sbatch's arguments; return its number."""
        # Far from the limit: the script requests a signal near it.
        sbatch = ["sbatch", "--parsable", "--time=10", f"--output={log}", *command]
        done = finished(sbatch, {**environment, **self.environment}, cwd=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def wait(self, job: str, within_s: float = 90.0) -> tuple[str, int]:
        """Wait for a job; return state and exit code (`sbatch --wait` polls every ten seconds)."""
        end = time.monotonic() + within_s
        while True:
            text = self.call("scontrol", "show", "job", "--oneliner", job)
            match = re.search(r"JobState=(\w+).* ExitCode=(\d+):", text)
            assert match is not None, text
            if match[1] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return match[1], int(match[2])
            assert time.monotonic() < end, text
            time.sleep(0.2)

    def _cgroup_conf(self) -> str:
        """Return a cgroup configuration; without one, slurmd would use the system's cgroups."""
        version = re.search(r"(\d+)\.(\d+)", self.call("sbatch", "--version"))
        assert version is not None
        if (int(version[1]), int(version[2])) >= (23, 11):
            return "CgroupPlugin=disabled\n"
        return "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"

    def _daemon(self, *command: str) -> None:
        program = shutil.which(command[0], path=self.environment["PATH"])
        assert program is not None
        log = self._processes.enter_context((self.folder / f"{command[0]}.out").open("w"))
        process = subprocess.Popen(
            [program, *command[1:]],
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        self._processes.callback(end, process)

    def _wait_for(self, condition: object, within_s: float = 60.0) -> None:
        assert callable(condition)
        end = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > end:
                logs = "\n".join(
                    f"--- {path.name}\n{path.read_text()[-2000:]}"
                    for path in sorted(self.folder.glob("*.out"))
                )
                pytest.fail(f"Slurm's daemons do not answer:\n{logs}")
            time.sleep(0.1)


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a daemon, and kill it if it stays."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def slurm(free_port: Callable[[], int]) -> Iterator[Slurm]:
    """A Slurm of one node, started for the tests and ended after them."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        started = Slurm(Path(folder), free_port)
        try:
            started.start()
            yield started
        finally:
            started.stop()
