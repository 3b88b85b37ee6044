"""The version of cuBLASLt that grouped products with counts on the device need."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["CUBLASLT_NEEDED", "cublaslt_need", "cublaslt_version", "version_text"]

CUBLASLT_NEEDED = 130801
"""13.8.1: the first version that correctly reads a grouped product's counts on the device."""


def cublaslt_version() -> int | None:
    """Return the version of this process's cuBLASLt, as 130801 for 13.8.1; None without one."""
    for library in ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"):
        with contextlib.suppress(OSError, AttributeError):
            get_version = ctypes.CDLL(library).cublasLtGetVersion
            get_version.restype = ctypes.c_size_t
            return int(get_version())
    return None


def version_text(number: int) -> str:
    """Format ``130801`` as 13.8.1."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def cublaslt_need() -> str | None:
    """Describe the cuBLASLt to load for counts on the device; None if this process has it."""
    number = cublaslt_version()
    needed = version_text(CUBLASLT_NEEDED)
    if number is None:
        return f"cuBLASLt {needed} or newer was not found"
    if number < CUBLASLT_NEEDED:
        return (
            f"cuBLASLt {version_text(number)} moves token counts through the host; load "
            f"{needed} or newer (a newer nvidia-cublas, or LD_PRELOAD of its two libraries)"
        )
    return None
