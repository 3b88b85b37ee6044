"""Run steps in each variant of a comparison: eager, chunk graphs, and Megatron's graphs.

Megatron's variants run as in its training loop, with its public switches (``cuda_graph_impl`` and
related ones) and no other change against eager.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.engine import ChunkGraphs
from chunkgraph.errors import ConfigError, StashError
from chunkgraph.megatron.core.access import import_megatron, private_names
from chunkgraph.settings import Config
from chunkgraph.settings.experts import uses_dropless
from chunkgraph.trainer.trained_model import TrainedModel

__all__ = ["Captures", "ChunkVariant", "Variant", "make_variant"]


@dataclass
class Captures:
    """Measurements of a variant's captures, as plain values for gathering.

    Attributes:
        duration_s: Seconds of the captures, if they are separate from steps.
        step: The step whose time contains the captures, if they are not separate.
        pool_bytes: Bytes that the graphs reserve, by part; None if unknown.
        num_first: Number of captures of the first session.
        num_after_first: Number of captures after the first session.
        overflow_reruns: Number of repeated steps so far, by the feature that had no room.
    """

    duration_s: float | None = None
    step: int | None = None
    pool_bytes: dict[str, int] | None = None
    num_first: int = 0
    num_after_first: int = 0
    overflow_reruns: dict[str, int] = field(default_factory=dict)

    def update(self, engine: ChunkGraphs) -> None:
        """Read the first capture session of chunk graphs, and count captures after it."""
        if engine.report is None:
            return
        if self.duration_s is None:
            report = engine.report
            self.duration_s = report.duration_ms / 1e3
            self.pool_bytes = {
                "slot_bytes": report.slot_bytes,
                "scratch_bytes": report.scratch_bytes,
                "static_bytes": report.static_bytes,
            }
            self.num_first = engine.counters.captures
        self.num_after_first = engine.counters.captures - self.num_first


class Variant:
    """The eager variant, and the base class of the others.

    Attributes:
        captures: Measurements of its captures so far.
        has_fragile_end: Whether other owners hold its graphs, so that the process should end
            without freeing them.
        is_plain: Whether the model runs unmodified.
    """

    name = "eager"
    is_plain = True
    has_fragile_end = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.captures = Captures()

    def transformer_options(self) -> dict[str, Any]:
        """Return more fields of Megatron's TransformerConfig."""
        return {}

    def ddp_scope(self) -> AbstractContextManager[object]:
        """Return a context for the time that the chunks are wrapped in DDP."""
        return nullcontext()

    def prepare(self, model: TrainedModel) -> None:
        """Prepare the model; called once, before the first step."""
        if self.is_plain:
            model.train_eagerly()

    def before_step(self, step: int) -> None:
        """Prepare a step, outside its time."""

    def after_step(self) -> None:
        """Check a step, outside its time."""

    def close(self) -> None:
        """Free the graphs that `TrainedModel` does not own."""


class ChunkVariant(Variant):
    """The variant with chunk graphs."""

    name = "chunk"
    is_plain = False

    def prepare(self, model: TrainedModel) -> None:
        """Attach chunk graphs."""
        super().prepare(model)
        self.graphs = model.attach_graphs()

    def after_step(self) -> None:
        """Read the captures, and count steps that ran again."""
        captures, stash = self.captures, self.graphs.stash
        is_first = captures.pool_bytes is None
        captures.update(self.graphs.engine)
        if is_first and captures.pool_bytes and stash is not None and stash.size is not None:
            captures.pool_bytes["stash_bytes"] = stash.size.device_bytes
        captures.overflow_reruns = dict(self.graphs.counters.overflow_reruns)


class EagerStashVariant(Variant):
    """The eager variant with Megatron's paged stash of tensors that Transformer Engine marks.

    The first step determines its pages, with the headroom of chunkgraph's stash. Megatron's
    training loop would also wait for a flag in every step, and run a step again.
    """

    name = "eager_stash"

    def transformer_options(self) -> dict[str, Any]:
        """Enable the stash, and set the size of its pages."""
        module = import_megatron("megatron.core.transformer.transformer_config")
        if not hasattr(module.TransformerConfig, "moe_paged_stash"):
            msg = "this release of megatron-core has no moe_paged_stash, so no eager_stash"
            raise ConfigError(msg)
        return {
            "moe_paged_stash": True,
            # A negative factor applies to the routed tokens, not to an even share.
            "moe_paged_stash_buffer_size_factor_cuda": -self.config.stash.headroom,
        }

    def after_step(self) -> None:
        """Refuse a step that ran out of pages: its gradients are wrong.

        Raises:
            StashError: Pages ran out on some rank.
        """
        flag = self._stash().check_paged_stash_overflow().int()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            msg = (
                "Megatron's paged stash ran out of pages in a step of eager_stash; raise "
                f"stash.headroom, which is {self.config.stash.headroom:g}."
            )
            raise StashError(msg)

    def close(self) -> None:
        """Disable the process-wide stash."""
        self._stash().paged_stash_reset(enabled=False)
        super().close()

    @staticmethod
    def _stash() -> Any:
        return import_megatron("megatron.core.transformer.moe.paged_stash")


