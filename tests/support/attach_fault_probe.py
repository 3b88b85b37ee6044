"""A case of `run_cases`: errors of one rank within `attach`, at every place, reach all ranks."""

from __future__ import annotations

import time
from itertools import product
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from chunkgraph.megatron import attach
from chunkgraph.megatron.feature import Feature
from chunkgraph.megatron.features import FEATURES
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import seed_everything

METHODS = ("facts", "prepare", "of", "wrap", "bind")


class Failing(Feature):
    """Raises on rank 1, in one method."""

    where: ClassVar[str] = ""

    @classmethod
    def fail_in(cls, method: str) -> None:
        if method == cls.where and dist.get_rank() == 1:
            raise MemoryError(f"no room for {method}")

    @classmethod
    def facts(cls, site: Any) -> dict[str, object]:
        cls.fail_in("facts")
        return {}

    @classmethod
    def prepare(cls, *_: Any) -> None:
        cls.fail_in("prepare")

    @classmethod
    def of(cls, *_: Any) -> Failing:
        cls.fail_in("of")
        return cls()

    def wrap(self, part: Any, chunk: Any) -> Any:
        self.fail_in("wrap")
        return chunk

    def bind(self, graphs: Any) -> None:
        self.fail_in("bind")


def run(config: Any, device: torch.device, case: dict[str, Any]) -> dict[str, list[Any]]:
    """Return by method and place in `FEATURES`: every rank's message, and the longest time."""
    seed_everything(1, device)
    chunks = build_model(config, device)
    results: dict[str, list[Any]] = {}
    for Failing.where, place in product(METHODS, range(len(FEATURES) + 1)):
        features = [*FEATURES[:place], Failing, *FEATURES[place:]]
        begun, message = time.monotonic(), "attached"
        try:
            attach(chunks, features=features, **case["options"])
        except Exception as error:  # noqa: BLE001
            message = str(error)
        mine = message, time.monotonic() - begun
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        results[f"{Failing.where} {place}"] = [[m for m, _ in ranks], max(s for _, s in ranks)]
    attach(chunks, **case["options"]).detach()
    return results
