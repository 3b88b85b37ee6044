"""A pipeline in one process, and small stages for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B
from torch_release import HAS_LOCAL_STAGES

from chunkgraph.pipelining import GraphedSchedule, GraphedStage


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Pipeline:
    """Two stages on one rank, or one, with a graphed schedule."""

    def __init__(
        self,
        *modules: nn.Module,
        counts: Any = (2, 4),
        cls: type = ScheduleInterleaved1F1B,
        dw_builder: Any = None,
        **options: Any,
    ) -> None:
        self.stages = [
            GraphedStage(module, i, len(modules), torch.device("cpu"), dw_builder=dw_builder)
            for i, module in enumerate(modules)
        ]
        self._cls = Schedule1F1B if len(modules) == 1 else cls
        self.schedules = GraphedSchedule(self.stages, self.make, counts, **options)

    def make(self, count: int) -> Any:
        stages = self.stages[0] if self._cls is Schedule1F1B else self.stages
        return self._cls(stages, count, loss_fn=nn.functional.mse_loss)

    def step(self, count: int = 2, *, rows: int = 2, **kwargs: Any) -> Any:
        if len(self.stages) > 1 and not HAS_LOCAL_STAGES:
            pytest.skip("torch 2.11 lets a rank send to itself, which gloo cannot")
        x = torch.ones(rows * count, 4)
        options = {"target": x, "num_microbatches": count, **kwargs}
        return self.schedules.step(x, **options)


@pytest.fixture
def pipeline(one_rank: None) -> Callable[..., Pipeline]:
    return Pipeline
