"""Examine what chunk graphs can use on this machine, without changing anything."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chunkgraph.megatron.core.releases import RANGE, is_known
from chunkgraph.megatron.features.experts.device_gemms import (
    CUBLASLT_NEEDED,
    cublaslt_version,
    version_text,
)
from chunkgraph.megatron.features.experts.hybrid_ep import deep_ep_version, has_hybrid_ep

__all__ = ["Finding", "examine"]

State = Literal["ok", "absent", "wrong"]

_VERSION_PARTS = ("MAJOR", "MINOR", "PATCH")
_CUDNN_PARTIAL = 91500


@dataclass(frozen=True)
class Finding:
    """One finding about this machine.

    Attributes:
        name: Name of what was examined.
        state: One of ``ok``, ``absent`` (optional and missing), and ``wrong`` (missing although
            required, or present but unusable for chunk graphs).
        found: The finding in words.
        advice: An action to take, if any.
    """

    name: str
    state: State
    found: str
    advice: str = ""


def _python() -> Finding:
    version = sys.version.split()[0]
    advice = ""
    if sys.version_info < (3, 12):
        advice = "Megatron's training program needs 3.12 from megatron-core 0.18 on"
    return Finding("python", "ok", version, advice)


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", "wrong", "not installed", "pip install torch")
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs only"
    return Finding("torch", "ok", f"{torch.__version__}, {built}")


def _gpus() -> Finding:
    import torch

    if not torch.cuda.is_available():
        advice = "chunk graphs run on the CPU recorder, which tests them and makes nothing faster"
        return Finding("GPUs", "absent", "none", advice)
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = {f"{d.name} ({d.total_memory / 2**30:.0f} GiB)" for d in devices}
    return Finding("GPUs", "ok", f"{len(devices)} x {', '.join(sorted(names))}")


def _capture() -> Finding:
    """Capture a small module, which compares a replay with an eager pass."""
    import torch

    from chunkgraph.engine import ChunkGraphs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        module = torch.nn.Linear(8, 8, device=device)
        graphs = ChunkGraphs([module], [1])
        report = graphs.capture([(torch.zeros(2, 8, device=device, requires_grad=True),)])
        graphs.release()
    except Exception as error:  # noqa: BLE001 - any error is the finding
        return Finding("capture", "wrong", f"{type(error).__name__}: {str(error).splitlines()[0]}")
    how = "a CUDA graph" if device == "cuda" else "the CPU recorder"
    advice = ""
    if report.memsets_kept:
        advice = f"graphs keep memset nodes, about 6 us each: {report.memsets_kept}"
    return Finding("capture", "ok", f"a replay of {how} equals eager", advice)


def _megatron() -> Finding:
    version = _version("megatron-core") or _checkout_version()
    if version is None:
        advice = "pip install 'chunkgraph[megatron]', to train with Megatron-core"
        return Finding("megatron-core", "absent", "not installed", advice)
    major, minor = (int(part) for part in version.split(".")[:2])
    if not is_known((major, minor)):
        return Finding("megatron-core", "wrong", version, f"use {RANGE}")
    return Finding("megatron-core", "ok", version)


def _training() -> Finding:
    name = "megatron.training"
    if importlib.util.find_spec("megatron") is None:
        return Finding(name, "absent", "not installed")
    if importlib.util.find_spec(name) is None:
        advice = "`chunkgraph launch` needs it: megatron-core 0.17+ or a checkout of Megatron-LM"
        return Finding(name, "absent", "not in this megatron-core", advice)
    return Finding(name, "ok", "there")


def _transformer_engine() -> Finding:
    advice = "pip install 'chunkgraph[te]'; Megatron's local layers are slow on GPUs"
    version = _version("transformer-engine") or _version("transformer-engine-torch")
    return _optional("Transformer Engine", version, advice)


def _triton() -> Finding:
    advice = "on GPUs, gradients are then added to main_grad by a slower kernel of torch"
    return _optional("triton", _version("triton"), advice)


def _optional(name: str, version: str | None, advice: str) -> Finding:
    if version is None:
        return Finding(name, "absent", "not installed", advice)
    return Finding(name, "ok", version)


def _cudnn() -> Finding:
    import torch

    number = torch.backends.cudnn.version()
    if not number:
        return Finding("cuDNN", "absent", "not found")
    text = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    if number <= _CUDNN_PARTIAL:
        advice = (
            "up to 9.15 Transformer Engine captures its attention only for sequences of a multiple "
            "of 128 tokens (with context parallelism: 256 a rank)"
        )
        return Finding("cuDNN", "absent", text, advice)
    return Finding("cuDNN", "ok", text)


def _hybrid_ep() -> Finding:
    name = "HybridEP"
    version = deep_ep_version()
    if version is not None and has_hybrid_ep():
        return Finding(name, "ok", version)
    text = "not installed" if version is None else f"not in this build of deep_ep ({version})"
    advice = "build DeepEP's branch hybrid-ep, or use all-to-all or all-gather"
    return Finding(name, "absent", text, advice)


def _cublaslt() -> Finding:
    name = "cuBLASLt"
    number = cublaslt_version()
    if number is None:
        return Finding(name, "absent", "not found")
    if number < CUBLASLT_NEEDED:
        advice = (
            f"Transformer Engine's grouped GEMM with counts on the device, also for float16 and "
            f"FP8, needs {version_text(CUBLASLT_NEEDED)}"
        )
        return Finding(name, "absent", version_text(number), advice)
    return Finding(name, "ok", version_text(number))


def _grouped_gemm() -> Finding:
    name = "grouped GEMM"
    import torch

    from chunkgraph.megatron.features.experts.grouped_gemm import choose_gemm

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gemm, text = choose_gemm(device, torch.bfloat16)
    if gemm is None:
        return Finding(name, "absent", text, "without it, experts need moe_expert_capacity_factor")
    return Finding(name, "ok", f"{text}, for experts that take all tokens (dropless)")


def _determinism() -> Finding:
    name = "deterministic attention"
    value = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    if value == "0":
        return Finding(name, "ok", "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0")
    advice = "set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 to compare runs to the last bit"
    return Finding(name, "absent", "not enabled", advice)


def _checkout_version() -> str | None:
    """Return the version of a Megatron-LM checkout on the path, which pip does not know."""
    spec = importlib.util.find_spec("megatron")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(folder, "core", "package_info.py")
        if path.exists():
            text = path.read_text(encoding="utf-8")
            matches = [
                re.search(rf"^{part} = (\d+)", text, re.MULTILINE) for part in _VERSION_PARTS
            ]
            return ".".join(match.group(1) for match in matches if match is not None) or None
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


_LOOKS: Mapping[str, Callable[[], Finding]] = {
    "Python": _python,
    "torch": _torch,
    "Megatron-core": _megatron,
    "Megatron's training program": _training,
    "Transformer Engine": _transformer_engine,
    "triton": _triton,
    "determinism": _determinism,
}
_LOOKS_WITH_TORCH: Mapping[str, Callable[[], Finding]] = {
    "GPUs": _gpus,
    "capture and replay": _capture,
    "grouped GEMM": _grouped_gemm,
    "HybridEP": _hybrid_ep,
    "cuBLASLt": _cublaslt,
    "cuDNN": _cudnn,
}


def examine(show: Callable[[str], object]) -> list[Finding]:
    """Return all findings.

    Args:
        show: Called with the name of each look before it begins.
    """
    looks = {**_LOOKS, **(_LOOKS_WITH_TORCH if _version("torch") is not None else {})}
    findings = []
    for name, look in looks.items():
        show(name)
        findings.append(look())
    return findings
