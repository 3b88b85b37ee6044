"""Forks ranks from a process that has imported torch and Megatron: ``rank_server.py FD PATH HOST``.

Importing them takes seconds of every rank's time, and tests start hundreds of ranks. Otherwise a
forked rank is an ordinary process, with its own session, environment, log and arguments; `run`
describes its end.

FD is a socket that listens at PATH; all processes of a test run connect to it, each while it holds
the lock PATH.lock. The server reads one JSON object per line and answers with one:
``{"arguments": ..., "environment": ..., "log": ...}`` with ``{"pid": ...}``, and ``{"pid": ...}``
with ``{"code": ...}``, null while that rank runs. Ranks end with the connection that started them,
and the server with the last connection.

HOST is the environment of Megatron's import: ``core`` for `cpu_host`, ``pretrain`` for
`cpu_pretrain_host`. The latter's server is also forked, from one that has imported most of its
modules: ``{"host": ..., "path": ...}``.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

from collector import collect_new_objects

from chunkgraph.jobs.processes import die_with_parent

MODULES = (
    *("parallel_state", "pipeline_parallel", "distributed", "optimizer"),
    *("models.gpt", "models.gpt.gpt_layer_specs"),
    *("transformer.moe.moe_layer", "transformer.multi_token_prediction"),
)
# Imported by functions of other modules.
OPTIONAL_MODULES = ("megatron.core.models.mimo",)
PRETRAIN_MODULES = (
    "megatron.training.datasets.sft_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.tokenizers.text",
    "chunkgraph.launch.__main__",
    "chunkgraph.launch.hooks",
)


def remember_docstrings() -> None:
    """Parse the sources of Megatron's config classes once instead of in every rank.

    Megatron reads the help of its flags from them, which takes half a second of each rank.
    """
    from megatron.training import argument_utils, arguments

    factory = argument_utils.ArgumentGroupFactory
    docstrings_of = factory._get_field_docstrings
    docstrings: dict[type, dict[str, str]] = {}

    def remembered(self: Any, config_class: type) -> dict[str, str]:
        if config_class not in docstrings:
            docstrings[config_class] = docstrings_of(self, config_class)
        return docstrings[config_class]

    factory._get_field_docstrings = remembered
    arguments.add_megatron_arguments(argparse.ArgumentParser())


def shrink_mock_data() -> None:
    """Make Megatron's mock data small: an index of all of it takes seconds of a first rank."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 2000


def preload(host: str) -> None:
    """Import what ranks need; none of it may start a thread."""
    gc.disable()  # collections take a quarter of the imports' time
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as on ranks on a CPU; torch reads it at once
    import run_cases  # noqa: F401

    from chunkgraph.launch.patches import pretrain_hooks
    from chunkgraph.megatron.core.access import import_megatron
    from chunkgraph.megatron.cpu.host import cpu_host
    from chunkgraph.megatron.cpu.pretrain import cpu_pretrain_host

    within = {"core": cpu_host, "pretrain": cpu_pretrain_host}[host]
    with warnings.catch_warnings(), within():
        warnings.simplefilter("ignore")
        for name in MODULES:
            import_megatron(f"megatron.core.{name}")
        importlib.import_module("chunkgraph.pipelining")
        importlib.import_module("chunkgraph.settings.rules")
        for name in filter(importlib.util.find_spec, OPTIONAL_MODULES):
            importlib.import_module(name)
        if host == "pretrain":
            pretrain_hooks()  # the training program, with its imports
            for name in PRETRAIN_MODULES:
                importlib.import_module(name)
            remember_docstrings()
            shrink_mock_data()
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # a rank ends without freeing these modules
    assert num_threads == 1, f"{num_threads} threads: a fork would lose all but one"
    collect_new_objects()  # a rank's collections would copy all of these pages


class Server:
    """Answers the requests of all connections in one thread."""

    def __init__(self, listener: socket.socket, path: Path) -> None:
        self._path = path
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._listener = listener
        self._running: dict[socket.socket, set[int]] = {}

    def serve(self) -> dict[str, Any] | None:
        """Serve until the last connection ends; in a forked process return its request."""
        while True:
            for key, _ in self._selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._accept()
                elif (line := _read_line(connection)) is None:
                    self._forget(connection)
                elif (request := self._answer(connection, json.loads(line))) is not None:
                    self._close()
                    return request
            if not self._running and self._is_over():
                return None

    def _is_over(self) -> bool:
        """Return whether the server is over; after True no process can connect."""
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._selector.select(timeout=0):
                return False
            self._path.unlink()
            return True

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._running[connection] = set()
        self._selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> dict[str, Any] | None:
        running = self._running[connection]
        if "host" in request:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(request["path"])
                listener.listen()
                pid = os.fork()
                if pid == 0:
                    return {**request, "listener": listener.detach()}
            answer = {"pid": pid}
        elif "arguments" in request:
            pid = os.fork()
            if pid == 0:
                return request
            running.add(pid)
            answer = {"pid": pid}
        else:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            running.discard(pid)
            answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        connection.sendall(f"{json.dumps(answer)}\n".encode())
        return None

    def _forget(self, connection: socket.socket) -> None:
        for pid in self._running.pop(connection):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._selector.unregister(connection)
        connection.close()

    def _close(self) -> None:
        self._selector.close()
        for connection in (self._listener, *self._running):
            connection.close()


def _read_line(connection: socket.socket) -> bytes | None:
    """Read a request, or return None at the end; a connection has at most one in progress."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            part = connection.recv(1 << 16)
        except ConnectionError:
            part = b""
        if not part:
            return None
        line += part
    return line


def become(request: dict[str, Any]) -> None:
    """Give this process the requested session, log and environment."""
    os.setsid()
    die_with_parent()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (sys.stdout, sys.stderr):
        os.dup2(log, standard.fileno())
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])


def run(arguments: list[str]) -> None:
    """Run ``python arguments`` and end this process.

    A program that ends well ends without freeing its modules, which takes half a second. One that
    raises ends as the interpreter does.
    """
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))  # as Python does for a script
        runpy.run_path(arguments[0], run_name="__main__")
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(listener: int, path: str, host: str) -> dict[str, Any]:
    """Serve until the last connection ends and exit; in a forked rank return its request."""
    preload(host)
    request = Server(socket.socket(fileno=listener), Path(path)).serve()
    if request is None:
        os._exit(0)  # the server has nothing to clean up
    if "host" in request:
        die_with_parent()  # the parent ends after all processes that are connected here
        return serve(request["listener"], request["path"], request["host"])
    return request


if __name__ == "__main__":
    request = serve(int(sys.argv[1]), *sys.argv[2:])
    become(request)
    run(request["arguments"])
