"""What empty sequences cost: transformer layers, forward and backward, in one graph's replay.

    python benchmarks/empty_sequences.py --json empty_sequences.json

The same eight documents fill a row each time (`--documents` for others); what changes is how many
sequences the offsets are for: as many as documents, 64 and 512, and the number that training for up
to 512 would replay by default; the others are empty. The report
also states whether the output and the input's gradient equal, to the last bit, those without empty
sequences; the latter with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 alone, for which sequences x heads x
tokens^2 have to stay below 2^30 (`--tokens 512 --sequences 32 64 128`). RoPE is what chunk graphs
capture; all that the layers of a chunk share of it is counted, for one layer or for `--num-layers`.
Needs one GPU and the extras `megatron` and `te`; takes about a minute. `--device cpu` runs the same
without graphs, to try the script.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chunkgraph.megatron.core.access import versions
from chunkgraph.megatron.features.packing.params import join_params, make_params, split_params
from chunkgraph.megatron.features.packing.rope import packed_rope
from chunkgraph.packing import PackedShape, pack
from chunkgraph.packing.seq_counts import default_seq_buckets
from chunkgraph.settings import Config, config_from_mapping
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import seed_everything, training_process

_PARTS = (1, 2, 3, 5, 7, 10, 16, 20)  # of 64, in tokens of the row
_ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    parser.add_argument(
        "--documents",
        metavar="D",
        type=int,
        nargs="+",
        default=[len(_PARTS)],
        help="that fill the row, one measurement after the other (default: 8)",
    )
    parser.add_argument(
        "--sequences",
        metavar="N",
        type=int,
        nargs="+",
        default=[64, 512],
        help="that offsets are for, besides as many as documents; less than these are left out "
        "(default: 64 512)",
    )
    parser.add_argument("--tokens", metavar="T", type=int, default=4096, help="rows, 64 or more")
    parser.add_argument("--num-layers", type=int, default=1, help="of the graph (default: 1)")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=45, help="times that each is measured")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layer-spec", default="transformer_engine")
    args = parser.parse_args()
    if args.tokens % 64:
        parser.error("--tokens is a multiple of 64")
    if not all(0 < count <= args.tokens for count in args.documents):
        parser.error("--documents are from 1 to --tokens")
    if args.num_layers < 1:
        parser.error("--num-layers is 1 or more")
    rows = [_lengths(count, args.tokens) for count in args.documents]
    os.environ.update(_ALONE)
    # There is no deterministic kernel for many sequences of the usual length.
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    config = _config(args)
    with training_process(config) as device, packed_rope():
        seed_everything(config.train.seed, device)
        (chunk,) = build_model(config, device)
        measured = [
            one
            for lengths in rows
            for one in _measure(
                _sequences(len(lengths), args.sequences, args.tokens),
                lambda n, lengths=lengths: _layer_work(chunk, lengths, args.tokens, n, device),
                lengths,
                device,
                args.rounds,
            )
        ]
    for one in measured:
        what = f"{len(one['lengths']):4d} documents, N = {one['num_seqs']:4d}"
        sys.stdout.write(f"{what}: {_line(one)}\n")
    results = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": versions(),
        "command": " ".join(sys.argv),
        "uses_graphs": device.type == "cuda",
        "model": config.model.model_dump(),
        "measured": measured,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if any(one["error"] for one in measured) else 0


def _lengths(num_documents: int, tokens: int) -> list[int]:
    """Of the documents, which fill the row."""
    if num_documents == len(_PARTS):
        return [part * tokens // 64 for part in _PARTS]
    # lengths as in text: the logarithm is normal
    weights = np.random.default_rng(num_documents).lognormal(size=num_documents)
    ends = np.cumsum(weights) / weights.sum() * (tokens - num_documents)
    return (np.diff(np.rint(ends), prepend=0).astype(int) + 1).tolist()


def _sequences(num_documents: int, counts: list[int], tokens: int) -> dict[int, bool]:
    """Numbers of sequences to measure, and whether training for the most would replay it."""
    largest = max(counts)
    captured = (*default_seq_buckets(largest, tokens), largest)
    replayed = min((n for n in captured if n > num_documents), default=0)
    numbers = sorted({num_documents, replayed, *counts})
    return {n: n == replayed for n in numbers if n >= num_documents}


def _line(one: dict[str, Any]) -> str:
    if one["error"]:
        return str(one["error"]).partition("\n")[0]
    ratio = "" if one["ratio"] is None else f", {one['ratio']:.4f} of that without empty ones"
    named = {True: "same", False: "OTHER", None: "-"}
    bits = f"bits of output {named[one['same_output']]}, gradient {named[one['same_gradient']]}"
    replayed = " (replayed by default)" if one["is_replayed"] else ""
    return f"{one['ms']:8.4f} ms{ratio}{replayed}; {bits}"


def _config(args: argparse.Namespace) -> Config:
    on_gpu = args.device == "cuda"
    return config_from_mapping(
        {
            "device": args.device,
            "model": {
                "num_layers": args.num_layers,
                "hidden_size": args.hidden_size,
                "ffn_hidden_size": args.hidden_size * 11 // 4,
                "num_attention_heads": args.heads,
                "seq_length": args.tokens,
                "transformer_config": {"normalization": "RMSNorm" if on_gpu else "LayerNorm"},
                "swiglu": True,
                "params_dtype": "bfloat16" if on_gpu else "float32",
                "layer_spec": args.layer_spec,
            },
            "train": {"num_microbatches": [1], "deterministic": False},
        }
    )


def _measure(
    sequences: dict[int, bool],
    work: Callable[[int], _LayerWork],
    lengths: list[int],
    device: torch.device,
    num_rounds: int,
) -> list[dict[str, Any]]:
    """Times of the same documents among more and more sequences.

    Args:
        sequences: see `_sequences`; the first have no empty one.
        work: of a number of sequences.
        lengths: of the documents.
        device: of the work.
        num_rounds: times that each is measured.
    """
    replays: dict[int, Callable[[], None]] = {}
    errors: dict[int, str] = {}
    bits: dict[int, tuple[str, str]] = {}
    for n in sequences:
        try:
            of_n = work(n)
            bits[n] = of_n.bits()
            replays[n] = _captured(of_n)
        except (RuntimeError, ValueError) as error:  # no memory, or no kernel: the others count
            errors[n] = f"{type(error).__name__}: {error}"
    times: dict[int, list[float]] = {n: [] for n in replays}
    # In turns, so that a clock that drifts does so for all of them, and in another order each time,
    # since how fast it is depends on the power that was drawn before.
    order = random.Random(0)
    for _ in range(num_rounds):
        for n in order.sample(list(replays), len(replays)):
            times[n].append(_time_ms(replays[n], device))
    first, first_bits = times.get(len(lengths)), bits.get(len(lengths))
    repeats = device.type == "cpu" or os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"

    def is_same(n: int, part: int) -> bool | None:
        return bits[n][part] == first_bits[part] if n in replays and first_bits else None

    return [
        {
            "lengths": lengths,
            "num_seqs": n,
            "is_replayed": is_replayed,
            "error": errors.get(n),
            "ms": statistics.median(times[n]) if n in times else None,
            "ratio": _median_ratio(times[n], first) if n in times and first else None,
            "same_output": is_same(n, 0),
            "same_gradient": is_same(n, 1) if repeats else None,
            "ms_all": times.get(n),
            "kernel_us": (
                _kernel_times(replays[n]) if n in replays and device.type == "cuda" else None
            ),
        }
        for n, is_replayed in sequences.items()
    ]


def _median_ratio(times: list[float], others: list[float]) -> float:
    """Of measurements of the same round: a clock moves more between rounds than within one."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


