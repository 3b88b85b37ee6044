"""`CapturedOptimizer`: one of torch's optimizers in an own loop or a torch pipeline."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from chunkgraph.errors import ConfigError, refuse_deepcopy
from chunkgraph.graphs import GraphBackend
from chunkgraph.memory.sleeping import refuse_asleep
from chunkgraph.optimizer.state import OptimizerState, SettledGradients
from chunkgraph.optimizer.step_graph import StepGraph


class CapturedOptimizer:
    """Clip gradients and step an optimizer, as one graph after a first eager step.

    All steps, also eager ones, read the learning rate from a tensor: in float32 on a GPU. With an
    optimizer whose learning rate is such a tensor they equal eager training to the last bit.

    Args:
        optimizer: torch's Adam or AdamW with ``fused=True`` or ``capturable=True``, or SGD with
            ``fused=True``.
        backend: Makes the graph.
        max_norm: Gradients are scaled such that the norm of all together is at most this; None:
            they are not scaled.
        group: Process group whose ranks have the other parameters, such as the stages of a
            pipeline; the norm is that of all.
        on_failure: After a capture that failed, ``raise`` the error, or stay ``eager``.

    Raises:
        ConfigError: No graph can hold a step of this optimizer.

    Attributes:
        optimizer: The optimizer.
        graph: The graph; it counts captures and replays.
    """

    __deepcopy__ = refuse_deepcopy

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        backend: GraphBackend,
        *,
        max_norm: float | None = None,
        group: dist.ProcessGroup | None = None,
        on_failure: str = "raise",
    ) -> None:
        self.optimizer = optimizer
        self._refuse()
        self._max_norm, self._group = max_norm, group
        self._state = OptimizerState(optimizer)
        self._parameters = [p for g in optimizer.param_groups for p in g["params"]]
        self._gradients = SettledGradients(self._parameters)
        agree = None if group is None else self._agree
        self.graph = StepGraph("optimizer", backend, self._facts, self._capture, agree, on_failure)

    @torch.no_grad()
    def step(self) -> torch.Tensor | None:
        """Clip the gradients and step the optimizer; the host does not wait for the device.

        Returns:
            The norm of the gradients before they were clipped, on the device; None without
            ``max_norm``.

        Raises:
            CaptureError: A graph cannot hold the step, and ``on_failure`` is ``raise``.
            ConfigError: The optimizer has changed such that no graph can hold its step.
            SlotError: A parameter or gradient lies in memory that sleeps.
        """
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        if [*map(id, parameters)] != [*map(id, self._parameters)]:  # replaced, or a group is new
            self._parameters, self._gradients = parameters, SettledGradients(parameters)
        refuse_asleep("the optimizer", self._parameters, with_gradients=True)
        self._state.write()
        if not self.graph.is_ready():
            self._refuse()
            with self._state.on_device():
                norm = self._work()
            self.graph.end_eager_step()
            return norm
        norm = self.graph.replay()
        return None if norm is None else norm.clone()

    def release(self) -> None:
        """Free the graph; a later step captures again. Call it before ``group`` is destroyed."""
        self.graph.release()
        self._gradients = SettledGradients(self._parameters)

    def _refuse(self) -> None:
        if problem := OptimizerState.problem_of(self.optimizer):
            raise ConfigError(
                f"capture_optimizer: {problem}. Change that, or call optimizer.step() itself."
            )

    def _agree(self, values: list[int]) -> list[int]:
        tensor = torch.tensor(values)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tensor.tolist()

    def _facts(self) -> Hashable:
        return self._gradients.settle(), self._state.facts(), self._max_norm

    def _capture(self) -> Any:
        with self._state.on_device(captures=True):
            return self._work()

    def _work(self) -> torch.Tensor | None:
        norm = None
        if self._max_norm is not None:
            norm = get_total_norm([p.grad for p in self._parameters if p.grad is not None])
            if self._group is not None:
                norm = norm.square()
                dist.all_reduce(norm, group=self._group)
                norm = norm.sqrt()
            clip_grads_with_norm_(self._parameters, self._max_norm, norm)
        self.optimizer.step()
        return norm
