"""`Site`: the model that chunk graphs are attached to, and the options of `attach`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from chunkgraph import __version__
from chunkgraph.engine import CaptureOptions
from chunkgraph.engine.agreement import Maximum
from chunkgraph.engine.arguments import check_counts
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import versions
from chunkgraph.megatron.core.agreement import agree_by_maximum
from chunkgraph.megatron.core.data_parallel import delays, wrappers_of
from chunkgraph.megatron.model_part import (
    ChosenScope,
    ModelPart,
    Scope,
    choose_scope,
    new_part,
)
from chunkgraph.megatron.pipeline.choice import PipelinePlace, PipelineSchedule
from chunkgraph.megatron.refusals import facts_of_model
from chunkgraph.schedules import megatron_schedule
from chunkgraph.settings.rule import Facts
from chunkgraph.slots import RankSchedule


@dataclass(kw_only=True)
class Site:
    """One rank's model, its place in the job, and the options of `attach`.

    Attributes:
        chunks: The model chunks with their wrappers.
        requested_scope: See `attach`, like the following options.
        feature_options: Options of `attach` that one feature reads, by name.
        feature_facts: Facts that features know of the model, by name; see `Feature.facts`.
        requested_slots: Requested number of slots of each chunk; None for the default.
        parts: The captured part of each chunk; set by `find_parts`, like the following ones.
        scope: The captured scope, the same on all ranks.
        schedule: The schedule that drives training steps; None for Megatron's own.
        num_slots: Number of slots of each chunk.
        agree: Element-wise maximum over all ranks; None in a job of one rank.
        meet: Called on all ranks before collectives of `attach`; see `refused_together`.
        config: Megatron's TransformerConfig.
        place: This rank's place in the pipeline.
        device: Device of the parameters.
    """

    chunks: Sequence[nn.Module]
    requested_scope: Scope = "auto"
    options: CaptureOptions = field(default_factory=CaptureOptions)
    feature_options: dict[str, Any] = field(default_factory=dict)
    feature_facts: dict[str, object] = field(default_factory=dict)
    requested_slots: Sequence[int] | None = None
    requested_schedule: str = "auto"
    parts: tuple[ModelPart, ...] = ()
    scope: ChosenScope = field(init=False)
    num_slots: tuple[int, ...] = ()
    schedule: PipelineSchedule | None = None
    agree: Maximum | None = None
    meet: Callable[[], None] = lambda: None

    config: Any = field(init=False)
    place: PipelinePlace = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        if not self.chunks:
            raise ConfigError("attach() got no model chunk. Pass the schedule's argument `model`.")
        self.config = config_of(self.chunks[0])
        self.place = PipelinePlace.current(len(self.chunks), self.config)
        self.device = next(self.chunks[0].parameters()).device
        if self.requested_schedule != "auto":
            self.schedule = PipelineSchedule.of(self.requested_schedule, self.place)

    @property
    def shares_experts(self) -> bool:
        """Return whether several ranks share the experts of a layer."""
        return (getattr(self.config, "expert_model_parallel_size", 1) or 1) > 1

    def facts(self) -> Facts:
        """Return the facts of the model that rules check."""
        own = {
            "is_attached": True,
            "num_model_chunks": len(self.chunks),
            "num_warmup_steps": self.options.num_warmup_steps,
            "max_slot_memory": self.options.max_slot_memory
            or (self.options.max_slots and f"{self.options.max_slots} slots"),
            "on_gpu": self.device.type == "cuda",
            "schedule": self.requested_schedule,
            "scope": self.requested_scope,
            "splits_backward": self.schedule is not None and self.schedule.splits_backward,
            "verify": self.options.verify,
        }
        return facts_of_model(self.config, {**own, **self.feature_facts})

    def equal_facts(self) -> dict[str, object]:
        """Return versions and options that all ranks must share."""
        return {
            **versions(),
            "chunkgraph": __version__,
            "schedule": self.schedule or "auto",
            "scope": self.requested_scope,
            "num_warmup_steps": self.options.num_warmup_steps,
            "on_failure": self.options.on_failure,
            "on_moved_memory": self.options.on_moved_memory,
            "max_slots": self.options.max_slots,
            "token_drops": self.feature_options["token_drops"],
            "packing": self.feature_options["packing"],
        }

    def find_parts(self) -> None:
        """Agree on the scope with all ranks, find the captured parts, and count slots.

        Raises:
            ConfigError: A chunk has no such part, or its hooks cannot be captured.
        """
        self.meet()
        self.scope = choose_scope(
            self.requested_scope,
            self.facts(),
            self.chunks,
            agree=self.agree,
        )
        self.parts = tuple(
            new_part(self.scope.scope, chunk, self.place.label(index))
            for index, chunk in enumerate(self.chunks)
        )
        for index, part in enumerate(self.parts):
            part.index = index
            if self.schedule is not None and self.schedule.splits_backward:
                _refuse_delays_outside(self.chunks[index], part)
        slots = self.requested_slots
        if slots is None:
            slots = self.place.num_slots(self.schedule, are_shared=self.options.shared_slots)
        self.num_slots = check_counts(len(self.parts), slots)

    @property
    def rank_schedule(self) -> RankSchedule:
        """Return the schedule of training steps."""
        place = self.place
        sizes = place.pipeline_size, place.num_chunks
        own = partial(megatron_schedule, *sizes, group_size=place.group_size)
        build = own if self.schedule is None else self.schedule.build
        return RankSchedule(build, place.pipeline_rank)

    @property
    def lends_input_grads(self) -> list[bool]:
        """Return, for each chunk, whether its input gradients are sent from its slots' memory.

        Without ``overlap_p2p_comm`` the compute stream waits for every exchange before Megatron's
        schedule continues. With it, the schedule waits for the send after backward k only after it
        launched backward k + 1, which overwrites the gradient that is being sent.
        """
        # Stage 0 sends none, so its input gradient may be used anywhere.
        lends = self.schedule is None and not self.config.overlap_p2p_comm
        return [lends and self.place.stage(c) > 0 for c in range(len(self.chunks))]


def new_agreement(undo: ExitStack) -> Maximum | None:
    """Create the agreement of all ranks, which call this together; ``undo`` closes it."""
    agree = agree_by_maximum()
    if agree is not None:
        undo.callback(agree.close)
    return agree


def config_of(chunk: nn.Module) -> Any:
    """Return Megatron's TransformerConfig of a model chunk, through its wrappers.

    Raises:
        ConfigError: The chunk has no config.
    """
    for module in wrappers_of(chunk):
        if getattr(module, "config", None) is not None:
            return module.config
    raise ConfigError(
        f"{type(chunk).__name__} has no config: it is not a Megatron-core model. For other models "
        "use chunkgraph.ChunkGraphs."
    )


def _refuse_delays_outside(chunk: nn.Module, part: ModelPart) -> None:
    captured = set(part.inner_modules.values())
    for path, module in chunk.named_modules():
        if delays(module) and module not in captured:
            raise ConfigError(
                f"{part.label}: {path} delays its weight gradients and is outside of the captured "
                "block, so nothing would compute them. Use scope='chunk'."
            )
