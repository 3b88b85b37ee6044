"""A case of `run_cases`: a job with a fault, next to the same job without graphs."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from gathering import of_ranks

from chunkgraph.engine import CaptureOptions
from chunkgraph.engine.bits import same_bits
from chunkgraph.errors import ChunkGraphError
from chunkgraph.graphs import RecorderBackend, host_call
from chunkgraph.graphs.recorder.recorded_graph import RecordedGraph
from chunkgraph.megatron.attachment import MegatronChunkGraphs, attach
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.settings import Config
from chunkgraph.trainer.batches import SequenceBatches
from chunkgraph.trainer.model import build_model, build_optimizer, zero_gradients
from chunkgraph.trainer.setup import seed_everything
from chunkgraph.trainer.trained_model import forward_step, shared_loss

Step = dict[str, Any]
CPU = torch.device("cpu")


class Job:
    """Training and evaluation steps of one model, as a user's loop runs them.

    Args:
        config: configuration of the model; steps choose their numbers of microbatches.
        backend: backend of this rank's graphs; None: Megatron alone.
    """

    def __init__(self, config: Config, backend: RecorderBackend | None) -> None:
        seed_everything(config.train.seed, CPU)
        self.config = config
        self.chunks = build_model(config, CPU)
        self.optimizer = build_optimizer(config, self.chunks)
        pipeline = import_megatron("megatron.core.pipeline_parallel")
        self.schedule = pipeline.get_forward_backward_func()
        self.graphs: MegatronChunkGraphs | None = None
        if backend is not None:
            self.graphs = attach(
                self.chunks,
                scope=config.capture.scope,
                options=CaptureOptions(**config.capture.options),
                schedule=config.pipeline.schedule,
                backend=backend,
            )
            self.schedule = self.graphs.wrap_forward_backward(self.schedule)
        self.losses: list[float] = []

    def run(self, number: int, step: Step) -> None:
        """Run a step of ``num_microbatches``, which may be an evaluation or have another length."""
        evaluates = bool(step.get("evaluates"))
        for chunk in self.chunks:
            chunk.train(not evaluates)
        zero_gradients(self.chunks, self.optimizer)
        length = step.get("seq_length", self.config.model.seq_length)
        of_length = self.config.replace(model={"seq_length": length}, train={"seed": 1})
        batches = SequenceBatches(of_length, CPU)
        count = step["num_microbatches"]
        with torch.set_grad_enabled(not evaluates):
            losses = self.schedule(
                forward_step_func=forward_step,
                data_iterator=[batches.step(number, count) for _ in self.chunks],
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
    """A handler of SIGTERM like Megatron's: it sets a flag, which all ranks read after a step."""

    def __init__(self, state: Callable[[], str]) -> None:
        self.seen_in: list[str] = []
        self._state = state

    def __call__(self, *_: object) -> None:
        self.seen_in.append(self._state())

    def anywhere(self) -> bool:
        flag = torch.tensor([len(self.seen_in)])
        dist.all_reduce(flag)
        return bool(flag.item())


class SignallingBackend(RecorderBackend):
    """Sends this process a signal once, in the first capture or the first replay.

    A watching thread could miss the moment on a busy machine.

    Args:
        limit_bytes: as in `RecorderBackend`.
        when: "capture" or "replay"; None: never.
        number: number of the signal.
    """

    def __init__(self, limit_bytes: int | None, when: str | None, number: int) -> None:
        super().__init__(limit_bytes)
        self.state: Callable[[], str] = str
        self._when = when
        self._number = number

    @contextmanager
    def capture(self, *args: Any, **kwargs: Any) -> Iterator[RecordedGraph]:
        """Capture as `RecorderBackend` does; send the signal first, if it is due."""
        with super().capture(*args, **kwargs) as graph:
            host_call(self._send)
            yield graph

    def _send(self) -> None:
        if self._when is not None and self.state() == self._when:
            self._when = None
            os.kill(os.getpid(), self._number)


@contextmanager
def handled(job: Job, backend: SignallingBackend) -> Iterator[Terminated]:
    """Record the state of the job in which its signal arrives."""
    assert job.graphs is not None
    engine = job.graphs.engine
    is_capturing = import_megatron("megatron.core.transformer.cuda_graphs").is_graph_capturing

    def state() -> str:
        return "capture" if is_capturing() else engine.mode.value

    backend.state = state
    handler = Terminated(state)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield handler
    finally:
        signal.signal(signal.SIGTERM, before)


def run(config: Config, _device: Any, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the case; return the results in order of ranks."""
    faulty = dist.get_rank() == dist.get_world_size() - 1
    steps: list[Step] = case["steps"]
    os.environ["FAULTY"] = str(int(faulty)) if case.get("layer_fails") else ""
    backend = SignallingBackend(
        case.get("limit_bytes") if faulty else None,
        case.get("signalled") if faulty else None,
        case.get("signal", signal.SIGTERM),
    )
    job = Job(config, backend)
    assert job.graphs is not None
    message = ""
    num_done = 0
    with (
        warnings.catch_warnings(record=True) as records,
        handled(job, backend) as handler,
    ):
        warnings.simplefilter("always")
        for number, step in enumerate(steps):
            try:
                job.run(number, step)
            except ChunkGraphError as error:
                if case.get("may_end"):
                    raise
                message = str(error)
                break
            num_done += 1
            if handler.anywhere():
                break
    state = [torch.get_rng_state(), *job.parameters()]
    os.environ["FAULTY"] = ""
    eager = Job(config.replace(pipeline={"schedule": "auto"}), None)
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
        "warnings": [text for w in records if "slot" in (text := str(w.message))],
        "error": message,
        "failure": str(job.graphs.engine.failure or ""),
        "handler_ran_in": handler.seen_in,
    }
    job.graphs.detach()
    return of_ranks(mine)
