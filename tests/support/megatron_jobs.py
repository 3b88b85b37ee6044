"""Helpers of the Megatron tests: whole jobs in other processes, and one in this process."""

from __future__ import annotations

import fcntl
import importlib.util
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from extended_config import extended

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Silence Megatron's warnings about missing optional packages and deprecations."""
    for module in (r"megatron\..*", r"torch\.jit\..*"):
        config.addinivalue_line("filterwarnings", f"ignore:::{module}")


class ForkedRank:
    """A process that a `RankServer` forked, with the used part of ``subprocess.Popen``."""

    def __init__(self, server: RankServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if self._code is None:
            self._code = self._server.ask(pid=self.pid)["code"]
        return self._code

    def wait(self) -> int:
        """Wait for its exit code."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code


class RankServer:
    """A process that has imported torch and Megatron, and forks ranks; see ``rank_server.py``.

    Args:
        path: path of its socket. The first test process of a run starts the server, the others
            connect to it, and it ends with the last of them.
        host: name of the host in which Megatron is imported.
        parent: server of another host that forks this one; None starts an interpreter.
    """

    def __init__(self, path: Path, host: str, parent: RankServer | None = None) -> None:
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._socket = _connected(path) or _start_server(path, host, parent)
        self._stream = self._socket.makefile("rw", encoding="utf-8")

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer."""
        self._stream.write(f"{json.dumps(request)}\n")
        self._stream.flush()
        answer = self._stream.readline()
        assert answer, "the server of ranks ended; its output is above"
        return json.loads(answer)

    def start(self, arguments: Sequence[str], environment: dict[str, str], log: Path) -> ForkedRank:
        """Fork a process that runs ``python arguments``."""
        request = {"arguments": arguments, "environment": environment, "log": str(log)}
        return ForkedRank(self, self.ask(**request)["pid"])

    def close(self) -> None:
        """End all ranks started here, and the server if no other process needs it."""
        self._stream.close()
        self._socket.close()


def _connected(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def _start_server(path: Path, host: str, parent: RankServer | None) -> socket.socket:
    path.unlink(missing_ok=True)
    if parent is not None:
        parent.ask(path=str(path), host=host)
        return _connected(path) or pytest.fail(f"{path} was closed at once")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        connection = _connected(path)  # before the server, which ends without a connection
        arguments = (str(listener.fileno()), str(path), host)
        subprocess.Popen(
            [sys.executable, str(HERE / "rank_server.py"), *arguments],
            env=rank_environment(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[listener.fileno()],
        )
    assert connection is not None
    return connection


Rank = subprocess.Popen[bytes] | ForkedRank
StartRanks = Callable[..., list[Rank]]


def rank_environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that runs ranks."""
    path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def start_fresh(arguments: Sequence[str], environment: dict[str, str], log: Path) -> Rank:
    """Start ``python arguments`` in a new interpreter."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture(scope="session")
def start_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRanks]:
    """Return a function that starts ``python arguments`` once per rank, as torchrun would.

    Ranks are forked unless a test depends on the start of an interpreter. Neighbours come from two
    servers with different hashes of strings, so ranks that rely on the order of a set disagree.

    Args (of the returned function):
        arguments, num_ranks, log_dir, port: those of the job; 0 ranks: one process that is none.
        host: host of the servers that fork the ranks; None starts an interpreter for each rank.
        variables: added to the ranks' environment.
    """
    servers: dict[str, list[RankServer]] = {}
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by all processes of the run

    def start(
        arguments: Sequence[str],
        num_ranks: int,
        log_dir: Path,
        port: int,
        host: str | None,
        **variables: str,
    ) -> list[Rank]:
        for name in () if host is None else ("core", host):
            if name not in servers:
                of = servers.get("core", [None, None])
                servers[name] = [RankServer(folder / f"{name}{i}", name, of[i]) for i in range(2)]
        ranks = []
        for rank in range(num_ranks or 1):
            of_rank = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            environment = rank_environment(**variables, **(of_rank if num_ranks else {}))
            begin = servers[host][rank % 2].start if host is not None else start_fresh
            ranks.append(begin(arguments, environment, log_dir / f"log{rank}.txt"))
        return ranks

    yield start
    for server in itertools.chain(*servers.values()):
        server.close()


def wait_for_ranks(processes: Sequence[Rank], timeout_s: float) -> list[int]:
    """Return the exit codes of all ranks; kill those left after the time limit (code -9)."""
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
def run_ranks(
    start_ranks: StartRanks, free_port: Callable[[], int]
) -> Callable[..., tuple[list[int], str]]:
    """Return a runner of a pretrain script in ranks: exit codes and output."""

    def run(
        arguments: Sequence[str], num_ranks: int, folder: Path, timeout_s: float = 100.0
    ) -> tuple[list[int], str]:
        arguments = ["-m", "chunkgraph.launch", "--device", "cpu", *arguments]
        ranks = start_ranks(arguments, num_ranks, folder, free_port(), "pretrain")
        return wait_for_ranks(ranks, timeout_s), _logs(folder, num_ranks)

    return run


def _logs(folder: Path, num_ranks: int) -> str:
    return "".join((folder / f"log{rank}.txt").read_text() for rank in range(num_ranks))


@pytest.fixture
def run_script(
    tmp_path: Path, start_ranks: StartRanks, free_port: Callable[[], int]
) -> Callable[..., tuple[list[int], str]]:
    """Return a runner of ``python arguments`` in ranks on a CPU: exit codes and output."""
    has_megatron = importlib.util.find_spec("megatron") is not None

    def run(
        *arguments: str | Path, num_ranks: int = 2, host: str = "core", timeout_s: float = 150.0
    ) -> tuple[list[int], str]:
        ranks = start_ranks(
            list(map(str, arguments)),
            num_ranks,
            tmp_path,
            free_port(),
            host if has_megatron else None,
            CUDA_VISIBLE_DEVICES="",
        )
        return wait_for_ranks(ranks, timeout_s), _logs(tmp_path, len(ranks))

    return run


@pytest.fixture
def run_worker(
    tmp_path: Path, start_ranks: StartRanks, free_port: Callable[[], int]
) -> Callable[..., tuple[list[int], Path]]:
    """Return a runner of ``chunkgraph train`` in ranks: exit codes and the run folder."""

    def run(
        config: dict[str, Any], num_ranks: int, timeout_s: float = 60.0, *, forked: bool = False
    ) -> tuple[list[int], Path]:
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        table = str(tmp_path / "table.json")
        arguments = ["-m", "chunkgraph.cli", "train", str(path), "--json", table]
        host = "core" if forked else None
        variables = {"CHUNKGRAPH_REPORT_FOLDER": str(tmp_path)}
        if config["device"] == "cpu":
            variables["TORCHDYNAMO_DISABLE"] = "1"  # as `chunkgraph train` sets it
        ranks = start_ranks(arguments, num_ranks, tmp_path, free_port(), host, **variables)
        return wait_for_ranks(ranks, timeout_s), tmp_path

    return run


@pytest.fixture
def start_cases(
    tmp_path: Path, start_ranks: StartRanks, free_port: Callable[[], int]
) -> Callable[..., list[int]]:
    """Return a runner of ``run_cases.py`` on cases for the same ranks: exit codes."""

    def start(cases: list[dict[str, Any]], num_ranks: int, timeout_s: float) -> list[int]:
        cases = [{**case, "port": free_port()} for case in cases]
        path = tmp_path / "cases.json"
        path.write_text(json.dumps(cases), encoding="utf-8")
        arguments = [str(HERE / "run_cases.py"), str(path), str(tmp_path)]
        host = "core" if all(case["config"]["device"] == "cpu" for case in cases) else None
        ranks = start_ranks(arguments, num_ranks, tmp_path, cases[0]["port"], host)
        return wait_for_ranks(ranks, timeout_s)

    return start


@pytest.fixture
def run_to_its_end(
    tmp_path: Path, start_cases: Callable[..., list[int]]
) -> Callable[..., tuple[list[int], list[str]]]:
    """Return a runner of a case that ends its processes: exit codes and each rank's message."""

    def run(
        case: dict[str, Any], num_ranks: int = 2, timeout_s: float = 60.0
    ) -> tuple[list[int], list[str]]:
        codes = start_cases([{"name": "end", "may_end": True, **case}], num_ranks, timeout_s)
        files = [tmp_path / f"error_rank{rank}.txt" for rank in range(num_ranks)]
        return codes, [f.read_text().partition("\n\n")[0] if f.exists() else "" for f in files]

    return run


@pytest.fixture
def run_cases(
    tmp_path: Path, start_cases: Callable[..., list[int]]
) -> Callable[..., dict[str, dict[str, Any]]]:
    """Return a runner of several configurations in the same processes: results by name."""

    def run(
        cases: dict[str, dict[str, Any]], num_ranks: int, timeout_s: float = 110.0
    ) -> dict[str, dict[str, Any]]:
        codes = start_cases([{"name": n, **c} for n, c in cases.items()], num_ranks, timeout_s)
        logs = "\n".join(
            f"--- rank {rank}: {code}\n{(tmp_path / f'log{rank}.txt').read_text()[-3000:]}"
            for rank, code in enumerate(codes)
        )
        assert not any(codes), logs
        return {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in cases}

    return run


@pytest.fixture
def run_equal(run_cases: Callable[..., Any]) -> Callable[..., dict[str, dict[str, Any]]]:
    """Return `run_cases` with a check: all cases equal eager to the last bit, with one capture."""

    def run(*args: Any, **options: Any) -> dict[str, dict[str, Any]]:
        results = run_cases(*args, **options)
        for name, result in results.items():
            for step in result["steps"]:
                assert step["different"] == [], f"{name}: {step}"
                # NaN is equal to NaN.
                assert math.isfinite(step["loss"] + step["grad_norm"]), (name, step)
            assert result["different_parameters"] == {}, name
            assert result["capture_sessions"] == 1, name
            assert result["captures_after_first_session"] == 0, name
        return results

    return run


def in_scope(scope: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return the case of `run_cases` with graphs of blocks or of whole chunks."""
    config = case["config"]
    capture = {**config.get("capture", {}), "scope": scope}
    return {**case, "config": {**config, "capture": capture}}


@pytest.fixture
def in_both_scopes(once: Callable[..., Any]) -> Callable[..., dict[str, dict[str, Any]]]:
    """Return every case in both scopes, which end its name.

    With an older release, every second case has blocks and the others have whole chunks: the newest
    one covers both scopes for each way to split a model.
    """

    def double(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        both: dict[str, dict[str, Any]] = {}
        for index, (name, case) in enumerate(cases.items()):
            pair = [{f"{name}_{scope}": in_scope(scope, case)} for scope in ("block", "chunk")]
            both |= pair.pop(index % 2)
            both |= once(pair[0])
        return both

    return double


@pytest.fixture
def write_documents(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of short documents, each one letter longer than one of ``lengths``."""

    def write(lengths: Sequence[int], num_documents: int = 80, name: str = "text.txt") -> Path:
        letters = random.Random(5)
        documents = [
            "".join(letters.choices("abcdefgh ", k=letters.choice(lengths))) + "z"
            for _ in range(num_documents)
        ]
        path = tmp_path / name
        path.write_text("\n\n".join(documents), encoding="utf-8")
        return path

    return write


@pytest.fixture
def num_packings() -> Callable[[dict[str, Any]], int]:
    """Count the different offsets of documents in a case's microbatches."""

    def count(case: dict[str, Any]) -> int:
        from chunkgraph.data import Documents, read_documents
        from chunkgraph.packing import pack
        from chunkgraph.trainer import batches

        with extended(case["config"]) as config:
            size = config.pipeline.context_parallel_size
            num_seqs, num_rows = config.packing.max_packed_seqs, config.tokens_per_sequence
            shape = batches.PackedShape(num_seqs, num_rows, size, counts_padding=False)
        documents = Documents(
            read_documents(config.data.path),
            num_tokens=shape.max_packed_tokens,
            seed=config.train.seed,
            multiple=shape.document_multiple,
        )
        rows = [
            pack(documents.row(step, microbatch).lengths, shape).cu_seqlens_padded
            for step, number in enumerate(config.train.num_microbatches)
            for microbatch in range(number)
        ]
        return len({tuple(offsets.tolist()) for offsets in rows})

    return count


def small_config(**sections: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model of a few thousand parameters, updated by ``sections``.

    It has two layers, or as many as the pipeline has parts.
    """
    pipeline = sections.get("pipeline", {})
    num_parts = pipeline.get("pipeline_model_parallel_size", 1)
    num_parts *= pipeline.get("virtual_pipeline_model_parallel_size") or 1
    config: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": max(2, num_parts),
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
    """Return the function `small_config`."""
    return small_config


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Any]:
    """Make this process the only rank of a job on the CPU; return the device."""
    from extended_config import config_from_mapping

    from chunkgraph.trainer.setup import training_process

    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        # Any port: no other process connects.
        for name, value in {**environment, "MASTER_PORT": "0"}.items():
            patch.setenv(name, value)
        with training_process(config_from_mapping(small_config())) as device:
            yield device


@pytest.fixture
def config(make_config: Callable[..., dict[str, Any]]) -> Any:
    """Return the `Config` of a small model with dropout."""
    from extended_config import config_from_mapping

    return config_from_mapping(make_config(model={"hidden_dropout": 0.1}))


@pytest.fixture
def chunks(one_rank: Any, config: Any) -> list[Any]:
    """Build the model chunks of `config` in this process."""
    from chunkgraph.trainer.model import build_model
    from chunkgraph.trainer.setup import seed_everything

    seed_everything(config.train.seed, one_rank)
    return build_model(config, one_rank)


@pytest.fixture
def without_sequences() -> Callable[[dict[str, Any]], set[str]]:
    """Return a function that merges replays of banks that differ only in their sequences."""

    def join_params(result: dict[str, Any]) -> set[str]:
        names: set[str] = set()
        for rank, replays in enumerate(result["replays_of_bank"]):
            merged: Counter[str] = Counter()
            for bank, count in replays.items():
                merged[re.sub(r", \d+ sequences$", "", bank)] += count
            result["replays_of_bank"][rank] = dict(merged)
            names |= replays.keys()
        return names

    return join_params
