"""The ways to run a step that are compared: eager, chunk graphs, and Megatron's own graphs.

Megatron's ways are driven as its own training loop drives them, with its public switches
(``cuda_graph_impl`` and what belongs to it) and nothing else changed against eager.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chunkgraph.errors import ConfigError, StashError
from chunkgraph.megatron.attachment import MegatronChunkGraphs, attach, config_of
from chunkgraph.megatron.core.access import import_megatron, private_names
from chunkgraph.megatron.features.experts.packed_padding import keep_padding_from_experts
from chunkgraph.megatron.features.packing.steps import Packings
from chunkgraph.megatron.features.stash.feature import stash_options
from chunkgraph.megatron.receive import receiving_lengths
from chunkgraph.settings import Config
from chunkgraph.trainer.batches import packed_shape
from chunkgraph.trainer.loop import capture_options

__all__ = ["ChunkVariant", "Variant", "make_variant"]


class Variant:
    """Eager, and the base of the others.

    Attributes:
        capture_s: seconds of the captures, where they can be told from a step's work.
        capture_step: the step whose time contains the captures, where they cannot.
        pool_bytes: what the graphs reserve, by part; None where it is not known.
        forward_backward: Megatron's schedule function, wrapped as the variant needs.
        has_fragile_end: whether its graphs are not ours to take down, so that the process had
            better just end.
        is_plain: whether the model is left as it is.
    """

    name = "eager"
    is_plain = True
    has_fragile_end = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.capture_s: float | None = None
        self.capture_step: int | None = None
        self.pool_bytes: dict[str, int] | None = None
        self._undo = ExitStack()

    def transformer_options(self) -> dict[str, Any]:
        """Further fields of Megatron's TransformerConfig."""
        return {}

    def ddp_scope(self) -> AbstractContextManager[object]:
        """Entered while the chunks are wrapped in DDP."""
        return nullcontext()

    def prepare(self, chunks: list[nn.Module], optimizer: Any) -> None:
        """Take the model that was built; called once, before the first step."""
        del optimizer
        self.forward_backward = _schedule()
        if self.is_plain and packed_shape(self.config) is not None:
            # What chunk graphs do with packed documents in eager steps too.
            if self.config.moe.num_moe_experts is not None:
                self._undo.callback(keep_padding_from_experts(chunks, config_of(chunks[0])))
            if self.config.packing.buckets:
                device = next(chunks[0].parameters()).device
                self.forward_backward = receiving_lengths(chunks, device, self.forward_backward)

    def told(self, packings: Packings | None, buckets: Sequence[int] | None) -> dict[str, Any]:
        """What the schedule function is told besides of the step that begins.

        Args:
            packings: documents of each microbatch; None without packing.
            buckets: rows of each microbatch; None where all have the same.
        """
        del packings
        return {} if buckets is None else {"buckets": buckets}

    def announce(self, packings: Packings | None, buckets: Sequence[int] | None) -> None:
        """Told of the next step, before this one's optimizer."""

    def counted(self) -> dict[str, Any]:
        """What happened to graphs since the last call, as fields of a measured step."""
        return {}

    def before_step(self, step: int) -> None:
        """Called before each step, outside its time."""

    @property
    def captures_after_first(self) -> int:
        """Captures after the first session."""
        return 0

    @property
    def overflow_reruns(self) -> dict[str, int]:
        """Steps that were run anew, by what had no room."""
        return {}

    def close(self) -> None:
        """Drop the graphs."""
        self._undo.close()


