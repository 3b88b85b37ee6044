"""What a replay costs the host, part by part, with the graph's launch apart.

    python benchmarks/replay_host.py --json replay_host.json

One chunk of a few small layers, as a last stage: hidden states that were received into its static
input, labels that are copied, and losses, which are handed out as a clone. Each part is timed in
whole calls; floors are what torch alone takes for the same work: a node of autograd that does
nothing, a copy, a clone. (A replay's node goes round the support of ``torch.func``; a leaf with a
hook would be one that is not Python's.)

`--cold-mib M` reads M MiB of memory between calls, as training does between two replays. Code and
data that are not in the CPU's caches take longer. Each step checks the model right after it
launches the first forward, so the table also lists the first, the second and the later
microbatches separately.

The script runs on a GPU, or on the CPU recorder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chunkgraph.engine import Chunk, ChunkGraphs

_ROWS, _WIDTH = 1024, 64


class _Stage(nn.Module):
    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_parameters // 2))

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum(-1) * labels


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _given: Any, _hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return out.detach()

    @staticmethod
    def backward(_ctx: Any, *_grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None


_node_as_of_replays: Callable[..., Any] = super(torch.autograd.Function, _Nothing).apply


def _leaf_with_hook(out: torch.Tensor) -> torch.Tensor:
    leaf = out.detach().requires_grad_()
    leaf.register_hook(_nothing)
    return leaf


def _nothing(_grad: torch.Tensor) -> None:
    pass


class _Parts:
    """Times of named calls, us."""

    def __init__(self) -> None:
        self.us: dict[str, list[float]] = defaultdict(list)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        times = self.us[name]

        def timing(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                times.append((time.perf_counter_ns() - begin) / 1e3)

        return timing

    def subtract(self, part: str, whole: str) -> None:
        """Leave each call of ``part`` out of the call of ``whole`` that contains it."""
        pairs = zip(self.us[whole], self.us[part], strict=True)
        self.us[whole] = [all_of_it - of_part for all_of_it, of_part in pairs]

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.us.items()}


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    parser.add_argument("--steps", metavar="S", type=int, default=300, help="steps to measure")
    parser.add_argument(
        "--cold-mib", metavar="M", type=int, nargs="+", default=[0, 16], help="read between calls"
    )
    parser.add_argument(
        "--num-parameters",
        metavar="P",
        type=int,
        default=4,
        help="of the chunk, two for each layer",
    )
    parser.add_argument(
        "--num-microbatches", metavar="M", type=int, default=4, help="per step, at least 3"
    )
    args = parser.parse_args()
    if args.num_microbatches < 3:
        parser.error("--num-microbatches must be at least 3")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = (args.num_parameters, args.num_microbatches)
    rows = [_measured(device, args.steps, mib, *size) for mib in args.cold_mib]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU recorder"
    document = {
        "command": " ".join(["python", "benchmarks/replay_host.py", *sys.argv[1:]]),
        "device": name,
        "torch": str(torch.__version__),
        "us": rows,
    }
    _show(rows)
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _measured(
    device: torch.device,
    num_steps: int,
    cold_mib: int,
    num_parameters: int,
    num_microbatches: int,
) -> dict[str, float]:
    """Median microseconds by part."""
    torch.manual_seed(0)
    module = _Stage(num_parameters).to(device)
    chunk = Chunk(
        forward=module,
        parameters=tuple(module.parameters()),
        label="stage",
        module=module,
        copies_outputs=lambda *_, **__: True,
    )
    graphs = ChunkGraphs([chunk], [num_microbatches])
    hidden = torch.randn(_ROWS, _WIDTH, device=device).requires_grad_()
    labels = [torch.ones(_ROWS, dtype=torch.int64, device=device) for _ in range(num_microbatches)]
    for _ in range(2):  # a warmup step, which shows the layouts of gradients, and the capture
        with graphs.step(num_microbatches):
            for target in labels:
                graphs.callables[0](hidden, target).sum().backward()
    parts = _Parts()
    _watch(graphs, parts)
    call = parts.timed("forward in all", graphs.callables[0])
    node = parts.timed("floor: a node of autograd", _Nothing.apply)
    around = parts.timed("floor: a node, as replays'", _node_as_of_replays)
    leaf = parts.timed("floor: a leaf with a hook", _leaf_with_hook)
    copy = parts.timed("floor: a copy of labels", torch.Tensor.copy_)
    clone = parts.timed("floor: a clone of losses", torch.clone)
    rest = torch.ones(max(1, cold_mib) << 17, dtype=torch.int64)
    out, static = torch.zeros(_ROWS, device=device), labels[0].clone()
    for step in range(num_steps + 20):
        if step == 20:
            for times in parts.us.values():
                times.clear()
        with graphs.step(num_microbatches):
            losses = []
            for target in labels:
                received = graphs.reserve_input(0)
                if cold_mib:
                    rest.sum()
                losses.append(call(received, target))
            for loss in losses:
                if cold_mib:
                    rest.sum()
                loss.sum().backward()
        for floor, arguments in (
            (node, ([], hidden, out)),
            (around, ([], hidden, out)),
            (copy, (static, labels[1])),
            (clone, (out,)),
        ):
            if cold_mib:
                rest.sum()
            floor(*arguments)
        if device.type == "cuda":
            torch.cuda.synchronize()
    for _ in range(num_steps):  # last: a step after a new hook checks more
        if cold_mib:
            rest.sum()
        leaf(out)
    parts.subtract("launch of the forward", "forward in all")
    parts.subtract("launch of the backward", "backward in all")
    medians = parts.medians()
    for whole in ("forward in all", "backward in all"):
        times, name = parts.us[whole], whole.partition(" ")[0]
        by_microbatch = [times[i::num_microbatches] for i in range(num_microbatches)]
        medians[f"{name}, microbatch 1"] = statistics.median(by_microbatch[0])
        medians[f"{name}, microbatch 2"] = statistics.median(by_microbatch[1])
        medians[f"{name}, later"] = statistics.median(chain.from_iterable(by_microbatch[2:]))
    inside = ("check of the call", "inputs loaded")
    medians["node, wrapper and result"] = medians["forward in all"] - sum(
        medians[n] for n in inside
    )
    return {"cold MiB": cold_mib, **medians}


def _watch(graphs: Any, parts: _Parts) -> None:
    """Time the parts of a replay, on these graphs alone."""
    replayer, captured = graphs._replayer, graphs._captured
    for bank in captured.banks.values():
        for signature in bank.signatures:
            signature.tensors_of = parts.timed("check of the call", signature.tensors_of)
    for slot in (s for slots in captured.slots for s in slots):
        slot.inputs.load = parts.timed("inputs loaded", slot.inputs.load)
        slot.graphs["F"].replay = parts.timed("launch of the forward", slot.graphs["F"].replay)
        slot.graphs["B"].replay = parts.timed("launch of the backward", slot.graphs["B"].replay)
        hand_out = slot.input_grads.hand_out
        slot.input_grads.hand_out = parts.timed("input gradients handed out", hand_out)
    replayer.replay_backward = parts.timed("backward in all", replayer.replay_backward)


def _show(rows: list[dict[str, float]]) -> None:
    for name in rows[0]:
        numbers = "".join(f"{of_run[name]:10.1f}" for of_run in rows)
        sys.stdout.write(f"{name:28}{numbers}\n")


if __name__ == "__main__":
    sys.exit(main())
