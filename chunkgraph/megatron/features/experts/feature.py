"""Mixture of experts in the graphs of one rank: the state of routers, and dropped tokens.

Experts with a fixed capacity drop tokens (`capacity`), others take all (`dropless`). Both count on
the device, inside the graphs, what found no room.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self, get_args

import torch

from chunkgraph.engine import Agree, Chunk, StepMode
from chunkgraph.engine.agreement import agree_alone
from chunkgraph.errors import ConfigError, TokenDropError
from chunkgraph.megatron.feature import LimitedFeature, Shortage, Step, Work, chained
from chunkgraph.megatron.features.experts.capacity import CapacityExperts
from chunkgraph.megatron.features.experts.dropless import Dropless
from chunkgraph.megatron.features.experts.dropless_experts import rebuilt_fused_operations
from chunkgraph.megatron.features.experts.hybrid_ep import HybridEPBuffer, refuse_without_hybrid_ep
from chunkgraph.megatron.features.experts.padding import keep_padding_from_experts
from chunkgraph.megatron.features.experts.room import Room
from chunkgraph.megatron.features.experts.rows_in_use import moe_layers_of
from chunkgraph.megatron.features.experts.state import ExpertState, routers_of
from chunkgraph.megatron.model_part import ModelPart
from chunkgraph.megatron.rules.experts import MOE_RULES, PADDED_ROWS_RULES, uses_dropless
from chunkgraph.megatron.site import Site, new_agreement

if TYPE_CHECKING:
    from chunkgraph.megatron.attachment import MegatronChunkGraphs

_log = logging.getLogger(__name__)

TokenDrops = Literal["warn", "count", "raise", "rerun"]
"""Reaction to a token that an expert has no room for; see `attach`."""


class Experts(LimitedFeature):
    """Support for models with experts, installed on every rank, including ranks without experts.

    Args:
        site: The model and the options of `attach`.
        undo: Closed when the graphs are detached; stops the counts, and restores Megatron's
            handling of padding.

    Raises:
        ConfigError: Experts cannot be trained on packed sequences.
    """

    rules = (*MOE_RULES, *PADDED_ROWS_RULES)

    def __init__(self, site: Site, undo: contextlib.ExitStack) -> None:
        config, facts = site.config, site.facts()
        token_drops = site.feature_options["token_drops"]
        # For the whole model: this rank may have no experts.
        self._room = Room(config)
        is_dropless = uses_dropless(config)
        self.repeats_steps = bool(self._room.lacking) if is_dropless else token_drops == "rerun"
        layers = moe_layers_of([m for c in site.chunks for m in c.modules()])
        uses_hybrid_ep = config.moe_token_dispatcher_type == "flex"
        self._buffer = HybridEPBuffer() if layers and uses_hybrid_ep else None
        self._modules = [m for part in site.parts for m in part.modules]
        captured = routers_of(self._modules)
        self._state = ExpertState(captured) if captured else None
        self._experts: CapacityExperts | Dropless
        if layers and is_dropless:
            self._experts = Dropless(layers, self._room, has_padding=bool(facts.pads_rows))
        else:  # also without layers, of either kind
            self._experts = CapacityExperts(
                layers, self._room, site.device, marks_padding=bool(facts.stash)
            )
        self._counts = self._experts.counts
        self._token_drops = token_drops
        self._is_reported = self._was_abandoned = False
        self._seen = 0
        self._has_warned = token_drops != "warn"
        # All ranks create the group in the same order; it exchanges their counts of drops.
        needs_others = token_drops == "raise" or self._room.is_measured
        site.meet()
        self._agree: Agree = (new_agreement(undo) if needs_others else None) or agree_alone
        if facts.pads_rows:
            # First: tokens that no router chose cannot be dropped.
            undo.callback(keep_padding_from_experts(site.chunks, config))
        undo.callback(self._experts.install())

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return the reaction to dropped tokens."""
        return {"token_drops": site.feature_options["token_drops"]}

    @classmethod
    def prepare(cls, site: Site, _undo: contextlib.ExitStack) -> None:
        """Refuse an unknown reaction to drops, and a missing HybridEP.

        Raises:
            ConfigError: The choice for dropped tokens is unknown, or HybridEP cannot be captured.
            MissingDependencyError: HybridEP is not installed.
        """
        token_drops = site.feature_options["token_drops"]
        if token_drops not in get_args(TokenDrops):
            choices = ", ".join(map(repr, get_args(TokenDrops)))
            raise ConfigError(f"token_drops is {token_drops!r}; it must be one of {choices}.")
        refuse_without_hybrid_ep(site.facts())

    @classmethod
    def of(cls, site: Site, undo: contextlib.ExitStack) -> Self | None:
        """Return the feature for models with experts, also on ranks without experts."""
        return cls(site, undo) if getattr(site.config, "num_moe_experts", None) else None

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Release the graphs when HybridEP replaces the buffer that they write to."""

        def release() -> None:
            _log.warning(
                "rank %d: a pass with more tokens replaced HybridEP's buffer, which graphs use, on "
                "some rank; this step runs eagerly, and graphs are captured again.",
                graphs.site.place.rank,
            )
            graphs.release()

        graphs.engine.watch_memory(self.is_memory_replaced, release)

    def wrap(self, part: ModelPart, chunk: Chunk) -> Chunk:
        """Make the graphs of a part with routers keep the routers' state and count drops."""
        if self._state is None or not routers_of(part.modules):
            return chunk
        return replace(
            chunk,
            buffers=(*chunk.buffers, *self._state.buffers, *self.tensors),
            follows_module=False,  # it would lose these
            before_backward=chained(chunk.before_backward, self._state.before_backward),
        )

    def around(self, work: Work) -> contextlib.AbstractContextManager[None]:
        """Capture without host reads; make passes of ``verify`` compute the bits of replays."""
        if work == "capture":
            return self._capturing()
        if work == "verify":
            return self._experts.verifying()
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        """Capture without host reads in the dispatch; restore the metrics afterwards."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._experts.capturing())
            stack.enter_context(rebuilt_fused_operations(self._modules))
            if self._state is not None:
                self._state.capture()
            yield
        if self._buffer is not None:
            self._buffer.remember()

    @property
    def dispatch(self) -> str:
        """Return dispatch, grouped GEMM and rows of dropless experts in graphs; "" for others."""
        return self._experts.description

    def is_memory_replaced(self) -> bool:
        """Return whether HybridEP has replaced the buffer that graphs write to."""
        return self._buffer is not None and self._buffer.is_replaced()

    @contextlib.contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Check the buffers of a replayed step; report dropped tokens at its end.

        The next step discards the counts of a failed one.

        Raises:
            TokenDropError: Tokens were dropped on some rank, and ``token_drops`` is ``raise``.
            ReplayMismatchError: Since the capture, Megatron's metrics were replaced, or
                HybridEP's buffer was replaced outside of a step.
        """
        if step.is_training and self._was_abandoned:
            self._was_abandoned = False
            self.forget_step()
        if step.is_replayed:
            if self._state is not None:
                self._state.check()
            if self._buffer is not None:
                self._buffer.check()
        try:
            yield
            if step.is_training:
                self._end_step(step)
        except BaseException:
            if step.is_training:
                self._is_reported, self._was_abandoned = False, True
            raise

    def forwards_done(self, _step: Step) -> None:
        """Send the counts of the forwards to the host while backwards run.

        Experts that are recomputed in the backward count their tokens there.
        """
        if not self._counts.is_recomputed:
            self._counts.send()
            self._is_reported = True

    def _end_step(self, step: Step) -> None:
        """Report dropped tokens of a training step, before its gradients are used."""
        if self._room.is_measured and not step.is_replayed:
            (most,) = self._agree([self._counts.take_load()])
            self._room.add_load(most)
        self._report_drops()
        if step.plan.is_repeated:
            self.forget_step()

    def _report_drops(self) -> None:
        if not self._is_reported or self._counts.is_recomputed:
            self._counts.send()
        self._is_reported = False
        if self.repeats_steps:  # the guard looks, and runs such a step again
            return
        if self._token_drops == "raise":
            self._raise_if_dropped()
        elif not self._has_warned and any(self.dropped_tokens().values()):
            self._has_warned = True
            warnings.warn(
                f"Experts had no room for tokens, which were dropped ({self._drops_by_layer()}). "
                "From now on they are only counted. token_drops='count' silences this warning, "
                "'raise' makes it an error; a moe_expert_capacity_factor of num_moe_experts / "
                "moe_router_topk has room for all.",
                stacklevel=5,
            )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return tensors that a step writes, apart from model buffers and Megatron's metrics.

        They include Megatron's own flags: its training loop would otherwise repeat a step that
        was already repeated here.
        """
        return self._experts.tensors

    def look(self) -> int:
        """Return the tokens dropped in the last step on this rank; wait for its forwards.

        Wait for the whole step if experts are recomputed in the backward.
        """
        now = sum(self.dropped_tokens(wait=True).values())
        dropped, self._seen = now - self._seen, now
        return dropped

    def shortage(self, _mode: StepMode) -> Shortage | None:
        """Return the step's dropped tokens as a shortage, if drops make steps run again."""
        if not self.repeats_steps:
            return None
        num_dropped = self.look()
        return Shortage("expert capacity", num_dropped, f"{self._room.lacking}: {num_dropped}")

    def having_room(self) -> contextlib.AbstractContextManager[None]:
        """Let an eager step drop no token, and measure its load for `make_room`."""
        return self._experts.having_room()

    def make_room(self, agree: Agree) -> None:
        """Make room for the heaviest load of a microbatch on any rank; wait for the device."""
        (most,) = agree([self._counts.take_load()])
        self._room.give(most)
        self._experts.grow()

    def forget_step(self) -> None:
        """Resynchronize with the counts, which were restored because the step ran again."""
        self._counts.send()
        self.look()

    def dropped_tokens(self, *, wait: bool = False) -> dict[int, int]:
        """Count how often an expert of this rank had no room for a token that chose it, so far.

        A token that finds no room at two of its experts counts twice. Forwards without gradients
        do not count.

        Args:
            wait: Wait for the device, so that the last step is included. By default the count ends
                with the last step whose count has arrived on the host.

        Returns:
            Mapping from layer number (from 1) to count; empty on a rank without experts.
        """
        return self._counts.by_layer(wait=wait)

    def _raise_if_dropped(self) -> None:
        local = self.look()
        (most,) = self._agree([local])
        if not most:
            return
        raise TokenDropError(
            f"Experts had no room for tokens in this step, which were dropped: {local} on this "
            f"rank, up to {most} on any (here since the start: {self._drops_by_layer() or 'none'})."
            " The gradients lack them; the optimizer has not used them.\n"
            "  To do: raise moe_expert_capacity_factor; num_moe_experts / moe_router_topk has room "
            "for all. token_drops='count' lets training go on and counts them."
        )

    def _drops_by_layer(self) -> str:
        counts = self.dropped_tokens().items()
        return ", ".join(f"layer {layer}: {count}" for layer, count in counts if count)


def dropped_tokens(graphs: MegatronChunkGraphs, *, wait: bool = False) -> dict[int, int]:
    """Return `Experts.dropped_tokens` of a model; empty for one without experts."""
    experts = graphs.find(Experts)
    return {} if experts is None else experts.dropped_tokens(wait=wait)
