"""Configuration of all tests: hypothesis without deadlines, skips with a reason, order."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import importlib.util
import itertools
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Read when torch is first imported, here and by what tests start. With tensors this small more
# threads only wait for each other, and with several test processes they also wait for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The command sets this for its ranks on a CPU, so tests on a CPU have it too: Megatron's import
# loads no compiler. On a GPU its small functions are compiled in tests as they are in training.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# What a script runs in the background begins with Ctrl-C ignored, and passes that on to its own.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Probes, stand-ins and fixtures of whole jobs, which tests of several rooms share.
sys.path.insert(0, str(Path(__file__).parent / "support"))
from collector import collect_new_objects
from training_needs import HAS_MEGATRON

pytest_plugins = ["megatron_jobs"]
# These rooms import Megatron; some tests of `launch` do not.
if importlib.util.find_spec("megatron") is None:
    collect_ignore_glob = [f"{room}/*test_*.py" for room in ("benchmarks", "megatron", "trainer")]
# A shared machine stalls now and then: a deadline would test the machine.
hypothesis.settings.register_profile("chunkgraph", deadline=None, print_blob=True)
hypothesis.settings.load_profile("chunkgraph")


# Collections would walk over every module of torch and Megatron while these are imported, a second
# of each test process's time, and again and again while tests run: see `pytest_collection_finish`.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collect what tests leave over, not what was there before.

    The first backward imports ``torch._dynamo``, most of all objects.
    """
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")
    collect_new_objects()


@pytest.fixture(scope="module", autouse=True)
def _left_by_tests() -> Iterator[None]:
    """Leave what a module's tests left, such as their reports, out of later collections too."""
    yield
    collect_new_objects()


# What starts the processes of whole jobs, for the most part; such tests take longest.
_JOB_FIXTURES = {
    *("run_cases", "run_worker", "run_to_its_end", "run_ranks", "run_script"),
    *("launched", "marked"),
}


