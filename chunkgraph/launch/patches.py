"""The patches of ``megatron.training``: where a pretrain script is joined from outside.

Megatron's ``pretrain()`` offers no hook for the schedule, and stock scripts none for flags. So four
module globals of it are replaced, all of which it looks up at each call: what adds the flags,
``train``, ``get_forward_backward_func`` and, for the log, ``training_log`` and ``print_rank_last``.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.megatron.core.access import (
    import_megatron,
    patch_attributes,
    private_names,
    refuse_other_releases,
)
from chunkgraph.megatron.core.releases import RANGE

__all__ = [
    "PretrainHooks",
    "count_documents_on_cpu",
    "patch_pretrain",
    "pretrain_arguments",
    "pretrain_hooks",
    "tensorboard_writers",
]

_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"
_DATASETS = "megatron.core.datasets.utils"
_HELPERS = "megatron.core.datasets.helpers_cpp"
_HOOKS = "chunkgraph_hooks"


class PretrainHooks(Protocol):
    """What is called from inside Megatron's pretrain program."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add flags to the whole of Megatron's own."""

    def parsed(self, args: argparse.Namespace) -> None:
        """Look at, and change, what was parsed, before Megatron checks it."""

    def training(self, model: Any) -> AbstractContextManager[object]:
        """Entered around all of the training, with the model loaded and wrapped."""

    def wrap_schedule(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what training or evaluation calls for one step."""

    def before_log(self, iteration: int) -> None:
        """Called after each training step, on every rank."""

    def log_text(self) -> str:
        """Put at the end of Megatron's line of an iteration; `` name: value |`` or ""."""


def patch_pretrain(hooks: PretrainHooks) -> Callable[[], None]:
    """Put ``hooks`` into Megatron's pretrain program; returns a function that takes them out.

    Also skips the build of the dataset helpers where a wheel has them built and no Makefile.

    Raises:
        MissingDependencyError: ``megatron.training`` cannot be imported.
        ConfigError: the installed release is outside the range that is known, or has moved one of
            the names.
    """
    refuse_other_releases()
    arguments, training = _import_training()
    add, *_ = private_names(_ARGUMENTS, "add_megatron_arguments", "parse_args")
    train, get_schedule, log, print_last = private_names(
        _TRAINING, "train", "get_forward_backward_func", "training_log", "print_rank_last"
    )
    log_signature = inspect.signature(log)
    if "iteration" not in log_signature.parameters:
        raise ConfigError(
            f"training_log of {_TRAINING} no longer says which iteration it logs. Use "
            f"megatron-core {RANGE}, or report the release."
        )
    is_logging = False

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add(parser)
        hooks.add_arguments(parser)
        parse = parser.parse_known_args

        def parse_known_args(*args: Any, **kwargs: Any) -> Any:
            namespace, rest = parse(*args, **kwargs)
            hooks.parsed(namespace)
            return namespace, rest

        # On this one parser: every way to Megatron's arguments ends in this method.
        parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
        return parser

    def train_with_hooks(forward_step_func: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        with hooks.training(model):
            return train(forward_step_func, model, *args, **kwargs)

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        return hooks.wrap_schedule(get_schedule(*args, **kwargs))

    def training_log(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_logging
        hooks.before_log(log_signature.bind(*args, **kwargs).arguments["iteration"])
        is_logging = True
        try:
            return log(*args, **kwargs)
        finally:
            is_logging = False

    def print_rank_last(message: str) -> None:
        if is_logging and " iteration " in message and message.rstrip().endswith("|"):
            message = message.rstrip() + hooks.log_text()
        print_last(message)

    setattr(add_megatron_arguments, _HOOKS, hooks)
    undo = ExitStack()
    undo.callback(patch_attributes(arguments, {"add_megatron_arguments": add_megatron_arguments}))
    replacements = {
        "train": train_with_hooks,
        "get_forward_backward_func": get_forward_backward_func,
        "training_log": training_log,
        "print_rank_last": print_rank_last,
    }
    undo.callback(patch_attributes(training, replacements))
    datasets = import_megatron(_DATASETS)
    if not (Path(str(datasets.__file__)).parent / "Makefile").exists():
        undo.callback(patch_attributes(datasets, {"compile_helpers": _helpers_are_built}))
    return undo.close


def count_documents_on_cpu() -> Callable[[], None]:
    """Have Megatron add up lengths of packed documents, for its FLOPS, on a host without a GPU.

    It would make the tensor for them on a device of the name ``cuda:N``. Returns the way back.
    """
    _, training = _import_training()
    if not hasattr(training, "_seqlen_stats_in_iteration"):  # before 0.19
        return lambda: None
    sums = torch.zeros(2, dtype=torch.float64)
    return patch_attributes(training, {"_seqlen_stats_in_iteration": sums})


def pretrain_hooks() -> object:
    """The hooks that are in Megatron's pretrain program, or None."""
    arguments, _ = _import_training()
    return getattr(getattr(arguments, "add_megatron_arguments", None), _HOOKS, None)


def pretrain_arguments() -> argparse.Namespace:
    """Megatron's arguments, parsed, checked and filled in."""
    (get_args,) = private_names(_TRAINING, "get_args")
    return get_args()


def tensorboard_writers(iteration: int) -> list[Callable[[str, float], None]]:
    """What writes a scalar of this iteration to TensorBoard and to W&B, as far as they are on."""
    get_tensorboard, get_wandb = private_names(
        _TRAINING, "get_tensorboard_writer", "get_wandb_writer"
    )
    if iteration % max(getattr(pretrain_arguments(), "tensorboard_log_interval", 1), 1):
        return []
    found: list[Callable[[str, float], None]] = []
    tensorboard, wandb = get_tensorboard(), get_wandb()
    if tensorboard:
        found.append(lambda name, value: tensorboard.add_scalar(name, value, iteration))
    if wandb:
        found.append(lambda name, value: wandb.log({name: value}, iteration))
    return found


def _import_training() -> tuple[Any, Any]:
    try:
        return import_megatron(_ARGUMENTS), import_megatron(_TRAINING)
    except MissingDependencyError as error:
        raise MissingDependencyError(
            f"{error} Megatron's training program is in the wheels of megatron-core 0.17 and newer "
            "(0.18 and newer need Python 3.12), and in every checkout of Megatron-LM, whose folder "
            "must be that of the script or on PYTHONPATH."
        ) from error
    except ImportError as error:
        advice = "Install what is missing; megatron-core itself asks for little of it."
        if not isinstance(error, ModuleNotFoundError):  # `from typing import override`
            advice = "From megatron-core 0.18 on it needs Python 3.12 or newer."
        raise MissingDependencyError(
            f"megatron.training cannot be imported: {error}. {advice}"
        ) from error


def _helpers_are_built() -> None:
    """In the place of ``compile_helpers``, which runs ``make`` and exits where that fails."""
    if importlib.util.find_spec(_HELPERS) is None:
        raise MissingDependencyError(
            f"This installation of megatron-core has neither {_HELPERS} nor the Makefile to build "
            "it. Install megatron-core from a wheel with binaries, or from a checkout."
        )
