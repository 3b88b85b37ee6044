"""Helpers of the Megatron tests: whole jobs in processes of their own, and one in this process."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

if importlib.util.find_spec("megatron") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Megatron warns of every optional package that is missing and of its own deprecations."""
    for module in (r"megatron\..*", r"torch\.jit\..*"):
        config.addinivalue_line("filterwarnings", f"ignore:::{module}")


_PORTS = itertools.count()


def free_port() -> int:
    """A TCP port for one job: below those of outgoing connections, apart for every test process."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    while True:
        port = 20000 + 2500 * process + (os.getpid() * 37 + next(_PORTS)) % 2500
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start_ranks(
    arguments: Sequence[str], num_ranks: int, log_dir: Path, port: int
) -> list[subprocess.Popen[bytes]]:
    """Start ``python arguments`` once for each rank, as torchrun would."""
    processes = []
    for rank in range(num_ranks):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        with (log_dir / f"log{rank}.txt").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return processes


def wait_for_ranks(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int]:
    """Exit codes of all ranks; whoever is left after the time limit is killed (code -9)."""
    end = time.monotonic() + timeout_s
    try:
        while any(p.poll() is None for p in processes) and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return [process.wait() for process in processes]


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., tuple[list[int], str]]:
    """Run ``python arguments`` once for each rank; exit codes, and what all of them printed."""

    def run(
        arguments: Sequence[str], num_ranks: int, folder: Path, timeout_s: float = 100.0
    ) -> tuple[list[int], str]:
        codes = wait_for_ranks(start_ranks(arguments, num_ranks, folder, free_port()), timeout_s)
        return codes, "".join((folder / f"log{r}.txt").read_text() for r in range(num_ranks))

    return run


@pytest.fixture
def run_worker(tmp_path: Path) -> Callable[..., tuple[list[int], Path]]:
    """Run ``chunkgraph.megatron.worker`` on a configuration; exit codes and the run folder."""

    def run(
        config: dict[str, Any], num_ranks: int, timeout_s: float = 60.0
    ) -> tuple[list[int], Path]:
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        arguments = ["-m", "chunkgraph.megatron.worker", str(path), str(tmp_path)]
        processes = start_ranks(arguments, num_ranks, tmp_path, free_port())
        return wait_for_ranks(processes, timeout_s), tmp_path

    return run


@pytest.fixture
def run_to_its_end(tmp_path: Path) -> Callable[..., tuple[list[int], list[str]]]:
    """Run a case that ends its processes; exit codes and each rank's message."""

    def run(
        case: dict[str, Any], num_ranks: int = 2, timeout_s: float = 60.0
    ) -> tuple[list[int], list[str]]:
        port = free_port()
        path = tmp_path / "cases.json"
        listed = [{"name": "end", "port": port, "may_end": True, **case}]
        path.write_text(json.dumps(listed), encoding="utf-8")
        arguments = [str(HERE / "run_cases.py"), str(path), str(tmp_path)]
        codes = wait_for_ranks(start_ranks(arguments, num_ranks, tmp_path, port), timeout_s)
        files = [tmp_path / f"error_rank{rank}.txt" for rank in range(num_ranks)]
        texts = [f.read_text(encoding="utf-8") if f.exists() else "" for f in files]
        return codes, [text.partition("\n\n")[0] for text in texts]

    return run


@pytest.fixture
def run_cases(tmp_path: Path) -> Callable[..., dict[str, dict[str, Any]]]:
    """Run several configurations one after the other in the same processes; results by name."""

    def run(
        cases: dict[str, dict[str, Any]], num_ranks: int, timeout_s: float = 110.0
    ) -> dict[str, dict[str, Any]]:
        listed = [{"name": name, "port": free_port(), **case} for name, case in cases.items()]
        path = tmp_path / "cases.json"
        path.write_text(json.dumps(listed), encoding="utf-8")
        arguments = [str(HERE / "run_cases.py"), str(path), str(tmp_path)]
        codes = wait_for_ranks(
            start_ranks(arguments, num_ranks, tmp_path, listed[0]["port"]), timeout_s
        )
        logs = "\n".join(
            f"--- rank {rank}: {code}\n{(tmp_path / f'log{rank}.txt').read_text()[-3000:]}"
            for rank, code in enumerate(codes)
        )
        assert not any(codes), logs
        return {
            name: json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
            for name in cases
        }

    return run


def small_config(**sections: dict[str, Any]) -> dict[str, Any]:
    """A model of a few thousand parameters; ``sections`` update its sections."""
    config: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": 4,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 4,
            "seq_length": 16,
        },
        "pipeline": {},
        "train": {"num_microbatches": [2, 3, 1], "micro_batch_size": 2},
        "run": {"timeout_s": 40},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return {"device": "cpu", **config}


@pytest.fixture(scope="session")
def make_config() -> Callable[..., dict[str, Any]]:
    """`small_config`, for tests to call."""
    return small_config


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Any]:
    """This process as the only rank of a job on the CPU; gives the device."""
    from chunkgraph.config import config_from_mapping
    from chunkgraph.megatron.processes import training_process

    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with training_process(config_from_mapping(small_config())) as device:
            yield device


@pytest.fixture
def config(make_config: Callable[..., dict[str, Any]]) -> Any:
    """A small model with dropout, as `chunkgraph.config.Config`."""
    from chunkgraph.config import config_from_mapping

    return config_from_mapping(make_config(model={"hidden_dropout": 0.1}))


@pytest.fixture
def chunks(one_rank: Any, config: Any) -> list[Any]:
    """Its model chunks, built in this process."""
    from chunkgraph.megatron.model import build_model
    from chunkgraph.megatron.processes import seed_everything

    seed_everything(config.train.seed, one_rank)
    return build_model(config, one_rank)
