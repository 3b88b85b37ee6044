"""Patch ``megatron.training`` so that an unmodified pretrain script calls hooks.

Megatron's ``pretrain()`` has no hook for the schedule, and stock scripts have none for flags.
Instead, this module replaces globals that Megatron looks up at each call: the function that adds
the flags, ``train``, ``get_forward_backward_func`` and, for the log, ``training_log``,
``print_rank_last`` and the reductions of success, norm and count of zeros, for which the host then
does not wait. TensorBoard and W&B get numbers a step later.
"""

from __future__ import annotations

import argparse
import inspect
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.launch.flags import add_flags
from chunkgraph.megatron.core.access import (
    import_megatron,
    patch_attributes,
    private_names,
    refuse_other_releases,
)
from chunkgraph.megatron.core.fused_gradients import fuse_gradients
from chunkgraph.megatron.optimizer import Instead

if TYPE_CHECKING:
    from chunkgraph.launch.hooks import ChunkGraphsInPretrain

_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"
_DATASETS = "megatron.core.datasets.utils"
_HOOKS = "chunkgraph_hooks"
_WRITERS = ("get_tensorboard_writer", "get_wandb_writer")
_PATIENCE_S = 2.0
"""Time for the device to compute the last numbers of a run that failed."""


def patch_pretrain(hooks: ChunkGraphsInPretrain, *, on_cpu: bool = False) -> Callable[[], None]:
    """Install the flags and ``hooks`` in Megatron's pretrain program; return the undo function.

    Also skip the build of the dataset helpers if the wheel ships them built and has no Makefile.

    Raises:
        MissingDependencyError: ``megatron.training`` cannot be imported.
        ConfigError: The installed release is outside the supported range, or lacks a required name.
    """
    refuse_other_releases()
    arguments, training = _import_training()
    add, *_ = private_names(_ARGUMENTS, "add_megatron_arguments", "parse_args")
    train, set_up, get_schedule, log, print_last = private_names(
        _TRAINING,
        "train",
        "setup_model_and_optimizer",
        "get_forward_backward_func",
        "training_log",
        "print_rank_last",
    )
    numbers = LateNumbers()
    log_signature = inspect.signature(log)
    is_logging = False

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add(parser)
        add_flags(parser)
        hooks.on_parser(parser)
        parse = parser.parse_known_args

        def parse_known_args(*args: Any, **kwargs: Any) -> Any:
            namespace, hooks.unknown = parse(*args, **kwargs)
            hooks.parsed(namespace)
            return namespace, hooks.unknown

        def parse_args(*args: Any, **kwargs: Any) -> Any:
            namespace, hooks.unknown = parse(*args, **kwargs)
            if hooks.unknown:  # before the hook, which may end the script
                parser.error(f"unrecognized arguments: {' '.join(hooks.unknown)}")
            hooks.parsed(namespace)
            return namespace

        # On this one parser: Megatron's arguments come from one of these methods.
        parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
        parser.parse_args = parse_args  # type: ignore[method-assign]
        return parser

    def train_with_hooks(
        forward_step_func: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        writers = [get() if hooks.flags else None for get in private_names(_TRAINING, *_WRITERS)]
        with hooks.training(model, optimizer), numbers.delayed(*writers):
            return train(forward_step_func, model, optimizer, *args, **kwargs)

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        hooks.before_model()
        undo.callback(fuse_gradients())
        return set_up(*args, **kwargs)

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        return hooks.wrap_schedule(get_schedule(*args, **kwargs))

    def training_log(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_logging
        numbers.write()  # of the step before
        hooks.before_log(log_signature.bind(*args, **kwargs).arguments["iteration"])
        is_logging = True
        try:
            with Instead(torch.tensor, _pinned_tensor):
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
        "setup_model_and_optimizer": setup_model_and_optimizer,
        "get_forward_backward_func": get_forward_backward_func,
        "training_log": training_log,
        "print_rank_last": print_rank_last,
        **_reductions(hooks),
    }
    undo.callback(patch_attributes(training, replacements))
    if on_cpu and hasattr(training, "_seqlen_stats_in_iteration"):  # since 0.19
        # For its FLOPS, Megatron sums lengths of packed documents on a device `cuda:N`.
        sums = torch.zeros(2, dtype=torch.float64)
        undo.callback(patch_attributes(training, {"_seqlen_stats_in_iteration": sums}))
    datasets = import_megatron(_DATASETS)
    if not (Path(str(datasets.__file__)).parent / "Makefile").exists():
        undo.callback(patch_attributes(datasets, {"compile_helpers": lambda: None}))
    return undo.close


def _reductions(hooks: ChunkGraphsInPretrain) -> dict[str, Callable[..., Any]]:
    """Return replacements, by name, of the reductions after a step, for which the host waits.

    They are for ranks without parameters. If there are none and no step is skipped, all ranks of a
    reduction have its result already.
    """
    names = (
        "logical_and_across_model_parallel_group",
        "reduce_max_stat_across_model_parallel_group",
    )
    all_succeed, largest = private_names(_TRAINING, *names)

    def has_succeeded(success: bool, *args: Any, **kwargs: Any) -> Any:
        return success if hooks.always_succeeds else all_succeed(success, *args, **kwargs)

    def maximum(stat: Any, *args: Any, **kwargs: Any) -> Any:
        if not hooks.always_succeeds:
            return largest(stat, *args, **kwargs)
        if isinstance(stat, torch.Tensor):  # the log reads it
            return stat.detach().float().reshape(())
        return None if stat is None else torch.tensor(stat, dtype=torch.float32).item()

    return dict(zip(names, (has_succeeded, maximum), strict=True))


def _pinned_tensor(data: Any, *, device: Any = "cpu", **options: Any) -> torch.Tensor:
    """Return ``torch.tensor(...)``; the host does not wait for the device, as it does there."""
    is_cuda = torch.device(device).type == "cuda"
    host = torch.tensor(data, device="cpu", pin_memory=is_cuda, **options)
    return host.to(device, non_blocking=True)


class LateNumbers:
    """Numbers for TensorBoard and W&B, which are written when the device has computed them."""

    def __init__(self) -> None:
        self._calls: list[tuple[torch.cuda.Event, Callable[[], Any]]] = []

    @contextmanager
    def delayed(self, tensorboard: Any, wandb: Any) -> Iterator[None]:
        """Let these writers, or None, write at the next `write`, or at the end."""

        def write_last(kind: type[BaseException] | None, *_: Any) -> None:
            # After an error the device may never be done, and the process ends without more.
            self.write(None if kind in (None, SystemExit) else _PATIENCE_S)
            if tensorboard is not None:
                tensorboard.flush()

        def finish(*args: Any, **kwargs: Any) -> Any:
            self.write()
            return end(*args, **kwargs)

        with ExitStack() as undo:
            if tensorboard is not None:
                later = partial(self._add, tensorboard.add_scalar)
                undo.callback(patch_attributes(tensorboard, {"add_scalar": later}))
            if wandb is not None:
                later, end = partial(self._add, wandb.log), wandb.finish
                undo.callback(patch_attributes(wandb, {"log": later, "finish": finish}))
            undo.push(write_last)
            yield

    def write(self, patience_s: float | None = None) -> None:
        """Write the numbers so far, those that the device computes within this time in seconds."""
        calls, self._calls = self._calls, []
        end = None if patience_s is None else time.monotonic() + patience_s
        for event, call in calls:
            if end is None:
                event.synchronize()
            elif not _is_done(event, end):
                return
            call()

    def _add(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        call = partial(function, *map(_sent, args), **_sent(kwargs))
        self._calls.append((event := torch.cuda.Event(), call))
        event.record()


def _is_done(event: torch.cuda.Event, end: float) -> bool:
    """Return whether the device reaches an event before this time of the monotonic clock."""
    with suppress(RuntimeError):  # the device has failed
        while not event.query() and time.monotonic() < end:
            time.sleep(0.01)
        return event.query()
    return False


def _sent(value: Any) -> Any:
    """Return a value with tensors on their way to pinned memory."""
    if isinstance(value, dict):
        return {key: _sent(one) for key, one in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", non_blocking=True, copy=True)
    return value


class UnitScale:
    """A loss scale of 1, known to the host; it multiplies as Megatron's tensor does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def item(self) -> float:
        """Return 1, without a read of the device."""
        return 1.0

    def __mul__(self, loss: torch.Tensor) -> torch.Tensor:
        return self._tensor * loss


def pretrain_hooks() -> object:
    """Return the installed hooks of Megatron's pretrain program, or None."""
    arguments, _ = _import_training()
    return getattr(getattr(arguments, "add_megatron_arguments", None), _HOOKS, None)


def pretrain_arguments() -> argparse.Namespace:
    """Return Megatron's arguments, parsed, validated and completed by Megatron."""
    (get_args,) = private_names(_TRAINING, "get_args")
    return get_args()


def validate_arguments(args: argparse.Namespace) -> None:
    """Let Megatron check and complete parsed arguments, as it does before a run.

    Raises:
        ConfigError: Megatron refuses them.
    """
    (validate,) = private_names(_ARGUMENTS, "validate_args")
    try:
        validate(args)
    except ConfigError:
        raise
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:
        reason = str(error) or f"{type(error).__name__}{_line_of(error)}"
        raise ConfigError(f"Megatron refuses these arguments: {reason}") from error


def _line_of(error: BaseException) -> str:
    """Return the source line that failed; Megatron's assertions often have no text."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" in {Path(frames[-1].filename).name}: {frames[-1].line}" if frames else ""


def write_scalars(scalars: Mapping[str, float], iteration: int) -> None:
    """Write scalars of this iteration to TensorBoard and W&B, if enabled."""
    get_tensorboard, get_wandb = private_names(_TRAINING, *_WRITERS)
    if iteration % max(getattr(pretrain_arguments(), "tensorboard_log_interval", 1), 1):
        return
    if tensorboard := get_tensorboard():
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb := get_wandb():
        wandb.log(dict(scalars), iteration)


def _import_training() -> tuple[Any, Any]:
    try:
        return import_megatron(_ARGUMENTS), import_megatron(_TRAINING)
    except ImportError as error:
        raise MissingDependencyError(
            f"megatron.training cannot be imported: {error} Megatron's training program is in the "
            "wheels of megatron-core 0.17 and newer (0.18 and newer need Python 3.12), and in "
            "every checkout of Megatron-LM, which must contain the script or be on PYTHONPATH. "
            "Install the packages that it misses; megatron-core declares few of them."
        ) from error
