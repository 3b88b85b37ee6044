"""Run Megatron's training program, which needs more of a GPU than Megatron-core, on a CPU.

``megatron.training`` first checks that there is a GPU, reads its properties and memory, and creates
tensors of ``torch.cuda`` types. With these replacements a pretrain script runs unmodified on a
machine without a GPU. They include those of :mod:`chunkgraph.megatron.cpu.host`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import patch_attributes
from chunkgraph.megatron.cpu.host import cpu_host

_CAPABILITY = (9, 0)
_iterate = DataLoader.__iter__
_TENSOR_TYPES = {
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}
_NEEDED_FLAGS: dict[str, str | None] = {
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--use-cpu-initialization": None,
    "--no-persist-layer-norm": None,
    "--no-gradient-accumulation-fusion": None,
    "--no-bias-swiglu-fusion": None,
    "--no-bias-gelu-fusion": None,
    "--no-bias-dropout-fusion": None,
    "--no-masked-softmax-fusion": None,
    "--no-rope-fusion": None,
}
"""Megatron's flags without which it needs GPU kernels, by value; None for a flag without one."""


def cpu_flags(script_args: list[str]) -> list[str]:
    """Return the flags that a CPU run needs and that ``script_args`` lacks.

    Raises:
        ConfigError: A flag or its value needs a GPU.
    """
    positions = {
        arg.partition("=")[0]: i for i, arg in enumerate(script_args) if arg.startswith("--")
    }
    if {"--async-save", "--use-persistent-ckpt-worker"} <= positions.keys():
        raise ConfigError(
            "--use-persistent-ckpt-worker with --async-save needs a GPU, but --device is cpu: its "
            "worker chooses one, and the ranks would wait for it forever. Leave "
            "--use-persistent-ckpt-worker out."
        )
    missing: list[str] = []
    for flag, required in _NEEDED_FLAGS.items():
        if flag not in positions:
            missing += [flag] if required is None else [flag, required]
        elif required is not None:
            name, equals, value = script_args[positions[flag]].partition("=")
            if not equals:
                value = (script_args[positions[flag] + 1 :] or [""])[0]
            if value != required:
                raise ConfigError(
                    f"{name} {value} needs a GPU, but --device is cpu. Leave {name} out, or pass "
                    f"{name} {required}."
                )
    return missing


@contextmanager
def cpu_pretrain_host() -> Iterator[None]:
    """Install a CPU host on which ``megatron.training`` sees one GPU for each process."""
    with cpu_host():
        stack = ExitStack()
        stack.callback(patch_attributes(torch.cuda, _stubs()))
        if hasattr(torch, "accelerator"):
            # torch's optimizers and data loaders must still see that there is no GPU.
            none = {"is_available": lambda: False, "current_accelerator": lambda *_, **__: None}
            stack.callback(patch_attributes(torch.accelerator, none))
        stack.callback(patch_attributes(DataLoader, {"__iter__": _iterate_without_drawing}))
        with stack:
            yield


def _iterate_without_drawing(loader: DataLoader) -> Iterator[Any]:
    """Create an iterator without drawing from the generator that dropout uses here.

    A new iterator draws a seed from the CPU's generator. With a GPU, dropout uses another
    generator, so a resumed run, which creates a new iterator, still draws the same masks.
    """
    state = torch.get_rng_state()
    try:
        return _iterate(loader)
    finally:
        torch.set_rng_state(state)


def _stubs() -> dict[str, Any]:
    def returning(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    properties = SimpleNamespace(
        name="cpu", major=9, minor=0, total_memory=1 << 34, multi_processor_count=1
    )
    return {
        "is_available": returning(True),
        # Without devices Megatron creates no process groups.
        "device_count": returning(1),
        "get_device_properties": returning(properties),
        "get_device_capability": returning(_CAPABILITY),
        "get_device_name": returning("cpu"),
        "memory_stats": lambda *_, **__: defaultdict(int),
        "check_error": returning(None),
        "reset_peak_memory_stats": returning(None),
        **{
            f"{prefix}memory_{kind}": returning(0)
            for prefix in ("", "max_")
            for kind in ("allocated", "reserved")
        },
        **{name: _constructor(name, dtype) for name, dtype in _TENSOR_TYPES.items()},
    }


def _constructor(name: str, dtype: torch.dtype) -> type:
    """Return a replacement of ``torch.cuda.LongTensor`` etc.; a class, since it is also a type."""

    def new(_cls: type, values: Any = ()) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return type(name, (), {"__new__": staticmethod(new)})
