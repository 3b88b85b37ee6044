"""Requirements of hybrid models on a GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

_KERNELS = (
    "mamba_ssm.ops.triton.ssd_combined",
    "mamba_ssm.ops.triton.layernorm_gated",
    "causal_conv1d.cpp_functions",
    "einops",
)


def missing_kernels() -> str:
    """Return why Mamba layers cannot repeat to the last bit on this machine; "" if they can."""
    for name in _KERNELS:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{name} cannot be imported ({error})"
    for package in ("mamba_ssm", "causal_conv1d"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed as a package; Megatron asks for its version"
    if importlib.util.find_spec("mamba_ssm.utils.determinism") is None:
        return "this mamba_ssm has no deterministic mode; release 2.3 has"
    return ""
