"""``chunkgraph doctor``: show what chunk graphs can use on this machine, and what to install."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import runpy
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chunkgraph._outputs import check_output, write_output
from chunkgraph.cli.arguments import add_json, prints_json

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_CUDNN_NEEDED = 91501
_NEEDS = {
    "plan": (),
    "train on a CPU": ("torch", "capture", "megatron-core"),
    "train on GPUs": ("torch", "GPUs", "capture", "megatron-core", "Transformer Engine"),
    "launch Megatron's scripts": ("torch", "capture", "megatron-core", "megatron.training"),
    "run torch's pipelines": ("torch", "capture"),
}
"""Findings that each use of a machine needs."""
_STYLES = {"ok": "green", "absent": "yellow", "wrong": "bold red"}


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what chunk graphs can use on this machine",
        description="Check Python, torch, GPUs, Megatron-core, Transformer Engine and the "
        "requirements of mixture of experts, and capture and replay a small module. Nothing is "
        "changed. Exit code 1 if an installed component does not work with chunk graphs.",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    check_output("doctor: --json", args.json)
    findings = []
    with Console(stderr=True).status("checking") as status:
        for look in (*_LOOKS, *(_LOOKS_WITH_TORCH if _version("torch") else ())):
            # With a spinner the line is drawn at once, before imports take seconds.
            status.update(f"checking {look.__name__.strip('_')}", spinner="dots")
            findings.append(look())
    working = {finding.name for finding in findings if finding.state == "ok"}
    missing = {
        use: [name for name in needs if name not in working] for use, needs in _NEEDS.items()
    }
    reasons = {use: f"needs {', '.join(n)} (see above)" if n else "" for use, n in missing.items()}
    if args.json is not None:
        uses = [{"name": u, "is_ready": not why, "reason": why} for u, why in reasons.items()]
        content = json.dumps([*map(asdict, findings), *uses], indent=1)
        write_output("doctor: --json", args.json, f"{content}\n")
    if not prints_json(args):
        table = Table(box=None, pad_edge=False, show_header=False)
        for finding in findings:
            text = f"{finding.found}; {finding.advice}" if finding.advice else finding.found
            # Text, not str: brackets in advice are not markup.
            table.add_row(finding.name, Text(finding.state, _STYLES[finding.state]), Text(text))
        table.add_row()
        table.add_row(Text("This machine can be used to", "bold"))
        for use, reason in reasons.items():
            state = Text("no", "bold red") if reason else Text("yes", "bold green")
            table.add_row(use, state, Text(reason))
        Console(highlight=False).print(table)
    return int(any(finding.state == "wrong" for finding in findings))


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
    state: Literal["ok", "absent", "wrong"]
    found: str
    advice: str = ""


def _python() -> Finding:
    need = "Megatron's training program needs 3.12 from megatron-core 0.18 on"
    advice = need if sys.version_info < (3, 12) else ""
    return Finding("python", "ok", sys.version.split()[0], advice)


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
    kept = report.memsets_kept
    advice = f"graphs keep memset nodes, about 6 us each: {kept}" if kept else ""
    return Finding("capture", "ok", f"a replay of {how} equals eager", advice)


def _megatron() -> Finding:
    version = _version("megatron-core") or _checkout_version()
    if version is None:
        advice = "pip install 'chunkgraph[megatron]', to train with Megatron-core"
        return Finding("megatron-core", "absent", "not installed", advice)
    from chunkgraph.megatron.core.access import RANGE, is_known

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
    if version is None:
        return Finding("Transformer Engine", "absent", "not installed", advice)
    return Finding("Transformer Engine", "ok", version)


def _cudnn() -> Finding:
    import torch

    from chunkgraph.megatron.features.experts.grouped_gemm import version_text

    number = torch.backends.cudnn.version()  # 91501 for 9.15.1
    if number is None:
        return Finding("cuDNN", "absent", "not found")
    if number >= _CUDNN_NEEDED:
        return Finding("cuDNN", "ok", version_text(number))
    advice = (
        "up to 9.15 Transformer Engine captures its attention only for sequences of a multiple of "
        "128 tokens (with context parallelism: 256 a rank)"
    )
    return Finding("cuDNN", "absent", version_text(number), advice)


def _hybrid_ep() -> Finding:
    from chunkgraph.megatron.features.experts.hybrid_ep import deep_ep_version, has_hybrid_ep

    name = "HybridEP"
    version = deep_ep_version()
    if version is not None and has_hybrid_ep():
        return Finding(name, "ok", version)
    text = "not installed" if version is None else f"not in this build of deep_ep ({version})"
    advice = "build DeepEP's branch hybrid-ep, or use all-to-all or all-gather"
    return Finding(name, "absent", text, advice)


def _grouped_gemm() -> Finding:
    import torch

    from chunkgraph.megatron.features.experts.grouped_gemm import choose_gemm

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name, (gemm, text) = "grouped GEMM", choose_gemm(device, torch.bfloat16)
    if gemm is None:
        return Finding(name, "absent", text, "without it, experts need moe_expert_capacity_factor")
    return Finding(name, "ok", f"{text}, for experts that take all tokens (dropless)")


def _checkout_version() -> str | None:
    """Return the version of a Megatron-LM checkout on the path, which pip does not know."""
    spec = importlib.util.find_spec("megatron")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        if (path := Path(folder, "core", "package_info.py")).exists():
            version: str | None = runpy.run_path(str(path)).get("__shortversion__")
            return version
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


_LOOKS = (_python, _torch, _megatron, _training, _transformer_engine)
_LOOKS_WITH_TORCH = (_gpus, _capture, _grouped_gemm, _hybrid_ep, _cudnn)
