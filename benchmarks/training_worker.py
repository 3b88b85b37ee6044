"""Train one variant on this rank and measure it: the processes of ``training.py``.

    torchrun --nproc-per-node 2 benchmarks/training_worker.py REQUEST.json RESULT.json

Megatron's variants run as in its training loop, with its public switches (``cuda_graph_impl`` and
related ones) and no other change against eager.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from drawn_documents import DrawnDocuments
from torch.utils.data import DataLoader

from chunkgraph.data import read_documents
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron, private_names, versions
from chunkgraph.megatron.rules.experts import uses_dropless
from chunkgraph.settings import Config, load_config
from chunkgraph.settings.words import facts_of
from chunkgraph.trainer.batches import Batch
from chunkgraph.trainer.results import StepRecord
from chunkgraph.trainer.setup import training_process
from chunkgraph.trainer.trained_model import TrainedModel, forward_step

ERROR_MARK = "benchmark error: "
"""Begins the line of the output that says why a variant failed."""

_DROPOUT = "megatron.core.fusions.fused_bias_dropout"
_STEP_RANGE = "chunkgraph benchmark step"
_NUM_PROFILED_STEPS = 2


class Variant:
    """Eager training, and the base class of the others.

    Args:
        config: The run.
        num_warmup_steps: Number of steps before the measured ones.
    """

    has_fragile_end = False
    """Whether other owners hold its graphs, so that the process ends without freeing them."""

    def __init__(self, config: Config, num_warmup_steps: int) -> None:
        self.config = config
        self.num_warmup_steps = num_warmup_steps

    def transformer_options(self) -> dict[str, Any]:
        """Return more fields of Megatron's TransformerConfig."""
        return {}

    def build_scope(self) -> AbstractContextManager[object]:
        """Return a context for the time that the model is built."""
        return nullcontext()

    def prepare(self, model: TrainedModel) -> None:
        """Prepare the model before the first step."""
        model.train_eagerly()

    def before_step(self, step: int) -> None:
        """Prepare a step, outside its time."""

    def close(self) -> None:
        """Free the graphs that `TrainedModel` does not own."""


class ChunkGraphsVariant(Variant):
    """Chunk graphs."""

    def prepare(self, model: TrainedModel) -> None:
        """Attach chunk graphs."""
        model.attach_graphs()


class _MegatronGraphs(Variant):
    """Megatron's graphs of whole layers, or of as much of them as it can capture."""

    implementation: str
    has_fragile_end = True

    @property
    def num_eager_steps(self) -> int:
        """Return the number of steps before the captures; an unmeasured step then replays."""
        return max(1, self.num_warmup_steps - 1)

    def transformer_options(self) -> dict[str, Any]:
        """Enable the implementation."""
        module = import_megatron("megatron.core.transformer.transformer_config")
        names = {field.name for field in dataclasses.fields(module.TransformerConfig)}
        options: dict[str, Any] = {
            "cuda_graph_impl": self.implementation,
            "cuda_graph_warmup_steps": self.num_eager_steps,
        }
        modules = self._modules()
        if "cuda_graph_modules" in names:
            options["cuda_graph_modules"] = modules
        elif modules:
            options["cuda_graph_scope"] = modules
        elif self.implementation == "full_iteration":  # a scope of `local` before 0.18
            options |= {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}
        return options

    def _modules(self) -> list[str]:
        """Return the modules of a layer to capture; empty for the whole layer.

        Without a capacity Megatron captures all of a layer but the dispatch and the experts.
        """
        if not uses_dropless(facts_of(self.config)):
            return []
        has_dense_layers = 0 in (self.config.model.transformer_config.get("moe_layer_freq", ()))
        return ["attn", *(["mlp"] if has_dense_layers else []), "moe_router", "moe_preprocess"]

    def build_scope(self) -> AbstractContextManager[object]:
        """Build the model, and with it DDP, on its own stream.

        DDP keeps the nodes that accumulate gradients, and a capture cannot wait for nodes that
        were created on the default stream.
        """
        return _on_stream(torch.cuda.Stream())

    def prepare(self, model: TrainedModel) -> None:
        """Leave the model as Megatron built it."""


class LocalVariant(_MegatronGraphs):
    """A graph for each layer and microbatch, by Megatron, at the end of the first step."""

    implementation = "local"

    def close(self) -> None:
        """Delete the graphs."""
        (delete,) = private_names("megatron.core.transformer.cuda_graphs", "delete_cuda_graphs")
        delete()


