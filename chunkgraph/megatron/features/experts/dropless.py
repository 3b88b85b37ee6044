"""Experts without a capacity in the graphs of one rank: no token is ever dropped.

Megatron's dispatchers and experts read on the host how many tokens chose each expert. Captures
replace these methods by others with the same results; eager passes run Megatron's. With experts on
several ranks, graphs have room for the heaviest load of the eager steps so far plus a margin, or
the user's budget (``moe_expert_rank_capacity_factor``). A step with a heavier load runs again
eagerly, and the next capture has more room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names
from chunkgraph.megatron.core.model_kinds import fp8_recipe
from chunkgraph.megatron.features.experts.dropless_dispatch import (
    AllGatherRows,
    AllToAllRows,
    Dispatch,
)
from chunkgraph.megatron.features.experts.dropless_experts import expert_linears, experts_on_device
from chunkgraph.megatron.features.experts.grouped_gemm import (
    NativeGemm,
    choose_gemm,
    lay_together,
    lie_reversed,
)
from chunkgraph.megatron.features.experts.hybrid_ep import HybridEPRows
from chunkgraph.megatron.features.experts.room import Room, RowCounts
from chunkgraph.megatron.features.experts.unique_indices import scattered_routes
from chunkgraph.megatron.rules.experts import balances_by

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_EXPERTS = "megatron.core.transformer.moe.experts"
_ROUTER = "megatron.core.transformer.moe.router"
_FEWEST_ROUNDS = 16
_TINY = 0.00000001


class Dropless:
    """Experts of one rank that compute any number of rows in graphs.

    Args:
        layers: Expert layers; at least one.
        room: Room for rows in graphs.
        has_padding: Whether tokens may choose no expert. Megatron's passes do not support that:
            eager ones need `on_device` too.

    Attributes:
        counts: Dispatches without room for some rows, and the heaviest load.

    Raises:
        ConfigError: No grouped product supports these experts in a graph.
    """

    def __init__(self, layers: Sequence[Any], room: Room, *, has_padding: bool = False) -> None:
        device = next(layers[0].parameters()).device
        config = layers[0].config
        self.counts = RowCounts([int(layer.layer_number or 0) for layer in layers], device)
        self._room = room
        self._num_rows = 0  # of the largest captured microbatch
        self._sinkhorn: BoundedSinkhorn | None = None
        if balances_by("sinkhorn", config):
            self._sinkhorn = BoundedSinkhorn(lambda is_short: self.counts.add(0, is_short))
        self._has_padding = has_padding
        self._experts = [layer.experts for layer in layers]
        self._is_cuda = device.type == "cuda"
        kinds = private_names(_EXPERTS, "SequentialMLP", "TEGroupedMLP")
        for layer in layers:
            if not isinstance(layer.experts, kinds):
                raise ConfigError(
                    f"Layer {layer.layer_number} has experts of {type(layer.experts).__name__}; "
                    "without moe_expert_capacity_factor only SequentialMLP and TEGroupedMLP can be "
                    "captured. Give its spec one of them, or set a capacity."
                )
        self._gemm_name = self._check_gemm(device)
        self._dispatches = [self._dispatch(index, layer) for index, layer in enumerate(layers)]

    @property
    def description(self) -> str:
        """Describe the dispatch of tokens, the grouped product and the rows of the last capture."""
        name = self._dispatches[0].name
        return f"dispatch {name}, GEMM {self._gemm_name}, room for {self._num_rows:,} rows"

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a captured forward changes, in addition to model buffers."""
        flags = (tensor for dispatch in self._dispatches for tensor in dispatch.tensors)
        return (self.counts.total, *flags)

    def install(self) -> Callable[[], None]:
        """Lay weights together, and measure loads in eager passes; return the undo function."""
        undo = ExitStack()
        for dispatch in self._dispatches:
            undo.callback(dispatch.install())
        for experts in self._experts if self._needs_one_tensor else ():
            for weights in expert_linears(experts):
                lay_together(weights)
        return undo.close

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Make passes read nothing on the host and use the room of graphs."""
        self._num_rows, self._room.is_limited = 0, True
        try:
            with self.on_device():
                yield
        finally:
            self._room.is_limited = False

    def verifying(self) -> AbstractContextManager[None]:
        """Use the products of graphs in eager passes that are compared with replays on a GPU."""
        return self.on_device() if self._is_cuda else nullcontext()

    def having_room(self) -> AbstractContextManager[None]:
        """Measure the load of an eager step, in which all rows have room anyway."""
        return self.counts.measuring()

    def grow(self) -> None:
        """Run twice the rounds of Sinkhorn; the room has grown."""
        if self._sinkhorn is not None:
            self._sinkhorn.num_rounds *= 2

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make passes read nothing on the host, with room for all rows outside of captures."""
        with ExitStack() as stack:
            stack.callback(scattered_routes())
            stack.enter_context(experts_on_device(self._measure_rows))
            if self._sinkhorn is not None:
                stack.callback(self._sinkhorn.install())
            for experts, dispatch in zip(self._experts, self._dispatches, strict=True):
                weights = expert_linears(experts) if self._needs_one_tensor else ()
                dispatch.are_reversed = bool(weights) and all(map(lie_reversed, weights))
                stack.callback(dispatch.on_device())
            yield

    def _measure_rows(self, num_rows: int) -> None:
        if self._room.is_limited:
            self._num_rows = max(self._num_rows, num_rows)

    def _dispatch(self, index: int, layer: Any) -> Dispatch:
        """Return the replacement for a layer's dispatcher."""
        (gathering,) = private_names(_DISPATCHER, "MoEAllGatherTokenDispatcher")
        kind: type[Dispatch] = AllToAllRows
        if layer.config.moe_token_dispatcher_type == "flex":
            kind = HybridEPRows
        elif isinstance(layer.token_dispatcher, gathering):
            kind = AllGatherRows
        return kind(layer, self._room, self.counts, index, has_padding=self._has_padding)

    def _check_gemm(self, device: torch.device) -> str:
        """Return the name of the grouped product.

        Raises:
            ConfigError: There is none for these experts.
        """
        dtypes = {w.dtype for e in self._experts for ws in expert_linears(e) for w in ws}
        text, recipe = "", fp8_recipe(self._experts[0].config)
        self._needs_one_tensor = True
        for dtype in dtypes:
            gemm, text = choose_gemm(device, dtype, recipe)
            if gemm is None:
                raise ConfigError(
                    f"Experts without moe_expert_capacity_factor cannot be captured here: {text}. "
                    "Or set moe_expert_capacity_factor and moe_pad_expert_input_to_capacity=True."
                )
            self._needs_one_tensor &= not isinstance(gemm, NativeGemm)
        return text


