"""Experts without a capacity in the graphs of one rank: no token is ever dropped.

Megatron's dispatchers and experts read on the host how many tokens chose each expert. Captures
replace these methods by others with the same results; eager passes run Megatron's. With experts on
several ranks, graphs have room for the heaviest load of the eager steps so far plus a margin, or
the user's budget (``moe_expert_rank_capacity_factor``). A step with a heavier load runs again
eagerly, and the next capture has more room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import private_names
from chunkgraph.megatron.core.model_kinds import fp8_recipe
from chunkgraph.megatron.features.experts.counts import LOAD_OF, DropCounts, HeaviestLoad
from chunkgraph.megatron.features.experts.dispatch import scattered_routes
from chunkgraph.megatron.features.experts.dropless_dispatch import (
    AllGatherRows,
    AllToAllRows,
    Dispatch,
    RowRoom,
)
from chunkgraph.megatron.features.experts.dropless_experts import (
    expert_linears,
    experts_on_device,
)
from chunkgraph.megatron.features.experts.grouped_gemm import choose_gemm
from chunkgraph.megatron.features.experts.grouped_weights import lay_together
from chunkgraph.megatron.features.experts.hybrid_ep import HybridEPRows
from chunkgraph.megatron.features.experts.room import RoomWords
from chunkgraph.megatron.features.experts.sinkhorn import BoundedSinkhorn, uses_sinkhorn
from chunkgraph.megatron.rules.experts import uses_dropless

__all__ = ["Dropless", "DroplessRoom", "budget_of", "is_bounded", "may_lack_room"]

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_EXPERTS = "megatron.core.transformer.moe.experts"
_MARGIN = 0.2
"""Additional room, as a share of the heaviest load so far."""
_MOST_DOUBLED = 2
_MISSING = object()


def is_bounded(config: Any) -> bool:
    """Return whether the experts of ``config`` have limited room for rows."""
    ranks = getattr(config, "expert_model_parallel_size", None) or 1
    return uses_dropless(config) and ranks > 1


def budget_of(config: Any) -> float:
    """Return the rows that the user gives a rank's experts, per row of its tokens; 0 for none.

    With all experts on one rank the number of rows is known, and a budget has no meaning.
    """
    budget: float | None = getattr(config, "moe_expert_rank_capacity_factor", None)
    return (budget or 0.0) if is_bounded(config) else 0.0


def may_lack_room(config: Any) -> bool:
    """Return whether steps with the experts of ``config`` may have to run again."""
    return is_bounded(config) or (uses_dropless(config) and uses_sinkhorn(config))


class Dropless:
    """Experts of one rank that compute any number of rows in graphs.

    Args:
        layers: Expert layers; at least one.
        has_padding: Whether tokens may choose no expert. Megatron's passes do not support that:
            eager ones need `on_device` too.

    Attributes:
        counts: Dispatches without room for some rows, by layer.
        layers: Layer numbers, from 1.
        load: Heaviest load of a microbatch since it was last taken.
        room: Room for rows in graphs.

    Raises:
        ConfigError: No grouped product supports these experts in a graph.
    """

    def __init__(self, layers: Sequence[Any], *, has_padding: bool = False) -> None:
        device = next(layers[0].parameters()).device
        self.counts = DropCounts(len(layers), device)
        self.load = HeaviestLoad()
        self.layers = tuple(int(layer.layer_number or 0) for layer in layers)
        self.room = RowRoom()
        self._most_load = 0  # of any rank
        self._num_rows = 0  # of the largest captured microbatch
        self._num_widened = 0
        self._sinkhorn: BoundedSinkhorn | None = None
        if uses_sinkhorn(layers[0].config):
            self._sinkhorn = BoundedSinkhorn(lambda is_short: self.counts.add(0, is_short))
        self._has_padding = has_padding
        self._experts = [layer.experts for layer in layers]
        kinds = private_names(_EXPERTS, "SequentialMLP", "TEGroupedMLP")
        for layer in layers:
            if not isinstance(layer.experts, kinds):
                raise ConfigError(
                    f"Layer {layer.layer_number} has experts of {type(layer.experts).__name__}; "
                    "without moe_expert_capacity_factor only SequentialMLP and TEGroupedMLP can be "
                    "captured. Give its spec one of them, or set a capacity."
                )
        self._gemm_name = self._check_gemm(device)
        self._bounded = is_bounded(layers[0].config)
        self._budget = budget_of(layers[0].config) * layers[0].config.moe_router_topk
        self._dispatches: list[tuple[Any, Dispatch]] = [
            (layer.token_dispatcher, self._dispatch(index, layer))
            for index, layer in enumerate(layers)
        ]

    @property
    def description(self) -> str:
        """Describe the dispatch of tokens, the grouped product and the rows of the last capture."""
        name = self._dispatches[0][1].name
        return f"dispatch {name}, GEMM {self._gemm_name}, room for {self._num_rows:,} rows"

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a captured forward changes, in addition to model buffers."""
        flags = (tensor for _, dispatch in self._dispatches for tensor in dispatch.tensors)
        return (self.counts.total, *flags)

    def install(self, *, marks_padding: bool = False) -> Callable[[], None]:
        """Start to measure loads in eager passes; return the undo function.

        Args:
            marks_padding: As for `TokenDrops`; ignored, as used rows come first here.
        """
        del marks_padding
        undo = ExitStack()
        for dispatcher, dispatch in self._dispatches:
            undo.callback(dispatch.install())
            if self._bounded:
                name = dispatch.names[0]
                undo.callback(_replace(dispatcher, {name: self._measured(dispatcher, dispatch)}))
        if next(self._experts[0].parameters()).is_cuda:
            for experts in self._experts:
                for weights in expert_linears(experts):
                    lay_together(weights)
        return undo.close

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Make passes read nothing on the host and use the room of graphs."""
        doubled = 2 ** min(self._num_widened, _MOST_DOUBLED)
        factor = max(self._budget, self._most_load / LOAD_OF * (1 + _MARGIN * doubled))
        room, self.room.factor = self.room.factor, factor or math.inf
        self._num_rows = 0
        try:
            with self.on_device():
                yield
        finally:
            self.room.factor = room

    def verifying(self) -> AbstractContextManager[None]:
        """Use the products of graphs in eager passes that are compared with replays on a GPU."""
        is_cuda = next(self._experts[0].parameters()).is_cuda
        return self.on_device() if is_cuda else nullcontext()

    def request_room(self, load: int) -> None:
        """Give the next capture room for ``load``, per `LOAD_OF` tokens, plus the margin."""
        self._most_load = max(self._most_load, load)

    def widen(self) -> None:
        """Double the margin of the next capture: captures are rare, and loads drift."""
        self._num_widened += 1
        if self._sinkhorn is not None:
            self._sinkhorn.num_rounds *= 2

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make passes read nothing on the host, with room for all rows outside of captures."""
        with ExitStack() as stack:
            stack.enter_context(scattered_routes())
            stack.enter_context(experts_on_device(self._measure_rows))
            if self._sinkhorn is not None:
                stack.enter_context(self._sinkhorn.installed())
            for dispatcher, dispatch in self._dispatches:
                methods = {name: getattr(dispatch, name) for name in dispatch.names}
                stack.callback(_replace(dispatcher, methods))
            yield

    def _measure_rows(self, num_rows: int) -> None:
        if self.room.factor is not None:
            self._num_rows = max(self._num_rows, num_rows)

    def _dispatch(self, index: int, layer: Any) -> Dispatch:
        """Return the replacement for a layer's dispatcher."""
        (gathering,) = private_names(_DISPATCHER, "MoEAllGatherTokenDispatcher")
        kind: type[Dispatch] = AllToAllRows
        if layer.config.moe_token_dispatcher_type == "flex":
            kind = HybridEPRows
        elif isinstance(layer.token_dispatcher, gathering):
            kind = AllGatherRows
        return kind(
            layer.token_dispatcher,
            self.room,
            lambda is_over: self.counts.add(index, is_over),
            has_padding=self._has_padding,
        )

    def _measured(self, dispatcher: Any, dispatch: Dispatch) -> Callable[..., Any]:
        replaced = getattr(dispatcher, dispatch.names[0])

        def measured(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self.load.add(*dispatch.load(*args, *kwargs.values()))
            return replaced(*args, **kwargs)

        return measured

    def _check_gemm(self, device: torch.device) -> str:
        """Return the name of the grouped product.

        Raises:
            ConfigError: There is none for these experts.
        """
        dtypes = {w.dtype for e in self._experts for ws in expert_linears(e) for w in ws}
        text, recipe = "", fp8_recipe(self._experts[0].config)
        for dtype in dtypes:
            gemm, text = choose_gemm(device, dtype, recipe)
            if gemm is None:
                raise ConfigError(
                    f"Experts without moe_expert_capacity_factor cannot be captured here: {text}. "
                    "Or set moe_expert_capacity_factor and moe_pad_expert_input_to_capacity=True."
                )
        return text


class DroplessRoom:
    """Room for rows of a rank's experts, and for rows that ranks send each other.

    Args:
        dropless: The experts of this rank; None without any.
        config: Megatron's config.
    """

    def __init__(self, dropless: Dropless | None, config: Any) -> None:
        self._dropless = dropless
        rows, rounds = is_bounded(config), uses_sinkhorn(config)
        counted = [
            *(["dispatches without room for all rows"] if rows else []),
            *(["routers without enough rounds of Sinkhorn"] if rounds else []),
        ]
        self.words = RoomWords(
            "Expert-parallel ranks had no room for rows, or Sinkhorn routing for rounds",
            " or ".join(counted),
            "this should have run again; please report it.",
        )

    def for_all(self) -> AbstractContextManager[None]:
        """See `ExpertRoom`; eager passes have room for all rows."""
        return nullcontext()

    def give(self, load: int) -> None:
        """See `ExpertRoom`."""
        if self._dropless is not None:
            self._dropless.request_room(load)
            self._dropless.widen()


def _replace(target: Any, methods: dict[str, Callable[..., Any]]) -> Callable[[], None]:
    """Set methods on one object; return a function that restores its instance attributes."""
    attributes = vars(target)
    before = {name: attributes.get(name, _MISSING) for name in methods}
    attributes.update(methods)

    def undo() -> None:
        for name, value in before.items():
            if value is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = value

    return undo