class TransformerEngineVariant(_MegatronGraphs):
    """A graph for each layer and microbatch, by Transformer Engine's ``make_graphed_callables``."""

    implementation = "transformer_engine"

    def prepare(self, model: TrainedModel) -> None:
        """Create the capturing helper, which reads Megatron's calculator of microbatches."""
        train, data_parallel = self.config.train, self.config.pipeline.data_parallel_size
        calculator = import_megatron("megatron.core.num_microbatches_calculator")
        calculator.init_num_microbatches_calculator(
            dist.get_rank(),
            None,
            train.num_microbatches[0] * train.micro_batch_size * data_parallel,
            train.micro_batch_size,
            data_parallel,
        )
        (helper,) = private_names("megatron.core.transformer.cuda_graphs", "TECudaGraphHelper")
        self._helper = helper(
            model=model.chunks,
            config=model.chunks[0].config,
            seq_length=self.config.model.seq_length,
            micro_batch_size=train.micro_batch_size,
            optimizers=[model.optimizer],
        )
        self._chunks: Any = model.chunks

    def before_step(self, step: int) -> None:
        """Capture after the eager steps."""
        if step != self.num_eager_steps:
            return
        hooked = [c for c in self._chunks if getattr(c, "use_forward_hook", False)]
        for chunk in hooked:
            chunk.disable_forward_pre_hook(param_sync=False)
        self._helper.create_cudagraphs()
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
        if hooked:
            self._helper.cuda_graph_set_manual_hooks()

    def close(self) -> None:
        """Delete the graphs."""
        if self._helper.graphs_created():
            self._helper.delete_cuda_graphs()


class FullIterationVariant(_MegatronGraphs):
    """One graph for all forwards and backwards of a step, communication included.

    Megatron forbids reading a loss or gradient in between, and fixes the number of microbatches.
    The optimizer's step stays outside.
    """

    implementation = "full_iteration"

    def build_scope(self) -> AbstractContextManager[object]:
        """Build DDP on the stream of the capture, as Megatron does."""
        module = import_megatron("megatron.core.full_cuda_graph")
        capture_stream = getattr(module, "get_shared_capture_stream", torch.cuda.Stream)
        return _on_stream(capture_stream())

    def prepare(self, model: TrainedModel) -> None:
        """Wrap the schedule."""
        (wrapper,) = private_names("megatron.core.full_cuda_graph", "FullCudaGraphWrapper")
        model.schedule = self._wrapper = wrapper(
            model.schedule, cuda_graph_warmup_steps=self.num_eager_steps
        )

    def close(self) -> None:
        """Delete the graph."""
        self._wrapper.reset_cuda_graph()


VARIANTS: dict[str, type[Variant]] = {
    "eager": Variant,
    "chunk": ChunkGraphsVariant,
    "transformer_engine": TransformerEngineVariant,
    "local": LocalVariant,
    "full_iteration": FullIterationVariant,
}