class ChunkVariant(Variant):
    """The plug-in of this package."""

    name = "chunk"
    is_plain = False
    graphs: MegatronChunkGraphs

    def prepare(self, chunks: list[nn.Module], optimizer: Any) -> None:
        """Attach chunk graphs."""
        super().prepare(chunks, optimizer)
        self.graphs = attach(
            chunks,
            scope=self.config.capture.scope,
            options=capture_options(self.config),
            packing=packed_shape(self.config, config_of(chunks[0])),
            buckets=self.config.packing.buckets,
            seq_buckets=self.config.seq_buckets,
            token_drops=self.config.moe.token_drops,
            stash=stash_options(self.config.stash),
        )
        self.forward_backward = self.graphs.wrap_forward_backward(self.forward_backward)
        self._first_captures = 0
        self._last = self._counters()

    def told(self, packings: Packings | None, buckets: Sequence[int] | None) -> dict[str, Any]:
        """All there is to know; it may have been announced, too."""
        return {} if packings is None else {"packings": packings, "buckets": buckets}

    def announce(self, packings: Packings | None, buckets: Sequence[int] | None) -> None:
        """The ranks agree on the next step while the device works on the optimizer's."""
        if packings is not None:
            self.graphs.announce(packings, buckets=buckets)

    def counted(self) -> dict[str, Any]:
        """Captures and eager steps since the last call."""
        (captures, fallbacks, overflows), self._last = self._last, self._counters()
        return {
            "captures": self._last[0] - captures,
            "fallbacks": tuple(self._last[1] - fallbacks),
            "overflows": tuple(self._last[2] - overflows),
        }

    def _counters(self) -> tuple[int, Counter[str], Counter[str]]:
        counters = self.graphs.counters
        return (
            int(counters.captures),
            Counter(counters.fallbacks),
            Counter(counters.packing_overflows),
        )

    def before_step(self, step: int) -> None:
        """Note what the first session captured."""
        del step
        counters = self.graphs.counters
        if self.capture_s is None and self.graphs.engine.report is not None:
            report = self.graphs.engine.report
            self.capture_s = report.duration_ms / 1e3
            self.pool_bytes = {
                "slot_bytes": report.slot_bytes,
                "scratch_bytes": report.scratch_bytes,
                "static_bytes": report.static_bytes,
            }
            if self.graphs.stash is not None and self.graphs.stash.size is not None:
                self.pool_bytes["stash_bytes"] = self.graphs.stash.size.device_bytes
            self._first_captures = counters.captures

    @property
    def captures_after_first(self) -> int:
        """Captures after the first session."""
        return int(self.graphs.counters.captures) - self._first_captures

    @property
    def overflow_reruns(self) -> dict[str, int]:
        """Steps that were run anew, by what had no room."""
        return dict(self.graphs.counters.overflow_reruns)

    def close(self) -> None:
        """Detach."""
        self.graphs.detach()


class EagerStashVariant(Variant):
    """Eager with Megatron's own paged stash, which keeps what Transformer Engine marks for it.

    Its pages follow what the first step took, with the room that the configuration gives to ours.
    Megatron's training loop would also wait for a flag in every step, and run it anew.
    """

    name = "eager_stash"

    def transformer_options(self) -> dict[str, Any]:
        """Its switch and its size."""
        module = import_megatron("megatron.core.transformer.transformer_config")
        if not hasattr(module.TransformerConfig, "moe_paged_stash"):
            msg = "this release of megatron-core has no moe_paged_stash, so no eager_stash"
            raise ConfigError(msg)
        return {
            "moe_paged_stash": True,
            # Negative: of the tokens that came, not of their even share.
            "moe_paged_stash_buffer_size_factor_cuda": -self.config.stash.headroom,
        }

    def counted(self) -> dict[str, Any]:
        """Nothing; but pages that ran out are an error, since gradients would be of other tokens.

        Raises:
            StashError: they did, in this step, on some rank.
        """
        flag = self._stash().check_paged_stash_overflow().int()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            msg = (
                "Megatron's paged stash ran out of pages in a step of eager_stash; give it more "
                f"by stash.headroom, which is {self.config.stash.headroom:g}."
            )
            raise StashError(msg)
        return {}

    def close(self) -> None:
        """Turn it off, which is one for the process."""
        self._stash().paged_stash_reset(enabled=False)
        super().close()

    @staticmethod
    def _stash() -> Any:
        return import_megatron("megatron.core.transformer.moe.paged_stash")