class _MegatronVariant(Variant):
    """Megatron's graphs; the variant's name is its ``cuda_graph_impl``."""

    is_plain = False
    has_fragile_end = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not torch.cuda.is_available() or config.device == "cpu":
            msg = f"the variant {self.name} captures CUDA graphs and needs a GPU"
            raise ConfigError(msg)

    def transformer_options(self) -> dict[str, Any]:
        """Enable the implementation; it captures whole layers, or as much of them as it can."""
        module = import_megatron("megatron.core.transformer.transformer_config")
        names = {field.name for field in dataclasses.fields(module.TransformerConfig)}
        if "cuda_graph_impl" not in names:
            msg = f"this release of megatron-core has no cuda_graph_impl, so no {self.name} graphs"
            raise ConfigError(msg)
        options: dict[str, Any] = {
            "cuda_graph_impl": self.name,
            "cuda_graph_warmup_steps": self.num_eager_steps,
        }
        modules = self._modules()
        if "cuda_graph_modules" in names:
            options["cuda_graph_modules"] = modules
        elif modules:
            options["cuda_graph_scope"] = modules
        elif self.name == "full_iteration":  # a scope of the local implementation before 0.18
            options |= {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}
        return options

    def _modules(self) -> list[str]:
        """Return the modules of a layer to capture; empty for the whole layer.

        Without a capacity Megatron captures all of a layer but the dispatch and the experts.
        """
        if not uses_dropless(self.config.moe):
            return []
        has_dense_layers = 0 in (self.config.moe.moe_layer_freq or ())
        return ["attn", *(["mlp"] if has_dense_layers else []), "moe_router", "moe_preprocess"]

    @property
    def num_eager_steps(self) -> int:
        """Return the number of eager steps before the captures; an unmeasured step then replays."""
        return max(1, self.config.bench.num_warmup_steps - 1)

    def ddp_scope(self) -> AbstractContextManager[object]:
        """Give DDP its own stream.

        DDP keeps the nodes that accumulate gradients, and a capture cannot wait for nodes that
        were created on the default stream.
        """
        return _on_stream(torch.cuda.Stream())


class TransformerEngineVariant(_MegatronVariant):
    """A graph for each layer and microbatch, by Transformer Engine's ``make_graphed_callables``."""

    name = "transformer_engine"
    _helper: Any

    def prepare(self, model: TrainedModel) -> None:
        """Create the capturing helper, which reads Megatron's calculator of microbatches."""
        super().prepare(model)
        train, pipeline = self.config.train, self.config.pipeline
        calculator = import_megatron("megatron.core.num_microbatches_calculator")
        calculator.init_num_microbatches_calculator(
            dist.get_rank(),
            None,
            train.num_microbatches[0] * train.micro_batch_size * pipeline.data_parallel_size,
            train.micro_batch_size,
            pipeline.data_parallel_size,
        )
        (helper,) = private_names("megatron.core.transformer.cuda_graphs", "TECudaGraphHelper")
        self._helper = helper(
            model=model.chunks,
            config=model.chunks[0].config,
            seq_length=self.config.model.seq_length,
            micro_batch_size=train.micro_batch_size,
            optimizers=[model.optimizer],
        )
        self._chunks = model.chunks

    def before_step(self, step: int) -> None:
        """Capture after the eager steps."""
        if step != self.num_eager_steps:
            return
        hooked = [c for c in self._chunks if getattr(c, "use_forward_hook", False)]
        for chunk in hooked:
            chunk.disable_forward_pre_hook(param_sync=False)  # type: ignore[operator]
        started = time.perf_counter()
        self._helper.create_cudagraphs()
        self.captures.duration_s = time.perf_counter() - started
        for chunk in hooked:
            chunk.enable_forward_pre_hook()  # type: ignore[operator]
        if hooked:
            self._helper.cuda_graph_set_manual_hooks()

    def close(self) -> None:
        """Delete the graphs."""
        if self._helper.graphs_created():
            self._helper.delete_cuda_graphs()


class LocalVariant(_MegatronVariant):
    """A graph for each layer and microbatch, by Megatron, at the end of the first step."""

    name = "local"

    def prepare(self, model: TrainedModel) -> None:
        """Record the capturing step; the layers were built with their graph managers."""
        super().prepare(model)
        self.captures.step = 0

    def close(self) -> None:
        """Delete the graphs."""
        (delete,) = private_names("megatron.core.transformer.cuda_graphs", "delete_cuda_graphs")
        delete()


class FullIterationVariant(_MegatronVariant):
    """One graph for all forwards and backwards of a step, communication included.

    Megatron forbids reading a loss or gradient in between, and fixes the number of microbatches.
    The optimizer's step stays outside.
    """

    name = "full_iteration"

    def ddp_scope(self) -> AbstractContextManager[object]:
        """Give DDP the stream of the capture, as Megatron does."""
        module = import_megatron("megatron.core.full_cuda_graph")
        capture_stream = getattr(module, "get_shared_capture_stream", torch.cuda.Stream)
        return _on_stream(capture_stream())

    def prepare(self, model: TrainedModel) -> None:
        """Wrap the schedule."""
        super().prepare(model)
        (wrapper,) = private_names("megatron.core.full_cuda_graph", "FullCudaGraphWrapper")
        model.schedule = self._wrapper = wrapper(
            model.schedule, cuda_graph_warmup_steps=self.num_eager_steps
        )
        self.captures.step = self.num_eager_steps

    def close(self) -> None:
        """Delete the graph."""
        self._wrapper.reset_cuda_graph()


_VARIANTS: tuple[type[Variant], ...] = (
    Variant,
    EagerStashVariant,
    ChunkVariant,
    TransformerEngineVariant,
    LocalVariant,
    FullIterationVariant,
)


def make_variant(name: str, config: Config) -> Variant:
    """Create the variant ``name``.

    Raises:
        ConfigError: There is no such variant, or it cannot run here.
    """
    for kind in _VARIANTS:
        if kind.name == name:
            return kind(config)
    names = ", ".join(kind.name for kind in _VARIANTS)
    raise ConfigError(f"unknown variant {name!r}; choose from {names}.")


@contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
