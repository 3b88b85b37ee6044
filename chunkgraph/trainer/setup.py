"""Set up process groups, device, seeds and determinism of one training process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from chunkgraph import __version__
from chunkgraph.engine.agreement import lost_ranks_named, refuse_differences
from chunkgraph.megatron.core.access import import_megatron, versions
from chunkgraph.megatron.core.random_state import seed_model_parallel
from chunkgraph.megatron.cpu.host import cpu_host
from chunkgraph.megatron.site import new_agreement
from chunkgraph.settings import Config


def choose_device(config: Config) -> torch.device:
    """Choose the device of this process by ``config.device`` and LOCAL_RANK.

    Ranks share GPUs only with ``NCCL_MULTI_RANK_GPU_ENABLE=1``, which makes NCCL allow it.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        local_rank %= torch.cuda.device_count()
    return torch.device("cuda", local_rank)


@contextmanager
def training_process(config: Config) -> Iterator[torch.device]:
    """Set up one rank for Megatron's training inside the block; yield its device.

    This selects the device and the kernels, and initializes the process group (gloo on a CPU, NCCL
    on a GPU), Megatron's model parallel groups, and on a CPU the CPU host. Collectives time out
    after ``run.timeout_s``. Graphs must be freed before the block ends.
    """
    device, pipeline = choose_device(config), config.pipeline
    is_cpu = device.type == "cpu"
    with ExitStack() as stack:
        if is_cpu:
            stack.enter_context(cpu_host())
        else:
            torch.cuda.set_device(device)
        if config.train.deterministic:
            # Transformer Engine and cuBLAS read these when they first run.
            os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if config.train.deterministic and not is_cpu:
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Filling new memory would only add kernels; nothing reads it.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        timeout = timedelta(seconds=config.run.timeout_s)
        dist.init_process_group("gloo" if is_cpu else "nccl", timeout=timeout)
        # After an error NCCL would wait for transfers that the other ranks may never post, and the
        # process ends anyway. The function is looked up then: attached graphs replace it.
        stack.push(lambda kind, *_: dist.destroy_process_group() if is_cpu or not kind else None)
        stack.enter_context(lost_ranks_named())
        with ExitStack() as undo:
            refuse_differences(new_agreement(undo), dist.get_rank(), _equal_facts(config))
        state = import_megatron("megatron.core.parallel_state")
        virtual = pipeline.num_model_chunks
        state.initialize_model_parallel(
            tensor_model_parallel_size=pipeline.tensor_model_parallel_size,
            pipeline_model_parallel_size=pipeline.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            context_parallel_size=pipeline.context_parallel_size,
            expert_model_parallel_size=pipeline.expert_model_parallel_size,
            # As in `build_model`; Megatron's default is the tensor-parallel size.
            expert_tensor_parallel_size=None if config.moe.num_moe_experts is None else 1,
            distributed_timeout_minutes=config.run.timeout_s / 60,
        )
        stack.callback(state.destroy_model_parallel)
        yield device


def _equal_facts(config: Config) -> dict[str, object]:
    """Return the settings and versions that all ranks must share."""
    sections = config.model_dump(exclude={"device": True, "run": True, "data": {"path"}})
    settings = {f"{name}.{key}": v for name, of in sections.items() for key, v in of.items()}
    return {"chunkgraph": __version__, **versions(), **settings}


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed torch's and Megatron's random numbers; pipeline ranks get different seeds."""
    state = import_megatron("megatron.core.parallel_state")
    seed += 100 * state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    seed_model_parallel(seed, device)