class BoundedSinkhorn:
    """Megatron's Sinkhorn routing with a bounded number of rounds, without host reads.

    Megatron's function iterates until an error that it reads on the host is small. Here a fixed
    number of rounds runs; rounds after Megatron's last one change nothing, so results have the same
    bits. A flag on the device reports whether more rounds were needed.

    Args:
        note: Callback with the flag of needing more rounds, a scalar on the device.

    Attributes:
        num_rounds: Number of rounds.
    """

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        self.num_rounds = _FEWEST_ROUNDS
        self._note = note

    def install(self) -> Callable[[], None]:
        """Make routers call this object; return the undo function."""
        private_names(_ROUTER, "sinkhorn")
        return patch_attributes(import_megatron(_ROUTER), {"sinkhorn": self})

    def __call__(self, cost: torch.Tensor, tol: float = 0.0001) -> torch.Tensor:
        """Return the probabilities of routing, shape [tokens, experts].

        Args:
            cost: Costs, of the same shape.
            tol: Error at which Megatron's loop ends.
        """
        cost = torch.exp(cost)
        rows = torch.ones(cost.size(0), device=cost.device, dtype=cost.dtype)
        columns = torch.ones(cost.size(1), device=cost.device, dtype=cost.dtype)
        is_done = torch.zeros((), dtype=torch.bool, device=cost.device)
        for _ in range(self.num_rounds):
            of_rows = (1 / rows.size(0)) * 1 / (torch.sum(columns * cost, 1) + _TINY)
            of_columns = torch.sum(of_rows.unsqueeze(1) * cost, 0) + _TINY
            of_columns = (1 / columns.size(0)) * 1 / of_columns
            error = torch.mean(torch.abs(columns - of_columns))
            rows = torch.where(is_done, rows, of_rows)
            columns = torch.where(is_done, columns, of_columns)
            is_done = is_done | ~(error > tol)  # an error of NaN ends Megatron's loop too
        self._note(~is_done)
        return columns * cost * rows.unsqueeze(1)
