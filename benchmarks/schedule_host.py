"""What a pipeline schedule costs the host per microbatch: chunkgraph's driver and Megatron's own.

    torchrun --nproc-per-node 2 benchmarks/schedule_host.py --schedule 1f1b --json result.json

Both run the same schedule on equal stages, which do next to nothing, in alternating rounds; with
``--graphs`` both replay the stages. The time is the processor time of each rank's main thread.
Transfers transfer nothing: what gloo takes for one depends on which rank posts first, and a rank
that has slept for it is slower afterwards. Runs on GPUs where there are any, otherwise on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from chunkgraph.megatron import attach
from chunkgraph.megatron.attachment import eager_driver
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.settings import config_from_mapping
from chunkgraph.trainer.setup import training_process

_ROWS, _WIDTH = 4, 16
_CHUNKS = {"1f1b": 1, "interleaved": 2}
_SIDES = ("megatron", "chunkgraph")
# Create process groups and capture graphs.
_NUM_FIRST_STEPS = 3


class _Block(nn.Module):
    """A block that scales its input, as `attach` looks for it.

    Args:
        is_first: Whether the block takes its argument instead of what it received.
    """

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.scale = nn.Parameter(torch.ones(_WIDTH))
        self.pre_process = is_first
        self.input_tensor: torch.Tensor | None = None

    def set_input_tensor(self, tensor: torch.Tensor | None) -> None:
        """Take what the previous stage sent."""
        self.input_tensor = tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Scale the argument on the first stage, elsewhere the received tensor."""
        hidden = hidden_states if self.pre_process else self.input_tensor
        assert hidden is not None
        return hidden * self.scale


class _Stage(nn.Module):
    """A stage of one block.

    Args:
        config: Megatron's TransformerConfig.
        is_first: Whether this is the first stage of the pipeline.
    """

    def __init__(self, config: Any, *, is_first: bool) -> None:
        super().__init__()
        self.config = config
        self.decoder = _Block(is_first=is_first)

    def set_input_tensor(self, tensors: Any) -> None:
        """Take what the previous stage sent."""
        (tensor,) = tensors if isinstance(tensors, list) else [tensors]
        self.decoder.set_input_tensor(tensor)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Run the block, on the first stage with the data."""
        output: torch.Tensor = self.decoder(hidden_states=data)
        return output


def _forward_step(data: Iterator[torch.Tensor], model: nn.Module, *_: Any) -> tuple[Any, Any]:
    def loss(output: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        mean = output.mean()
        return mean, {"loss": mean.detach()}

    return model(next(data)), loss


def _stages(num_chunks: int, num_ranks: int, device: torch.device) -> list[nn.Module]:
    transformer = import_megatron("megatron.core.transformer.transformer_config")
    enums = import_megatron("megatron.core.enums")
    config = transformer.TransformerConfig(
        num_layers=num_chunks * num_ranks,
        hidden_size=_WIDTH,
        num_attention_heads=1,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        microbatch_group_size_per_vp_stage=num_ranks,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        batch_p2p_comm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )
    stages: list[nn.Module] = [
        _Stage(config, is_first=chunk == 0 and dist.get_rank() == 0).to(device)
        for chunk in range(num_chunks)
    ]
    for index, stage in enumerate(stages):
        stage.model_type = enums.ModelType.encoder_or_decoder
        stage.vp_stage = index
    return stages


class _Request:
    def wait(self) -> None:
        """Return at once."""


def _transfer_nothing(*_args: Any, **_kwargs: Any) -> _Request:
    return _Request()


@contextlib.contextmanager
def _without_transfers() -> Iterator[None]:
    """Make sends and receives of `torch.distributed` do nothing."""
    with contextlib.ExitStack() as stack:
        for name in ("isend", "irecv"):
            stack.enter_context(mock.patch.object(dist, name, _transfer_nothing))
        yield


def _step_us(run: Callable[..., Any], stages: list[nn.Module], count: int) -> float:
    """Run one step; return the processor time per microbatch in microseconds."""
    ones = torch.ones(_ROWS, 1, _WIDTH, device=next(stages[0].parameters()).device)
    data = [iter([ones] * count) for _ in stages]
    dist.barrier()
    start = time.thread_time()
    run(
        forward_step_func=_forward_step,
        data_iterator=data,
        model=stages,
        num_microbatches=count,
        seq_length=_ROWS,
        micro_batch_size=1,
        forward_only=False,
    )
    return (time.thread_time() - start) * 1e6 / count


def _medians(
    runs: dict[str, Callable[..., Any]],
    models: dict[str, list[nn.Module]],
    num_microbatches: int,
    num_rounds: int,
) -> dict[str, float]:
    """Return each side's processor time per microbatch in microseconds."""
    times: dict[str, list[float]] = {side: [] for side in runs}
    for index in range(num_rounds + 2 * _NUM_FIRST_STEPS):
        for side, run in runs.items():
            with contextlib.ExitStack() as stack:
                if index >= _NUM_FIRST_STEPS:
                    stack.enter_context(_without_transfers())
                value = _step_us(run, models[side], num_microbatches)
            if index >= 2 * _NUM_FIRST_STEPS:
                times[side].append(value)
    return {side: statistics.median(values) for side, values in times.items()}


def _measure(
    name: str, num_microbatches: int, num_rounds: int, device: torch.device, *, with_graphs: bool
) -> dict[str, Any]:
    megatron = import_megatron("megatron.core.pipeline_parallel").get_forward_backward_func()
    models = {side: _stages(_CHUNKS[name], dist.get_world_size(), device) for side in _SIDES}
    with contextlib.ExitStack() as ended:
        if with_graphs:
            runs = {}
            for side, schedule in zip(_SIDES, ("auto", name), strict=True):
                graphs = attach(models[side], scope="block", schedule=schedule)
                ended.callback(graphs.detach)
                runs[side] = graphs.wrap_forward_backward(megatron)
        else:
            runs = {"megatron": megatron, "chunkgraph": eager_driver(models["chunkgraph"], name)}
        medians = _medians(runs, models, num_microbatches, num_rounds)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, medians)
    return {
        "schedule": name,
        "with_graphs": with_graphs,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "us_per_microbatch": everyone,
        "ratio": [rank["chunkgraph"] / rank["megatron"] for rank in everyone],
    }


def main() -> None:
    """Measure a schedule, and print a line for each rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedule", choices=_CHUNKS, default="1f1b")
    parser.add_argument("--num-microbatches", type=int, default=32)
    parser.add_argument("--num-rounds", type=int, default=60)
    parser.add_argument("--graphs", action="store_true", help="capture the stages of both sides")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    num_chunks = _CHUNKS[options.schedule]
    config = config_from_mapping(
        {
            "device": "auto",
            "model": {
                "num_layers": 2 * num_chunks,
                "hidden_size": _WIDTH,
                "ffn_hidden_size": _WIDTH,
                "num_attention_heads": 1,
                "seq_length": _ROWS,
            },
            "pipeline": {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": num_chunks if num_chunks > 1 else None,
            },
            "train": {"num_microbatches": [options.num_microbatches]},
        }
    )
    with training_process(config) as device:
        counts = options.num_microbatches, options.num_rounds
        result = _measure(options.schedule, *counts, device, with_graphs=options.graphs)
        if dist.get_rank() > 0:
            return
        for rank, times in enumerate(result["us_per_microbatch"]):
            sys.stdout.write(
                f"{options.schedule} rank {rank}: Megatron {times['megatron']:.0f} us, chunkgraph "
                f"{times['chunkgraph']:.0f} us, ratio {result['ratio'][rank]:.3f}\n"
            )
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
