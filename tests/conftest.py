"""What every room's tests share: hypothesis without deadlines, skips that give a reason, order."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Read when torch is first imported, here and by what tests start. With tensors this small more
# threads only wait for each other, and with several test processes they also wait for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As what is started on a CPU has it, whose ranks get it from the command: Megatron's import then
# loads no compiler. On a GPU its small functions are compiled in tests as they are in training.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# A shared machine stalls now and then: a deadline would test the machine.
hypothesis.settings.register_profile("chunkgraph", deadline=None, print_blob=True)
hypothesis.settings.load_profile("chunkgraph")


# Collections would walk over every module of torch and Megatron while these are imported, a second
# of each test process's time, and again and again while tests run: see `pytest_collection_finish`.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collect what tests leave behind, not what was there before."""
    gc.collect()
    gc.freeze()
    gc.enable()


# What starts the processes of whole jobs, for the most part; such tests take longest.
_JOB_FIXTURES = {"run_cases", "run_worker", "run_to_its_end", "run_ranks", "launched", "marked"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and begin with the longest tests.

    With CHUNKGRAPH_REQUIRE_GPU=1 a missing GPU fails. ``multigpu(4)`` is for tests that need more
    than two, which are skipped even then. Processes of a run that divide the tests among them end
    together if what is left at the end is short.
    """
    items.sort(key=_takes_long, reverse=True)
    num_gpus: int | None = None
    for item in items:
        if item.get_closest_marker("megatron") and not _has_megatron():
            item.add_marker(pytest.mark.skip(reason="megatron-core is not installed"))
        if item.get_closest_marker("slurm") and (missing := _missing_of_slurm()):
            reason = f"Slurm is not installed: no {', '.join(missing)}"
            item.add_marker(pytest.mark.skip(reason=reason))
        multigpu = item.get_closest_marker("multigpu")
        needed = (multigpu.args[0] if multigpu.args else 2) if multigpu else 1
        if multigpu or item.get_closest_marker("gpu"):
            if num_gpus is None:
                num_gpus = _count_gpus()
            must_run = os.environ.get("CHUNKGRAPH_REQUIRE_GPU") == "1" and needed <= 2
            if num_gpus < needed and not must_run:
                reason = f"needs {needed} CUDA GPU(s), found {num_gpus}"
                item.add_marker(pytest.mark.skip(reason=reason))


def _takes_long(item: pytest.Item) -> bool:
    is_slow = item.get_closest_marker("slow") is not None
    return is_slow or not _JOB_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def _count_gpus() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    # Then two ranks may share one.
    ranks_of_each = 2 if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else 1
    return torch.cuda.device_count() * ranks_of_each


def _missing_of_slurm() -> list[str]:
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
    # Daemons are where only root's PATH leads.
    path = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"
    return [program for program in programs if shutil.which(program, path=path) is None]


def _has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="session")
def once(pytestconfig: pytest.Config) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Gives the cases that it is given back; none of them in a run of ``-m megatron``.

    Such a run repeats what is marked with another release of Megatron. For cases of a marked test
    that show nothing about the release which the test's other cases do not.
    """
    is_repeated = pytestconfig.getoption("markexpr") == "megatron"
    return lambda cases: {} if is_repeated else cases


@pytest.fixture(params=["recorder", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> object:
    """Each implementation of the graph contract in turn; CUDA graphs where there is a GPU."""
    from chunkgraph.graphs import CUDABackend, RecorderBackend

    return RecorderBackend() if request.param == "recorder" else CUDABackend()
