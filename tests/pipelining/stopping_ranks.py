"""Jobs of two ranks, one of which stops itself: ``stopping_ranks.py FOLDER CLASS...``.

The ranks are forked from this process, which has imported torch, and have no launcher: rank 0
serves the store. Printed is how long after the stop the other rank of each job ended; the folder
has its error. Under torchrun, ``stopping_ranks.py CLASS MOMENT RANK`` is one such job.
"""

from __future__ import annotations

import gc
import importlib
import logging
import math
import os
import signal
import socket
import sys
import time
import warnings
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore, pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from chunkgraph.jobs.processes import die_with_parent
from chunkgraph.pipelining import GraphedSchedule, GraphedStage

TIMEOUT_S = 6  # also in the test
MOMENTS = {"warmup": 0, "capture": 1, "replay": 2}
LIMIT_S = TIMEOUT_S + 30
WIDTH = 4
Case = tuple[str, str, int]  # class of the schedule, moment, rank that is stopped


def stop() -> None:
    sys.stderr.write("stops now\n")
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
    """Train on this rank, which stops in a step of one kind, or before groups are made."""
    if moment == "start":
        dist.barrier()  # in torch's own start, a store that stops is waited for without end
        if stops:
            stop()
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


def run_rank(name: str, moment: str, *, stops: bool, **place: Any) -> None:
    """Train as one rank; without its place in the job, as that of the environment."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S), **place)
    train(name, moment, stops=stops)


def start_rank(folder: Path, case: Case, rank: int, listener: socket.socket) -> int:
    """Fork a rank, which writes its error into the folder; return its process id.

    Rank 0 takes the open socket. If it opened the port again, another job could have it by then,
    and torch lets rank 1 wait there without end.
    """
    if pid := os.fork():
        return pid
    die_with_parent()
    name, moment, stopped = case
    try:
        store = TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=rank == 0,
            timeout=timedelta(seconds=TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()) if rank == 0 else None,
        )
        listener.close()
        run_rank(name, moment, stops=rank == stopped, store=store, rank=rank, world_size=2)
    except Exception as error:  # noqa: BLE001
        (folder / " ".join(map(str, case))).write_text(str(error))
    sys.exit(1)


def run_jobs(folder: Path, cases: list[Case]) -> None:
    """Run several jobs at a time, and kill what is left of them; most of their time is waiting.

    Starts do not count: they wait for processors and names of hosts.
    """
    jobs: dict[Case, list[int]] = {}
    for case in cases:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            jobs[case] = [start_rank(folder, case, rank, listener) for rank in range(2)]
    stopped: dict[Case, float] = {}
    ended: dict[Case, float] = {}
    deadline = time.monotonic() + 2 * LIMIT_S
    while len(ended) < len(jobs) and time.monotonic() < deadline:
        time.sleep(0.05)
        for case in jobs.keys() - ended:
            pids = jobs[case]
            if case not in stopped and os.waitpid(pids[case[2]], os.WNOHANG | os.WUNTRACED)[0]:
                stopped[case] = time.monotonic()
            if os.waitpid(pids[1 - case[2]], os.WNOHANG)[0]:
                ended[case] = time.monotonic() - stopped.get(case, -math.inf)
    for case, pids in jobs.items():
        for rank, pid in enumerate(pids):
            if rank == case[2] or case not in ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        print(*case, ended.get(case, math.inf), sep=",", flush=True)


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")
    gc.freeze()  # else the end of every rank goes through all objects of this process
    cases = [*product(names, MOMENTS, range(2)), *product(names[:1], ["start"], range(2))]
    for first in range(0, len(cases), 8):
        run_jobs(folder, cases[first : first + 8])


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(*sys.argv[1:3], stops=os.environ["RANK"] == sys.argv[3])
    else:
        die_with_parent()
        main(Path(sys.argv[1]), sys.argv[2:])