class Run:
    """Train and measure one variant on this rank.

    All ranks start a step together. Packed microbatches are on the device before its time starts;
    others come from a loader like Megatron's, whose thread takes time of the host's interpreter.

    Args:
        config: The run; model parallel groups must be initialized.
        device: This rank's device.
        variant: The variant to run.
        num_steps: Number of steps that `step` can run.
        router_skew: See `skew_routers`; 0 leaves routers as they are.
        document_counts: See `DrawnDocuments`; empty for the documents of the text.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        variant: Variant,
        num_steps: int,
        router_skew: float = 0.0,
        document_counts: Sequence[int] = (),
    ) -> None:
        self._config, self._device, self._variant = config, device, variant
        options = variant.transformer_options()
        if device.type == "cuda":
            # Megatron's program calls this function with another rate before. So torch compiles it
            # for any rate, which takes more of the host's time in each call.
            layout, size = config.pipeline, config.train.micro_batch_size
            split = layout.tensor_model_parallel_size if layout.sequence_parallel else 1
            rows = config.tokens_per_sequence // layout.context_parallel_size // split
            x = torch.zeros(rows, size, config.model.hidden_size, device=device).bfloat16()
            import_megatron(_DROPOUT).bias_dropout_add_fused_train((x, None), x, 0.1)
        with variant.build_scope():
            self._model = model = TrainedModel(config, device, transformer_options=options)
        if router_skew:
            skew_routers(model.chunks, router_skew)
        if document_counts:
            _draw_documents(model, document_counts)
        is_packed = model.batches.banks is not None
        self._loaders = [self._load(num_steps) for _ in model.chunks if not is_packed]
        variant.prepare(model)
        self._records: list[StepRecord] = []
        self._num_tokens: list[int] = []
        # Host time of each step's schedule in ms, and of its forward steps in us.
        self._schedule_ms: list[float] = []
        self._forward_us: list[list[float]] = []
        model.schedule = _timed(model.schedule, self._schedule_ms, 1e3)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    def step(self, *, announces_next: bool = True) -> None:
        """Run the next step."""
        model, index = self._model, len(self._records)
        self._variant.before_step(index)
        count = model.count(index)
        packings = model.batches.schedule_options(index, count).get("packings")
        batches = [] if self._loaders else list(model.batches.step(index, count))
        loaded = [map(self._to_device, islice(loader, count)) for loader in self._loaders]
        self._forward_us.append([])
        record = model.run_step(
            index,
            loaded or [iter(batches) for _ in model.chunks],
            announces_next=announces_next,
            forward_step=_timed(forward_step, self._forward_us[-1], 1e6),
            timed=self._started_together(),
        )
        self._records.append(record)
        rows = count * self._config.train.micro_batch_size * self._config.tokens_per_sequence
        self._num_tokens.append(rows if packings is None else sum(map(sum, packings)))

    def kernel_share(self) -> float | None:
        """Profile two more steps; return the share of their time in which a kernel runs.

        NCCL's sends and receives do not count, since they wait for other ranks.

        Returns:
            The share; None on a CPU.
        """
        if self._device.type == "cpu":
            return None
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self.step()
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            for _ in range(_NUM_PROFILED_STEPS):
                self.step()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        return busy_share(events)

    def results(self, first: int, last: int) -> dict[str, Any]:
        """Return what this rank measured in the steps from ``first`` to before ``last``.

        Gathers the parameters of a sharded optimizer, so no step may follow.
        """
        is_gpu = self._device.type == "cuda"
        measured = self._records[first:last]
        graphs = self._model.graphs
        # A graph of a whole iteration calls no forward step.
        forwards_us = [us for of_step in self._forward_us[first:last] for us in of_step]
        return {
            "step_ms": [record.step_ms for record in measured],
            "num_microbatches": [record.num_microbatches for record in measured],
            "num_tokens": self._num_tokens[first:last],
            "is_fallback": [bool(record.fallbacks) for record in measured],
            "num_captures": sum(record.captures for record in measured),
            "num_reruns": 0 if graphs is None else sum(graphs.counters.overflow_reruns.values()),
            "host_schedule_ms": statistics.median(self._schedule_ms[first:last]),
            "host_forward_us": statistics.median(forwards_us) if forwards_us else None,
            "reserved_bytes": torch.cuda.max_memory_reserved(self._device) if is_gpu else 0,
            # Of all steps, to the last bit: warmup is compared too.
            "losses": [record.loss.hex() for record in self._records],
            "grad_norms": [record.grad_norm.hex() for record in self._records],
            "parameters_sha256": self._parameters_sha256(),
        }

    def close(self) -> None:
        """Free the graphs, before process groups are destroyed."""
        self._variant.close()
        self._model.close()

    def _load(self, num_steps: int) -> Iterator[Batch]:
        model, is_gpu = self._model, self._device.type == "cuda"
        drawn = (model.batches.step(step, model.count(step)) for step in range(num_steps))
        samples = [{name: v.cpu() for name, v in one.items()} for step in drawn for one in step]
        options = {"num_workers": 2, "pin_memory": True} if is_gpu else {}
        return iter(DataLoader(samples, batch_size=None, **options))

    def _to_device(self, batch: Batch) -> Batch:
        return {name: v.to(self._device, non_blocking=True) for name, v in batch.items()}

    @contextmanager
    def _started_together(self) -> Iterator[None]:
        if dist.get_world_size() > 1:
            dist.barrier()
            torch.cuda.synchronize()  # nothing on a CPU host
        with torch.profiler.record_function(_STEP_RANGE):
            yield

    def _parameters_sha256(self) -> str:
        self._model.finish_parameter_gather()
        digest = hashlib.sha256()
        for chunk in self._model.chunks:
            for parameter in chunk.parameters():
                value = parameter.detach().to("cpu").contiguous().view(-1)
                digest.update(value.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _draw_documents(model: TrainedModel, counts: Sequence[int]) -> None:
    batches = model.batches
    if batches.banks is None or batches.banks.groups is not None:
        raise ConfigError("--document-counts needs packing with one context-parallel size.")
    of_text = batches.documents
    batches.documents = DrawnDocuments(
        read_documents(model.config.data.path),
        counts=counts,
        num_tokens=of_text.num_tokens,
        seed=of_text.seed,
        multiple=of_text.multiple,
    )


def busy_share(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of the profiled steps' time in which kernels or copies run.

    Args:
        events: The events of a trace in Chrome's format (``traceEvents``).

    Returns:
        The share, without sends and receives; None if the trace has no step.
    """
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for event in events:
        is_kernel = event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        is_step = event.get("cat") == "user_annotation" and event["name"] == _STEP_RANGE
        if is_step or (is_kernel and "SendRecv" not in event["name"]):
            start = float(event["ts"])
            spans[is_kernel].append((start, start + float(event["dur"])))
    busy = total = 0.0
    for start, end in spans[False]:
        total += end - start
        until = start
        for a, b in sorted(spans[True]):
            busy += max(0.0, min(b, end) - max(a, until))
            until = max(until, min(b, end))
    return busy / total if total else None