class _MegatronVariant(Variant):
    """A variant of Megatron's: its ``cuda_graph_impl`` is its name."""

    is_plain = False
    has_fragile_end = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not torch.cuda.is_available() or config.device == "cpu":
            msg = f"the variant {self.name} captures CUDA graphs and needs a GPU"
            raise ConfigError(msg)

    def transformer_options(self) -> dict[str, Any]:
        """The switches of the implementation; whole layers are captured."""
        module = import_megatron("megatron.core.transformer.transformer_config")
        known = {field.name for field in dataclasses.fields(module.TransformerConfig)}
        if "cuda_graph_impl" not in known:
            msg = f"this release of megatron-core has no cuda_graph_impl, so no {self.name} graphs"
            raise ConfigError(msg)
        options: dict[str, Any] = {
            "cuda_graph_impl": self.name,
            "cuda_graph_warmup_steps": self.num_eager_steps,
        }
        if "cuda_graph_modules" in known:
            options["cuda_graph_modules"] = []  # the whole layer
        elif self.name == "full_iteration":  # a scope of the local implementation before 0.18
            options |= {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}
        return options

    @property
    def num_eager_steps(self) -> int:
        """Steps before the captures, so that one of the steps that are not measured replays."""
        return max(1, self.config.bench.num_warmup_steps - 1)

    def ddp_scope(self) -> AbstractContextManager[object]:
        """A stream of DDP's own.

        DDP keeps the nodes that accumulate gradients, and a capture cannot wait for nodes that
        were made on the default stream.
        """
        return _on_stream(torch.cuda.Stream())


class TransformerEngineVariant(_MegatronVariant):
    """A graph for each layer and microbatch, by Transformer Engine's ``make_graphed_callables``."""

    name = "transformer_engine"
    _helper: Any

    def prepare(self, chunks: list[nn.Module], optimizer: Any) -> None:
        """Make the helper that captures; it asks Megatron's calculator for the microbatches."""
        super().prepare(chunks, optimizer)
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
            model=chunks,
            config=chunks[0].config,
            seq_length=self.config.model.seq_length,
            micro_batch_size=train.micro_batch_size,
            optimizers=[optimizer],
        )
        self._chunks = chunks

    def before_step(self, step: int) -> None:
        """Capture when the eager steps are done."""
        if step != self.num_eager_steps:
            return
        hooked = [c for c in self._chunks if getattr(c, "use_forward_hook", False)]
        for chunk in hooked:
            chunk.disable_forward_pre_hook(param_sync=False)  # type: ignore[operator]
        started = time.perf_counter()
        self._helper.create_cudagraphs()
        self.capture_s = time.perf_counter() - started
        for chunk in hooked:
            chunk.enable_forward_pre_hook()  # type: ignore[operator]
        if hooked:
            self._helper.cuda_graph_set_manual_hooks()

    def close(self) -> None:
        """Delete the graphs."""
        if self._helper.graphs_created():
            self._helper.delete_cuda_graphs()


class LocalVariant(_MegatronVariant):
    """A graph for each layer and microbatch, by Megatron itself, at the end of the first step."""

    name = "local"

    def prepare(self, chunks: list[nn.Module], optimizer: Any) -> None:
        """Nothing to do: the layers were built with their graph managers."""
        super().prepare(chunks, optimizer)
        self.capture_step = 0

    def close(self) -> None:
        """Delete the graphs."""
        (delete,) = private_names("megatron.core.transformer.cuda_graphs", "delete_cuda_graphs")
        delete()


class FullIterationVariant(_MegatronVariant):
    """One graph for all forwards and backwards of a step, communication included.

    Megatron demands that nothing looks at a loss or gradient meanwhile, and freezes the number of
    microbatches; the optimizer's step stays outside.
    """

    name = "full_iteration"

    def ddp_scope(self) -> AbstractContextManager[object]:
        """The stream of the capture itself, as Megatron does it."""
        module = import_megatron("megatron.core.full_cuda_graph")
        shared = getattr(module, "get_shared_capture_stream", None)
        return _on_stream(shared() if shared is not None else torch.cuda.Stream())

    def prepare(self, chunks: list[nn.Module], optimizer: Any) -> None:
        """Wrap the schedule."""
        super().prepare(chunks, optimizer)
        (wrapper,) = private_names("megatron.core.full_cuda_graph", "FullCudaGraphWrapper")
        self.forward_backward = self._wrapper = wrapper(
            self.forward_backward, cuda_graph_warmup_steps=self.num_eager_steps
        )
        self.capture_step = self.num_eager_steps

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
    """The variant of a name.

    Raises:
        ConfigError: there is none, or it cannot run here.
    """
    for kind in _VARIANTS:
        if kind.name == name:
            return kind(config)
    known = ", ".join(kind.name for kind in _VARIANTS)
    raise ConfigError(f"unknown variant {name!r}; there are {known}.")


def _schedule() -> Callable[..., Any]:
    schedules = import_megatron("megatron.core.pipeline_parallel")
    function: Callable[..., Any] = schedules.get_forward_backward_func()
    return function


@contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
