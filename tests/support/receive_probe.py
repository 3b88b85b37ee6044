"""A job that records where received tensors arrive and what is copied, for test_receive.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from gathering import of_ranks
from host_copies import copied_by_host
from torch.utils._python_dispatch import TorchDispatchMode

from chunkgraph.engine import replay
from chunkgraph.engine.capture import session
from chunkgraph.megatron.attachment import MegatronChunkGraphs, attach
from chunkgraph.settings import Config
from chunkgraph.trainer import trained_model
from chunkgraph.trainer.compare import TrainingRun, run_eager, train

_COPIES = (
    "aten::copy_",
    "aten::_foreach_copy_",
    "aten::clone",
    "aten::_to_copy",
    "aten::contiguous",
)


class _CountCopies(TorchDispatchMode):
    """Counts copies of tensors of one shape, outside of graph replays."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name().split(".")[0]
        targets = args[0] if name == "aten::_foreach_copy_" else args[:1]
        if name in _COPIES:
            self.counts[name] += sum(tuple(t.shape) == self.shape for t in targets)
        return func(*args, **(kwargs or {}))


class Probe:
    """Wraps every call of the schedule."""

    def __init__(self, config: Config, case: dict[str, Any]) -> None:
        self.case = case
        model, train = config.model, config.train
        self.hidden_shape = (model.seq_length, train.micro_batch_size, model.hidden_size)
        self.steps: list[dict[str, Any]] = []
        self.communicators: set[str] = set()
        self.graphs: MegatronChunkGraphs

    def attach(self, chunks: Any, **options: Any) -> MegatronChunkGraphs:
        options["scope"] = self.case.get("scope", "block")
        self.graphs = attach(chunks, **options)
        self.graphs.wrap_forward_backward = self.wrap  # type: ignore[method-assign]
        return self.graphs

    def wrap(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        schedule = forward_backward
        if self.case.get("hides_schedule"):

            def schedule(**keywords: Any) -> Any:
                return forward_backward(**keywords)

        wrapped = MegatronChunkGraphs.wrap_forward_backward(self.graphs, schedule)

        def call(**keywords: Any) -> Any:
            inputs: Counter[str] = Counter()
            keywords["forward_step_func"] = partial(
                self._forward_step, keywords["forward_step_func"], inputs
            )
            keywords.update(self._own_communicator(keywords["model"][0].config))
            receiver = self.graphs.receiver
            before = receiver.num_received_in_place, receiver.num_received_copied
            replays = self.graphs.counters.replays
            with _CountCopies(self.hidden_shape) as copies:
                result = wrapped(**keywords)
            self.steps.append(
                {
                    "replays": self.graphs.counters.replays - replays,
                    "in_place": receiver.num_received_in_place - before[0],
                    "copied": receiver.num_received_copied - before[1],
                    "off_because": receiver.off_because,
                    "copies": sum(copies.counts.values()),
                    "inputs_in_slots": inputs["in slot"],
                    "inputs_elsewhere": inputs["elsewhere"],
                }
            )
            return result

        return call

    def _forward_step(
        self, forward_step: Callable[..., Any], inputs: Counter[str], data: Any, chunk: Any
    ) -> Any:
        module = chunk
        while not hasattr(module, "decoder"):
            module = module.module
        received = module.decoder.input_tensor
        captured = self.graphs.engine._captured
        if received is not None and captured is not None:
            assert received.requires_grad
            assert received.is_leaf
            assert received.grad is None
            index = getattr(module, "vp_stage", None) or 0
            static = {slot.inputs.tensors[0].data_ptr() for slot in captured.slots[index]}
            inputs["in slot" if received.data_ptr() in static else "elsewhere"] += 1
        return forward_step(data, chunk)

    def _own_communicator(self, config: Any) -> dict[str, Any]:
        kind = self.case.get("communicator")
        if kind is None:
            return {}
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.process_groups_config import ProcessGroupCollection

        probe = self

        class Own(P2PCommunicator):  # type: ignore[misc]
            def _communicate(self, **keywords: Any) -> Any:
                probe.communicators.add(type(self).__name__)
                return super()._communicate(**keywords)

        group = parallel_state.get_pipeline_model_parallel_group()
        return {
            "p2p_communicator": {"own": Own, "plain": P2PCommunicator}[kind](group, config),
            "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
        }


def run(
    config: Config, device: torch.device, case: dict[str, Any], eager_of: Callable[..., TrainingRun]
) -> list[dict[str, Any]]:
    """Run the case; return each rank's results of `Probe`, and whether all equals eager.

    The eager run has no overlap, so the comparison also shows that overlap changes no number.
    """
    probe = Probe(config, case)

    def build(*args: Any) -> Any:
        chunks = loop_build(*args)
        for name, value in case.get("megatron", {}).items():
            setattr(chunks[0].config, name, value)
        return chunks

    loop_build = trained_model.build_model
    eager = eager_of(case, lambda: run_eager(config, device))
    with (
        mock.patch.object(trained_model, "build_model", build),
        mock.patch.object(trained_model, "attach", probe.attach),
        copied_by_host(),
    ):
        # The mode that counts copies is a context of a test alone.
        session.refuse_contexts = replay.refuse_contexts = lambda *_: None  # type: ignore[attr-defined]
        results = train(config, device, eager=eager)
    mine = {
        "equal": not any((results.different_parameters, *(s.different for s in results.steps))),
        "steps": probe.steps,
        "communicators": sorted(probe.communicators),
    }
    return of_ranks(mine)