def skew_routers(chunks: Sequence[torch.nn.Module], skew: float) -> None:
    """Make routers prefer some experts, by a bias that falls from ``skew`` to 0.

    The preferred experts begin at the first one in even layers and in the middle in odd layers, so
    with experts on two ranks each rank has the load of every other layer.
    """
    routers = [m for chunk in chunks for m in chunk.modules() if hasattr(m, "expert_bias")]
    if not routers or any(router.expert_bias is None for router in routers):
        raise ConfigError(
            "--router-skew needs moe_router_enable_expert_bias in model.transformer_config."
        )
    for router in routers:
        num_experts = len(router.expert_bias)
        first = router.layer_number % 2 * (num_experts // 2)
        bias = torch.linspace(skew, 0.0, num_experts).roll(first)
        router.expert_bias.copy_(bias)


def summary(
    config: Config, device: torch.device, own: dict[str, Any], share: float | None
) -> dict[str, Any]:
    """Gather the results of all ranks; a collective call.

    A step takes as long as on its slowest rank, and falls back on all ranks together.
    """
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {**own, "kernel_share": share})
    shares = [rank["kernel_share"] for rank in ranks if rank["kernel_share"] is not None]
    # `ranks` holds every data-parallel rank's data once for each rank of its pipeline.
    num_copies = len(ranks) // config.pipeline.data_parallel_size
    numbers = versions()
    is_gpu = device.type == "cuda"
    if is_gpu:
        numbers["cuda"] = str(torch.version.cuda)
        numbers["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "num_gpus": len(ranks) if is_gpu else 0,
        "versions": numbers,
        "is_deterministic": config.train.deterministic,
        **ranks[0],
        "step_ms": [max(times) for times in zip(*(r["step_ms"] for r in ranks), strict=True)],
        "num_tokens": [
            sum(counts) // num_copies
            for counts in zip(*(r["num_tokens"] for r in ranks), strict=True)
        ],
        "num_captures": sum(rank["num_captures"] for rank in ranks),
        "host_schedule_ms": max(rank["host_schedule_ms"] for rank in ranks),
        "host_forward_us": max(
            (us for rank in ranks if (us := rank["host_forward_us"]) is not None), default=None
        ),
        "kernel_share": min(shares, default=None),
        "reserved_bytes": max(rank["reserved_bytes"] for rank in ranks),
        "reserved_bytes_by_rank": [rank["reserved_bytes"] for rank in ranks],
        "parameters_sha256": [rank["parameters_sha256"] for rank in ranks],
    }


def main(request_path: str, result_path: str) -> int:
    """Measure the variant of a request; rank 0 writes the results."""
    try:
        _main(json.loads(Path(request_path).read_text(encoding="utf-8")), Path(result_path))
    except Exception as error:  # noqa: BLE001 - everything is reported
        traceback.print_exc()
        first_line = (str(error).strip() or "no message").splitlines()[0]
        print(f"{ERROR_MARK}rank {os.environ['RANK']}: {type(error).__name__}: {first_line}")
        _leave(1)
    return 0


def _main(request: Mapping[str, Any], result_path: Path) -> None:
    config = load_config(request["config"], request["overrides"])
    first, last = request["num_warmup_steps"], request["num_warmup_steps"] + request["num_steps"]
    variant = VARIANTS[request["variant"]](config, first)
    with training_process(config) as device:
        more = last + 1 + _NUM_PROFILED_STEPS, request["router_skew"], request["document_counts"]
        run = Run(config, device, variant, *more)
        for index in range(last):
            run.step(announces_next=request["profiles"] or index < last - 1)
        share = run.kernel_share() if request["profiles"] else None
        result = summary(config, device, run.results(first, last), share)
        if dist.get_rank() == 0:
            result_path.write_text(json.dumps(result), encoding="utf-8")
        if variant.has_fragile_end:
            dist.barrier()
            _leave(0)
        run.close()


def _timed(function: Callable[..., Any], times: list[float], units: float) -> Callable[..., Any]:
    """Add the host time of each call to ``times``; ``units`` is their number in a second."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        times.append((time.perf_counter() - started) * units)
        return result

    return timed


@contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _leave(code: int) -> NoReturn:
    """End the process without destroying graphs and process groups, which may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
