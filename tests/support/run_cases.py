"""Runs one rank of several jobs, one after the other: ``python run_cases.py CASES.json FOLDER``.

Only the first job imports Megatron, and jobs share eager runs.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import attach_fault_probe
import dropless_probe
import fault_probe
import groups_end_probe
import kernel_probe
import packed_probe
import receive_probe
import rl_frameworks
import rl_probe
import unpadded_probe
from extended_config import extended
from gathering import uneven_collectives
from torch import nn

from chunkgraph.data import DocumentRow
from chunkgraph.errors import ChunkGraphError
from chunkgraph.jobs.processes import die_with_parent, write_error
from chunkgraph.megatron.features.packing.bank import PackedBank
from chunkgraph.trainer.batches import Batch, PackedBatches
from chunkgraph.trainer.compare import TrainingRun, run_eager, train
from chunkgraph.trainer.setup import training_process

_WITH_EAGER: dict[str, Any] = {"receive": receive_probe}
_PROBES: dict[str, Any] = {
    "packed": packed_probe,
    "unpadded": unpadded_probe,
    "dropless": dropless_probe,
    "kernels": kernel_probe,
    "rl": rl_probe,
    "rl_frameworks": rl_frameworks,
    "groups_end": groups_end_probe,
    "fault": fault_probe,
    "attach_fault": attach_fault_probe,
}


class EagerRuns:
    """This rank's runs without graphs, one for all cases that differ only in their graphs."""

    def __init__(self) -> None:
        self._done: dict[str, TrainingRun] = {}

    def of(self, case: dict[str, Any], run: Callable[[], TrainingRun]) -> TrainingRun:
        """Return the run of ``case``; call ``run`` if it is the first of its kind."""
        of_graphs = ("capture", "stash", "run")
        model = {name: s for name, s in case["config"].items() if name not in of_graphs}
        model["pipeline"] = {**model.get("pipeline", {}), "schedule": "auto"}
        apart = (
            *("ddp_options", "transformer_options", "frozen", "lora", "offsets"),
            "expert_tensor_parallel_size",
        )
        options = [case.get(name) for name in apart]
        kind = json.dumps([model, *options], sort_keys=True)
        if kind not in self._done:
            self._done[kind] = run()
        return self._done[kind]


def run_case(case: dict[str, Any], eager_runs: EagerRuns) -> Any:
    """Run one job and return its results."""
    os.environ["MASTER_PORT"] = str(case["port"])
    with (
        extended(case["config"]) as config,
        experts_split_over(case.get("expert_tensor_parallel_size")),
        offsets_for(case.get("offsets")),
        training_process(config) as device,
    ):
        if (probe := case.get("probe")) in _WITH_EAGER:
            return _WITH_EAGER[probe].run(config, device, case, eager_runs.of)
        if probe is not None:
            return _PROBES[probe].run(config, device, case)
        frozen = case.get("frozen", [])
        options: dict[str, Any] = {
            "ddp_options": case.get("ddp_options"),
            "transformer_options": {
                **(case.get("transformer_options") or {}),
                **_among(case, "expert_tensor_parallel_size"),
            },
            "prepare": lambda chunk: _prepare(chunk, frozen, case.get("lora", "")),
        }
        eager = eager_runs.of(case, lambda: run_eager(config, device, **options))
        return asdict(train(config, device, eager=eager, **options))


@contextmanager
def experts_split_over(num_ranks: int | None) -> Iterator[None]:
    """Split each expert over ``num_ranks`` ranks, Megatron's default with tensor parallelism."""
    if num_ranks is None:
        yield
        return
    from megatron.core import parallel_state

    initialize = parallel_state.initialize_model_parallel

    def split(**options: Any) -> None:
        initialize(**{**options, "expert_tensor_parallel_size": num_ranks})

    # Eager steps of the all-to-all dispatcher gather different numbers of rows from these ranks.
    with (
        mock.patch.object(parallel_state, "initialize_model_parallel", split),
        uneven_collectives(),
    ):
        yield


@contextmanager
def offsets_for(kind: str | None) -> Iterator[None]:
    """Make offsets for the most sequences, as users of `attach` may, if ``kind`` is "most".

    Training makes them for the graphs that a microbatch replays.
    """
    if kind is None:
        yield
        return
    assert kind == "most"
    fewest, num_wider = PackedBatches._batch, 0

    def most(own: PackedBatches, row: DocumentRow, bank: PackedBank) -> Batch:
        nonlocal num_wider
        widest = own.banks.most_sequences(own.banks.by_rows[bank.shape.max_packed_tokens])
        num_wider += widest != bank
        return fewest(own, row, widest)

    with mock.patch.object(PackedBatches, "_batch", most):
        yield
    assert num_wider, "no offsets were for more sequences than they would have been"


def _among(case: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: case[name]} if name in case else {}


def _prepare(chunk: nn.Module, patterns: list[str], lora: str) -> None:
    """Freeze parameters by name; "first" and "last" are all of the first and the last stage.

    With ``lora`` all parameters are frozen, and all stages or the last one have adapters.
    """
    model = chunk
    while not hasattr(model, "pre_process"):
        model = model.module
    stages = [*(["first"] if model.pre_process else []), *(["last"] if model.post_process else [])]
    patterns = [".*" if p in stages else p for p in patterns if p in stages or len(p) > 5]
    for name, parameter in chunk.named_parameters():
        if any(re.search(pattern, name) for pattern in patterns):
            parameter.requires_grad_(False)
    if lora:
        chunk.requires_grad_(False)
        if lora == "all" or model.post_process:
            importlib.import_module("megatron_lora").add_adapters(chunk)


def main(cases_path: str, folder: str) -> None:
    """Run every case; rank 0 writes NAME.json for each."""
    die_with_parent()
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    eager_runs = EagerRuns()
    for case in json.loads(Path(cases_path).read_text(encoding="utf-8")):
        try:
            results = run_case(case, eager_runs)
        except Exception as error:
            if case.get("may_refuse"):
                kind = "refused" if isinstance(error, ChunkGraphError) else "failed"
                results = {kind: f"{type(error).__name__}: {error}"}
            elif not case.get("may_end"):
                raise
            else:
                os._exit(write_error(Path(folder), int(os.environ["RANK"]), error))
        if os.environ["RANK"] == "0":
            text = json.dumps(results)
            (Path(folder) / f"{case['name']}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