# The marker expressions of the short run, and of the run with the oldest release of Megatron.
_SHORT = "not slow"
_OLDEST = "every_release or not (megatron or slow)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and begin with the longest tests.

    With CHUNKGRAPH_REQUIRE_GPU=1 a missing GPU fails. ``multigpu(4)`` is for tests that need more
    than two, which are skipped even then. Processes of a run that divide the tests among them end
    together if what is left at the end is short.
    """
    _refuse_unrepeated(items)
    items.sort(key=lambda item: (_num_gpus_needed(item), _takes_long(item)), reverse=True)
    num_gpus: int | None = None
    for item in items:
        if item.get_closest_marker("megatron") and not HAS_MEGATRON:
            item.add_marker(pytest.mark.skip(reason="megatron-core is not installed"))
        if item.get_closest_marker("slurm") and (missing := _missing_of_slurm()):
            reason = f"Slurm is not installed: no {', '.join(missing)}"
            item.add_marker(pytest.mark.skip(reason=reason))
        if needed := _num_gpus_needed(item):
            if num_gpus is None:
                num_gpus = _count_gpus()
            must_run = os.environ.get("CHUNKGRAPH_REQUIRE_GPU") == "1" and needed <= 2
            if num_gpus < needed and not must_run:
                reason = f"needs {needed} CUDA GPU(s), found {num_gpus}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let at most as many tests of parallel processes use a GPU as it has seats.

    Where ranks share GPUs, each rank takes a seat: it has a context and memory of its own. A test
    that runs in the test process uses the first GPU and takes no seat.

    This hook is the outermost one: waiting for GPUs must not count against a test's time limit.
    """
    needed = _num_gpus_needed(item)
    if needed == 0 or item.get_closest_marker("skip"):
        with hard_limit(_limit_s(item)):
            return (yield)
    gpus = _visible_gpus()
    each = 1
    if needed > len(gpus) > 0:
        needed, each = len(gpus), math.ceil(needed / len(gpus))
    # This process itself uses the first one: CUDA has begun here, and ignores a later choice.
    here = None if item.get_closest_marker("multigpu") else item.get_closest_marker("gpu")
    if here is not None and here.kwargs.get("in_process", not item.get_closest_marker("megatron")):
        needed = 0
    folder, alone = Path(tempfile.gettempdir()), here is not None and here.kwargs.get("alone")
    # A short job is mostly its start, which needs a core for each rank and no GPU.
    cores = len(os.sched_getaffinity(0)) // max(1, len(gpus))
    seats = int(os.environ.get("CHUNKGRAPH_TESTS_PER_GPU", "0")) or max(1, cores * 3 // 4)
    with (
        pytest.MonkeyPatch.context() as environment,
        gpus_held(needed, gpus, folder, alone=bool(alone), seats=seats, each=each) as held,
        hard_limit(_limit_s(item)),
    ):
        if held:
            environment.setenv("CUDA_VISIBLE_DEVICES", ",".join(held))
        return (yield)


@contextlib.contextmanager
def hard_limit(seconds: float) -> Iterator[None]:
    """End this process at a time limit, with the tracebacks of its threads.

    pytest-timeout needs Python to run for that, which it does not where a thread waits for a lock
    without giving other threads a turn. Not in a debugger.
    """
    if sys.gettrace() is not None:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _limit_s(item: pytest.Item) -> float:
    """Return a limit well beyond that of the test."""
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker is not None and marker.args else item.config.getini("timeout")
    return float(limit or 180) + 60.0


@contextlib.contextmanager
def gpus_held(
    num: int,
    gpus: Sequence[str],
    folder: Path,
    *,
    alone: bool = False,
    seats: int = 1,
    each: int = 1,
) -> Iterator[list[str]]:
    """Wait for ``each`` of the ``seats`` of ``num`` of these GPUs.

    Args:
        num: number of GPUs, taken from the end of the list; 0: the first one, without a seat.
            More than there are: do not wait; the test reports what it lacks.
        gpus: as CUDA_VISIBLE_DEVICES names them.
        folder: where the lock files are.
        alone: where ``num`` is 0: share the GPU with no test, with a seat or without.
        seats: number of seats of each GPU.
        each: number of seats to take; above 1, ``num`` is the number of GPUs, or 0.
    """
    lock = f"chunkgraph-test-gpu-{os.getuid()}-{{}}.lock".format
    seats, num_seats = max(each, seats), num * each
    held: list[str] = []
    with contextlib.ExitStack() as locks:
        # One test waits at a time; otherwise one that needs all GPUs would never get them.
        with contextlib.ExitStack() as queue:
            _lock(queue, folder / lock("queue"), fcntl.LOCK_EX)
            if num == 0 and gpus:
                _lock(locks, folder / lock(gpus[0]), fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            while len(held) < num_seats and num <= len(gpus):
                for seat, gpu in itertools.product(range(seats), reversed(gpus)):
                    if len(held) == num_seats or held.count(gpu) == each:
                        continue
                    with contextlib.ExitStack() as both:
                        if _lock(both, folder / lock(f"{gpu}-{seat}")) and _lock(
                            both, folder / lock(gpu), fcntl.LOCK_SH | fcntl.LOCK_NB
                        ):
                            locks.enter_context(both.pop_all())
                            held.append(gpu)
                if len(held) < num_seats:
                    time.sleep(0.05)
        yield sorted({*held}, key=gpus.index)


def _num_gpus_needed(item: pytest.Item) -> int:
    if multigpu := item.get_closest_marker("multigpu"):
        return multigpu.args[0] if multigpu.args else 2
    return 1 if item.get_closest_marker("gpu") else 0


def _refuse_unrepeated(items: list[pytest.Item]) -> None:
    """Refuse a mark for both environments on a test that already runs in both."""
    marked = [item for item in items if item.get_closest_marker("every_release")]
    wrong = [item.nodeid for item in marked if not item.get_closest_marker("megatron")]
    if wrong:
        raise pytest.UsageError(f"marked `every_release`, but not `megatron`: {', '.join(wrong)}")


def _takes_long(item: pytest.Item) -> bool:
    is_slow = item.get_closest_marker("slow") is not None
    return is_slow or not _JOB_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def _count_gpus() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count() * _ranks_of_each_gpu()


def _ranks_of_each_gpu() -> int:
    return 4 if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else 1


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def _missing_of_slurm() -> list[str]:
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
    # Daemons are where only root's PATH leads.
    path = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"
    return [program for program in programs if shutil.which(program, path=path) is None]


@pytest.fixture(scope="session")
def once(pytestconfig: pytest.Config) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the cases unchanged; none in `make test` or with the oldest release of Megatron.

    Use it in a test marked ``every_release``, for cases that show nothing more about a release
    than the test's other cases. They run in `make test-slow` with the newest release of Megatron,
    and without ``-m``.
    """
    is_short = pytestconfig.getoption("markexpr") in (_SHORT, _OLDEST)
    return lambda cases: {} if is_short else cases


# Below those of outgoing connections, in blocks of which each test process takes one.
_FIRST_PORT, _NUM_PORTS, _NUM_BLOCKS = 20000, 250, 40


@pytest.fixture(scope="session")
def free_port() -> Iterator[Callable[[], int]]:
    """Return TCP ports that no other test process of this machine gets.

    A port without a listener is not enough: two processes may pick the same one before either
    of their jobs listens, and both jobs then meet at one store.
    """
    with contextlib.ExitStack() as held:
        folder = Path(tempfile.gettempdir())
        blocks = range(_NUM_BLOCKS)
        lock = "chunkgraph-test-ports-{}.lock".format
        block = next((b for b in blocks if _lock(held, folder / lock(b))), None)
        assert block is not None, "every block of ports is in use by other test processes"
        first = _FIRST_PORT + _NUM_PORTS * block
        ports = itertools.cycle(range(first, first + _NUM_PORTS))
        yield lambda: next(filter(_is_free, ports))


def _lock(held: contextlib.ExitStack, path: Path, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> bool:
    """Try to lock a file, which may be another user's; return whether this process holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return False
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        os.close(descriptor)
        return False
    held.callback(os.close, descriptor)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@pytest.fixture(params=["recorder", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> object:
    """Return each implementation of the graph contract in turn; CUDA graphs need a GPU."""
    from chunkgraph.graphs import CUDABackend, RecorderBackend

    return RecorderBackend() if request.param == "recorder" else CUDABackend()


@pytest.fixture
def restored_sigterm() -> Iterator[None]:
    """Restore what the command replaces in this process."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def has_ended() -> Callable[[int], bool]:
    """Return whether a process ends within half a minute."""
    return _has_ended


def _has_ended(pid: int, within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            # A zombie has ended; where no init reaps it, its entry stays.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False