class _LayerWork:
    """Forward and backward of layers, by calling them."""

    def __init__(self, forward: Callable[[], torch.Tensor], hidden: torch.Tensor) -> None:
        self._forward = forward
        self._hidden = hidden
        self._grad = torch.randn_like(hidden)
        hidden.grad = torch.zeros_like(hidden)

    def __call__(self) -> None:
        self._forward().backward(self._grad)

    def bits(self) -> tuple[str, str]:
        """Digests of the output and of its input's gradient."""
        output = self._forward()
        (gradient,) = torch.autograd.grad(output, self._hidden, self._grad)
        return _digest(output), _digest(gradient)


def _digest(tensor: torch.Tensor) -> str:
    whole = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()


def _layer_work(
    chunk: torch.nn.Module,
    lengths: list[int],
    tokens: int,
    num_seqs: int,
    device: torch.device,
) -> _LayerWork:
    """The model's layers, on offsets for so many sequences; the same rows for any number."""
    torch.manual_seed(0)
    # The shape counts a dummy, which has no row here and so may be left out.
    shape = PackedShape(max(num_seqs, len(lengths) + 1), tokens)
    packed = pack(lengths, shape)
    packed = dataclasses.replace(
        packed,
        cu_seqlens=packed.cu_seqlens[: num_seqs + 1],
        cu_seqlens_padded=packed.cu_seqlens_padded[: num_seqs + 1],
    )
    assert packed.cu_seqlens_padded[-1] == tokens == sum(lengths)
    layers = next(m for m in chunk.modules() if hasattr(m, "layers")).layers
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = layers[0].register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    ids = torch.randint(256, (1, tokens), device=device)
    with torch.no_grad():
        chunk(
            input_ids=ids,
            position_ids=torch.from_numpy(packed.position_ids)[None].to(device),
            attention_mask=None,
            labels=ids,
            packed_seq_params=make_params(packed, device),
        )
    hook.remove()
    ((args, kwargs),) = seen
    kwargs = dict(kwargs)
    hidden = kwargs.pop("hidden_states", None)
    if hidden is None:
        hidden, *args = args
    hidden = hidden.detach().clone().requires_grad_()
    for parameter in layers.parameters():
        if parameter.grad is None:  # one for all graphs, which go on writing to it
            parameter.grad = torch.zeros_like(parameter)

    # New objects for every call, as in a replay's capture: nothing is remembered with them.
    packing = split_params(kwargs.pop("packed_seq_params"), "the layers")

    def forward() -> torch.Tensor:
        params = dict(packing)
        join_params(params)
        result = hidden
        for layer in layers:
            output = layer(result, *args, **kwargs, **params)
            result = output[0] if isinstance(output, tuple) else output
        return result

    return _LayerWork(forward, hidden)


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    """The work as the replay of one graph; itself without a GPU."""
    if not torch.cuda.is_available():
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()

    def replay() -> None:
        assert work is not None  # it holds the tensors whose addresses the graph has
        graph.replay()

    return replay


def _time_ms(replay: Callable[[], None], device: torch.device) -> float:
    """Of one replay among its like, in ms."""
    if device.type == "cpu":
        started = time.perf_counter()
        replay()
        return (time.perf_counter() - started) * 1e3
    num_replays = 20
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(num_replays):
        replay()
    begin.record()
    for _ in range(num_replays):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / num_replays


def _kernel_times(replay: Callable[[], None]) -> dict[str, float]:
    """Microseconds of each kernel in a replay, by name: where the difference comes from."""
    num_replays = 5
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_replays):
            replay()
        torch.cuda.synchronize()
    times_us = {e.key: e.self_device_time_total / num_replays for e in profiler.key_averages()}
    return {name: us for name, us in sorted(times_us.items(), key=lambda item: -item[1]) if us > 0}


if __name__ == "__main__":
    sys.exit(main())
