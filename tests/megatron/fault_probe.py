"""One job with a fault in it, beside the same job without graphs; run by ``run_cases.py``."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.config import Config
from chunkgraph.data import PackedText
from chunkgraph.engine import StepMode
from chunkgraph.engine.verify import same_bits
from chunkgraph.errors import ChunkGraphError
from chunkgraph.graphs import RecorderBackend
from chunkgraph.megatron.compat import import_megatron
from chunkgraph.megatron.loop import capture_options, forward_step, microbatches, shared_loss
from chunkgraph.megatron.model import build_model
from chunkgraph.megatron.optimizer import build_optimizer, zero_gradients
from chunkgraph.megatron.plugin import MegatronChunkGraphs, attach
from chunkgraph.megatron.processes import seed_everything

Step = dict[str, Any]
CPU = torch.device("cpu")


class Job:
    """Training and evaluation steps of one model, as a user's own loop would run them.

    Args:
        config: of the model; every step gives its own number of microbatches.
        limit_bytes: of the memory of this rank's graphs; None: no limit.
        use_graphs: False: Megatron alone.
    """

    def __init__(self, config: Config, limit_bytes: int | None, *, use_graphs: bool) -> None:
        seed_everything(config.train.seed, CPU)
        self.config = config
        self.chunks = build_model(config, CPU)
        self.optimizer = build_optimizer(config, self.chunks)
        pipeline = import_megatron("megatron.core.pipeline_parallel")
        self.schedule = pipeline.get_forward_backward_func()
        self.graphs: MegatronChunkGraphs | None = None
        if use_graphs:
            self.graphs = attach(
                self.chunks,
                scope=config.capture.scope,
                options=capture_options(config),
                backend=RecorderBackend(limit_bytes),
            )
            self.schedule = self.graphs.wrap_forward_backward(self.schedule)
        self.losses: list[float] = []

    def run(self, number: int, step: Step) -> None:
        """One step: ``num_microbatches``, and whether it only evaluates, or has another length."""
        evaluates = bool(step.get("evaluates"))
        for chunk in self.chunks:
            chunk.train(not evaluates)
        zero_gradients(self.chunks, self.optimizer)
        length = step.get("seq_length", self.config.model.seq_length)
        text = PackedText.from_file(None, seq_length=length, seed=1)
        count = step["num_microbatches"]
        with torch.set_grad_enabled(not evaluates):
            losses = self.schedule(
                forward_step_func=forward_step,
                data_iterator=[
                    microbatches(self.config, text, number, count, CPU) for _ in self.chunks
                ],
                model=self.chunks,
                num_microbatches=count,
                seq_length=step.get("announced", length),
                micro_batch_size=self.config.train.micro_batch_size,
                forward_only=evaluates,
            )
        if not evaluates:
            self.optimizer.step()
        self.losses.append(shared_loss(losses, CPU))

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for chunk in self.chunks for p in chunk.parameters()]


class Terminated:
    """A handler of SIGTERM as Megatron's: it sets a flag, which all ranks ask for after a step."""

    def __init__(self, state: Callable[[], str]) -> None:
        self.seen_in: list[str] = []
        self._state = state

    def __call__(self, *_: object) -> None:
        self.seen_in.append(self._state())

    def anywhere(self) -> bool:
        flag = torch.tensor([len(self.seen_in)])
        dist.all_reduce(flag)
        return bool(flag.item())


@contextmanager
def signalled(job: Job, when: str | None, number: int) -> Iterator[Terminated]:
    """Send this process a signal once, during the capture or during a replayed step."""
    assert job.graphs is not None
    engine = job.graphs.engine
    is_capturing = import_megatron("megatron.core.transformer.cuda_graphs").is_graph_capturing

    def state() -> str:
        return "capture" if is_capturing() else engine.mode.value

    handler = Terminated(state)
    before = signal.signal(signal.SIGTERM, handler)
    wanted = {"capture": "capture", "replay": StepMode.REPLAY.value}.get(when or "")

    def send() -> None:
        end = time.monotonic() + 60
        while state() != wanted and time.monotonic() < end:
            time.sleep(0.0005)  # a thread that only spun would keep the step from its end
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    if wanted is not None:
        thread.start()
    try:
        yield handler
    finally:
        if wanted is not None:
            thread.join(timeout=60)
        signal.signal(signal.SIGTERM, before)


def run(config: Config, case: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank saw, in order of ranks."""
    faulty = dist.get_rank() == dist.get_world_size() - 1
    steps: list[Step] = case["steps"]
    os.environ["FAULTY"] = str(int(faulty)) if case.get("layer_fails") else ""
    job = Job(config, case.get("limit_bytes") if faulty else None, use_graphs=True)
    assert job.graphs is not None
    error = ""
    num_done = 0
    with (
        warnings.catch_warnings(record=True) as caught,
        signalled(
            job,
            case.get("signalled") if faulty else None,
            case.get("signal", signal.SIGTERM),
        ) as handler,
    ):
        warnings.simplefilter("always")
        for number, step in enumerate(steps):
            try:
                job.run(number, step)
            except ChunkGraphError as raised:
                if case.get("may_end"):
                    raise
                error = str(raised)
                break
            num_done += 1
            if handler.anywhere():
                break
    state = [torch.get_rng_state(), *job.parameters()]
    os.environ["FAULTY"] = ""
    eager = Job(config, None, use_graphs=False)
    for number, step in enumerate(steps[:num_done]):
        eager.run(number, step)
    expected = [torch.get_rng_state(), *eager.parameters()]
    mine = {
        "num_done": num_done,
        "losses_equal": [a.hex() == b.hex() for a, b in zip(job.losses, eager.losses, strict=True)],
        "state_equal": all(map(same_bits, state, expected)),
        "fallbacks": dict(job.graphs.counters.fallbacks),
        "replays": job.graphs.counters.replays,
        "sessions": job.graphs.counters.capture_sessions,
        "warnings": [text for w in caught if "slot" in (text := str(w.message))],
        "error": error,
        "failure": str(job.graphs.engine.failure or ""),
        "handler_ran_in": handler.seen_in,
    }
    job.graphs.detach()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
