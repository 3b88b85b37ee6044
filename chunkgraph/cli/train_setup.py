"""Check a run of ``chunkgraph train`` before it starts, and report it at the end."""

from __future__ import annotations

import argparse
import importlib.util
import os
from typing import TYPE_CHECKING

from chunkgraph._outputs import check_output, stream_next_to
from chunkgraph.data import Documents, PackedText
from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.settings import Config, load_config

if TYPE_CHECKING:
    from chunkgraph.trainer.results import RunResults

__all__ = [
    "check_packages",
    "checked_config",
    "report",
    "resolve_device",
    "worker_environment",
]

# Ranks on a CPU share its cores; more ranks than this only fill memory.
_FEWEST_PROCESSES, _PROCESSES_PER_CORE = 64, 8


def checked_config(args: argparse.Namespace, num_local_ranks: int | None = None) -> Config:
    """Load the configuration, and check everything that can be checked before training.

    Args:
        args: The subcommand's arguments.
        num_local_ranks: Number of ranks on this machine; None if all ranks are on it.

    Raises:
        ConfigError: A setting or option is wrong.
        MissingDependencyError: A required package is not installed.
    """
    config = resolve_device(load_config(args.config, args.overrides), num_local_ranks)
    check_packages(config)
    path, seed = config.data.path, config.train.seed
    if config.packing.max_packed_seqs:
        Documents.from_file(path, num_tokens=config.tokens_per_sequence, seed=seed)
    else:
        PackedText.from_file(path, seq_length=config.model.seq_length, seed=seed)
    check_output("--json", args.json)
    return config


def report(args: argparse.Namespace, config: Config, results: RunResults) -> list[str]:
    """Print the closing table, write the requested file, and return the failures."""
    from rich.console import Console

    from chunkgraph._text import REPORT_WIDTH
    from chunkgraph.cli.report import print_report, write_json

    console = Console(file=stream_next_to(args.json), width=REPORT_WIDTH, highlight=False)
    failures = print_report(config, results, console)
    if args.json is not None:
        write_json(args.json, config, results, failures)
    return failures


def resolve_device(config: Config, num_local_ranks: int | None = None) -> Config:
    """Choose CPU or GPU; import torch unless the configuration sets the CPU.

    Args:
        config: The run's configuration.
        num_local_ranks: Number of ranks on this machine, one GPU each; None if all ranks are on it.
    """
    if config.device == "cpu":
        num_gpus = 0
    else:
        import torch

        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = config.device
    if device == "auto":
        device = "cuda" if num_gpus else "cpu"
    num_needed = config.pipeline.world_size if num_local_ranks is None else num_local_ranks
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # see `choose_device`
    if device == "cuda" and num_gpus < (1 if may_share else num_needed):
        msg = (
            f"device is cuda and the run needs {num_needed} GPU(s), one for each rank, but torch "
            f"sees {num_gpus} here. Set device=cpu, or lower the sizes in the pipeline section."
        )
        raise ConfigError(msg)
    most = max(_FEWEST_PROCESSES, _PROCESSES_PER_CORE * (os.cpu_count() or 1))
    if device == "cpu" and num_needed > most:
        msg = (
            f"the run needs {num_needed} processes on this machine, one for each rank, and with "
            f"{os.cpu_count()} cores at most {most} are started. Lower the sizes in the pipeline "
            "section, or start the ranks on several machines with torchrun."
        )
        raise ConfigError(msg)
    if device == "cpu" and config.model.layer_spec == "transformer_engine":
        msg = (
            "model.layer_spec is transformer_engine, which runs on GPUs only, but device is cpu. "
            "Set model.layer_spec=local, or device=cuda."
        )
        raise ConfigError(msg)
    return config.replace(device=device)


def check_packages(config: Config, *, uses_megatron: bool = True) -> None:
    """Check for missing optional packages before any process starts."""
    packages = []
    if uses_megatron:
        packages.append(("megatron.core", "megatron-core", "megatron", "to train"))
    uses_te = config.model.layer_spec == "transformer_engine" or (
        config.model.layer_spec == "auto" and config.device == "cuda" and uses_megatron
    )
    if uses_te:
        packages.append(
            ("transformer_engine", "Transformer Engine", "te", "for the layers of a GPU run")
        )
    for module, package, extra, purpose in packages:
        if not _is_installed(module):
            msg = (
                f"{package} is not installed; it is needed {purpose}. "
                f"Install it with: pip install 'chunkgraph[{extra}]'"
            )
            raise MissingDependencyError(msg)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def worker_environment(config: Config, *, debug: bool = False) -> dict[str, str]:
    """Return variables that must be set before a worker starts; the user's take precedence.

    Args:
        config: The run's configuration.
        debug: Whether to show warnings.
    """
    environment = {"OMP_NUM_THREADS": "1"}
    if config.device == "cpu":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are on this machine
        # Importing Megatron loads torch's compiler for functions that only a GPU run calls. This
        # takes a third of a rank's start time.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if config.train.deterministic:
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    if not debug:
        environment["PYTHONWARNINGS"] = "ignore"  # importing Megatron prints a page of them
    return environment
