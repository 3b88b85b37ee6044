"""Reach into Megatron-core: imports, private names, supported releases, patches to undo.

Importing this module imports no torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from chunkgraph.errors import ConfigError, MissingDependencyError

_FROM, _UP_TO = (0, 16), (0, 19)
RANGE = "0.16 to 0.19"


def is_known(release: tuple[int, int]) -> bool:
    """Return whether ``release``, (major, minor), is in the supported range."""
    return _FROM <= release <= _UP_TO


def import_megatron(name: str = "megatron.core") -> ModuleType:
    """Import a Megatron module; the error explains how to install a missing package."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "megatron":
            raise MissingDependencyError(
                f"{name} cannot be imported: {error}. Install megatron-core, for example with "
                "pip install 'chunkgraph[megatron]'."
            ) from error
        raise


def refuse_other_releases() -> None:
    """Refuse a release of megatron-core outside of the supported range.

    Inside the range, differences between releases are detected name by name. Another release may
    have all the names and do something else under them.

    Raises:
        ConfigError: The installed release is outside of the range.
    """
    info = import_megatron("megatron.core.package_info")
    release = (getattr(info, "MAJOR", 0), getattr(info, "MINOR", 0))
    if not is_known(release):
        raise ConfigError(
            f"This is megatron-core {getattr(info, '__version__', 'of unknown version')} "
            f"({info.__file__}); chunk graphs support the releases {RANGE}. Install one of them, "
            "or train without chunk graphs."
        )


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, Megatron-core and Transformer Engine, for reports."""
    by_package = {
        "python": sys.version.split()[0],
        "torch": str(importlib.import_module("torch").__version__),  # with its build
        # Megatron's __version__ carries the commit of the repository that it happens to run in.
        "megatron_core": _distribution_version("megatron-core"),
    }
    # Importing it loads its own cuDNN, which fails after torch has loaded another one.
    engine = _distribution_version("transformer-engine")
    return by_package | ({"transformer_engine": engine} if engine != "unknown" else {})


def _distribution_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def private_names(module_name: str, *names: str) -> tuple[Any, ...]:
    """Return attributes of a Megatron module that no release promises to keep.

    Raises:
        ConfigError: The installed release lacks one of them.
    """
    module = import_megatron(module_name)
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"{module_name} of megatron-core {versions()['megatron_core']} has no "
            f"{', '.join(missing)}, which chunkgraph needs. Releases {RANGE} have it; use one of "
            "them, or report the release."
        )
    return tuple(getattr(module, name) for name in names)


def patch_attributes(target: object, replacements: Mapping[str, Any]) -> Callable[[], None]:
    """Set attributes on ``target`` and return a function that puts its own old ones back."""
    undo = ExitStack()
    for name, value in replacements.items():
        if name in vars(target):
            undo.callback(setattr, target, name, vars(target)[name])
        else:
            undo.callback(delattr, target, name)
        setattr(target, name, value)
    return undo.close
