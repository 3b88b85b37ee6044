"""Forks ranks from a process that has imported torch and Megatron: ``rank_server.py FD HOST``.

Importing them takes seconds of every rank's time, and tests start hundreds of ranks. A forked rank
is otherwise a process like any other: a session, an environment, a log and arguments of its own,
and it ends as the interpreter ends. The server reads one JSON object a line from the socket FD and
answers with one: ``{"arguments": ..., "environment": ..., "log": ...}`` with ``{"pid": ...}``, and
``{"pid": ...}`` with ``{"code": ...}``, null while that rank runs. It ends with the socket. HOST is
what Megatron is imported in: ``core`` for `cpu_host`, ``pretrain`` for `cpu_pretrain_host`.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

from chunkgraph.megatron.worker import die_with_parent

MODULES = (
    *("parallel_state", "pipeline_parallel", "distributed", "optimizer"),
    *("models.gpt", "models.gpt.gpt_layer_specs"),
    *("transformer.moe.moe_layer", "transformer.multi_token_prediction"),
)


def preload(host: str) -> None:
    """Import what ranks need; none of it may start a thread."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as ranks on a CPU have it; torch reads it at once
    import run_cases  # noqa: F401

    from chunkgraph.megatron import compat
    from chunkgraph.megatron.cpu_host import cpu_host
    from chunkgraph.megatron.cpu_pretrain import cpu_pretrain_host

    within = {"core": cpu_host, "pretrain": cpu_pretrain_host}[host]
    with warnings.catch_warnings(), within():
        warnings.simplefilter("ignore")
        for name in MODULES:
            compat.import_megatron(f"megatron.core.{name}")
        if host == "pretrain":
            compat.pretrain_hooks()  # of its training program, which this imports
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    assert num_threads == 1, f"{num_threads} threads: a fork would lose all but one"
    gc.collect()
    gc.freeze()  # so that a rank's collections do not copy all of these pages


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Answer requests; in a forked rank: what it is to do, and None at the end."""
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        for line in stream:
            request = json.loads(line)
            if "arguments" in request:
                pid = os.fork()
                if pid == 0:
                    return request
                answer = {"pid": pid}
            else:
                pid, status = os.waitpid(request["pid"], os.WNOHANG)
                answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
            stream.write(f"{json.dumps(answer)}\n")
            stream.flush()
    return None


def become(request: dict[str, Any]) -> None:
    """Make this process the one that was asked for, up to its own code."""
    os.setsid()
    die_with_parent()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (sys.stdout, sys.stderr):
        os.dup2(log, standard.fileno())
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])


def run(arguments: list[str]) -> None:
    """As ``python arguments`` would."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    die_with_parent()
    preload(sys.argv[2])
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is None:
        os._exit(0)  # nothing of the server's own is to be put in order
    become(asked)
    run(asked["arguments"])
