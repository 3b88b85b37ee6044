"""Requirements of DeepEP with a fixed budget, checked without side effects."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path

from chunkgraph.megatron.features.experts.cublaslt import cublaslt_need
from chunkgraph.megatron.rules.deep_ep import ALL_TO_ALL, measures_budget
from chunkgraph.settings.rule import Facts

__all__ = [
    "BACKEND_NAMES",
    "FUSED_GROUPED_MLP",
    "deep_ep_is_missing",
    "deep_ep_state",
    "supports_worst_case",
    "wants_fused_grouped_mlp",
]

BACKEND_NAMES = {"hybridep": "HybridEP", "deepep": "DeepEP"}
"""Dispatchers that a graph can contain, by Megatron's backend name; one package has both."""

FUSED_GROUPED_MLP = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
"""Environment variable without which Megatron does not fuse the grouped MLP, on any GPU."""

_OLD = (
    "deep_ep ({}) cannot size its output for the worst case (num_worst_tokens); build 1.2 or newer"
)


def deep_ep_is_missing(facts: Facts) -> str | None:
    """Describe what to install or set before a dispatcher can be captured; None if nothing.

    Args:
        facts: Facts of a model whose dispatcher is one of `BACKEND_NAMES`.
    """
    backend = facts.moe_flex_dispatcher_backend
    needs = [_deep_ep(backend)]
    if not measures_budget(facts):  # requirements of the fused grouped MLP
        needs += [cublaslt_need(), _environment()]
    problems = [text for text in needs if text]
    if not problems:
        return None
    listed = "\n  - ".join(problems)
    name = BACKEND_NAMES[backend]
    text = (
        f"Dispatch with {name} cannot be captured here:\n  - {listed}\nOr {ALL_TO_ALL}; it needs "
    )
    return f"{facts.text(text)}none of these."


def deep_ep_state() -> tuple[str | None, bool]:
    """Return the version of DeepEP (None if not installed), and whether it has HybridEP."""
    if importlib.util.find_spec("deep_ep") is None:
        return None, False
    version = "unknown version"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("deep_ep")
    return version, importlib.util.find_spec("hybrid_ep_cpp") is not None


def supports_worst_case() -> bool:
    """Return whether the installed DeepEP can size its output for the worst case.

    The check reads the source text, since the import needs a GPU.
    """
    spec = importlib.util.find_spec("deep_ep")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        buffer = Path(folder, "buffer.py")
        if buffer.exists():
            return "num_worst_tokens" in buffer.read_text(encoding="utf-8")
    return False


def wants_fused_grouped_mlp() -> bool:
    """Return whether the environment variable `FUSED_GROUPED_MLP` is set."""
    try:
        return int(os.environ.get(FUSED_GROUPED_MLP, "0")) > 0
    except ValueError:
        return False


def _deep_ep(backend: str) -> str | None:
    version, has_hybrid_ep = deep_ep_state()
    if backend == "deepep" and version is not None:
        if not supports_worst_case():
            return _OLD.format(version)
        if importlib.util.find_spec("pynvml") is None:
            return "pynvml is not installed; deep_ep needs it to detect NVLink"
        return None
    if has_hybrid_ep:
        return None
    if backend == "deepep":
        return "deep_ep is not installed; build DeepEP for this machine"
    how = "build the branch hybrid-ep of DeepEP for this machine"
    if version is None:
        return f"deep_ep is not installed; {how}"
    return f"deep_ep ({version}) has no HybridEP; {how}"


def _environment() -> str | None:
    if wants_fused_grouped_mlp():
        return None
    return (
        f"{FUSED_GROUPED_MLP} is not set to 1; without it, Megatron does not apply "
        "{{use_transformer_engine_op_fuser=}} to experts, not even on Hopper"
    )
