"""Jobs of two ranks, one of which stops itself: ``stopping_ranks.py FOLDER CLASS...``.

The ranks are forked from this process, which has imported torch, and have no launcher: rank 0
serves the store. The rank that is not stopped writes what ended it, and when.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from chunkgraph.jobs.processes import die_with_parent
from chunkgraph.pipelining import GraphedSchedule, GraphedStage

TIMEOUT_S = 6
MOMENTS = {"warmup": 0, "capture": 1, "replay": 2}
WIDTH = 4


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Layer(nn.Linear):
    """Stops its rank when it is called with ``stops`` set: while it is captured."""

    stops = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Layer.stops:
            stop()
        return super().forward(x)


class Stage(GraphedStage):
    """Stops its rank before the second forward of the step of this number."""

    step = last = -1

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if Stage.step == Stage.last and fwd_chunk_id == 1:
            stop()
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


def train(name: str, moment: str, *, stops: bool, num_steps: int = 4) -> None:
    """Train on this rank, which stops in the warmup, the capture or the second replay."""
    cls, rank = getattr(pipelining, name), dist.get_rank()
    indices = [rank] if issubclass(cls, PipelineScheduleSingle) else [rank, rank + 2]
    if "ZBV" in name:
        indices = [rank, 3 - rank]
    num_stages = 2 * len(indices)
    stages = [Stage(Layer(WIDTH, WIDTH), i, num_stages, torch.device("cpu")) for i in indices]

    def make(count: int) -> Any:
        given = stages[0] if len(stages) == 1 else stages
        return cls(given, count, loss_fn=nn.functional.mse_loss)

    schedules = GraphedSchedule(stages, make, (4,))
    x = torch.randn(8, WIDTH)
    Stage.last = MOMENTS[moment] if stops and moment != "capture" else -1
    for step in range(num_steps):
        Stage.step = step
        Layer.stops = stops and moment == "capture" and step == 1
        args = (x,) if 0 in indices else ()
        target = {"target": x} if num_stages - 1 in indices else {}
        schedules.step(*args, **target)


def run_rank(rank: int, port: int, name: str, moment: str, *, stops: bool) -> None:
    timeout = timedelta(seconds=TIMEOUT_S)
    url = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2, timeout=timeout)
    train(name, moment, stops=stops)


def run_job(folder: Path, name: str, moment: str, stopped: int, port: int) -> Iterator[int]:
    """Start the ranks of a job; yield their process ids."""
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            try:
                run_rank(rank, port, name, moment, stops=rank == stopped)
                text = "trained to the end"
            except BaseException:
                text = traceback.format_exc()
            (folder / f"{name} {moment} {stopped}").write_text(text)
            sys.exit(1)
        yield pid


def main(folder: Path, names: list[str], port: int) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    __import__("torch._dynamo")
    todo = list(product(names, MOMENTS, range(2)))
    for first in range(0, len(todo), 6):
        jobs = []
        for name, moment, stopped in todo[first : first + 6]:
            pids = list(run_job(folder, name, moment, stopped, port))
            jobs.append(((name, moment, stopped), pids, time.monotonic()))
            port += 1
        left = list(jobs)
        while left and time.monotonic() < jobs[-1][2] + TIMEOUT_S + 60:
            for job in list(left):
                case, pids, start = job
                if os.waitpid(pids[1 - case[2]], os.WNOHANG)[0]:
                    print(*case, round(time.monotonic() - start, 1), flush=True)
                    left.remove(job)
            time.sleep(0.05)
        for case, pids, _ in left:
            print("HANGS", *case)
        for job in jobs:
            for pid in job[1]:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except OSError:
                    pass
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(Path(sys.argv[1]), sys.argv[3:], int(sys.argv[2])))
