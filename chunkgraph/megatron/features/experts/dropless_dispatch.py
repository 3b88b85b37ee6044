"""Megatron's dispatchers without a capacity, with shapes that do not depend on the tokens.

Each class replaces methods of one dispatcher in a capture. The sent data and the order of rows are
Megatron's, so results have the same bits; sizes and places are computed on the device.

With all experts on one rank, the number of rows is tokens times experts per token. With several
ranks, the sent pieces and the rows of local experts have limited room; a flag on the device reports
whether it was enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from chunkgraph.megatron.core.access import import_megatron, patch_attributes
from chunkgraph.megatron.features.experts.dropless_rows import (
    ChosenRows,
    DeviceSplits,
    Shuffle,
    paired_rows,
    pieces_of,
)
from chunkgraph.megatron.features.experts.room import Room, RowCounts

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"


class Dispatch:
    """Common base of the replacements of Megatron's dispatchers.

    Args:
        layer: Megatron's layer.
        room: Room for rows, if experts are on several ranks.
        counts: The account, in which this layer has the number ``index``.
        has_padding: Whether tokens may choose no expert.

    Attributes:
        tensors: Tensors that a captured forward changes, in addition to the counts.
        are_reversed: Whether the rows of the last local expert come first, where sums of a token's
            rows do not depend on it.
    """

    name = ""
    names: tuple[str, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    are_reversed = False

    def __init__(
        self, layer: Any, room: Room, counts: RowCounts, index: int, *, has_padding: bool
    ) -> None:
        dispatcher = layer.token_dispatcher
        config = dispatcher.config
        self._megatrons = dispatcher
        self._room = room
        self._counts = counts
        self._index = index
        self._has_padding = has_padding
        self._module: Any = import_megatron(_DISPATCHER)
        self._num_ranks: int = dispatcher.ep_size
        self._num_local: int = dispatcher.num_local_experts
        self._top_k: int = config.moe_router_topk
        self._is_fused = bool(config.moe_permute_fusion) and not has_padding
        indices = dispatcher.local_expert_indices
        self._local = slice(indices[0], indices[-1] + 1)
        self._chosen: ChosenRows | None = None
        self._places: torch.Tensor | None = None

    def install(self) -> Callable[[], None]:
        """Measure the loads of eager passes between ranks; return the undo function."""
        if self._num_ranks == 1:
            return lambda: None
        eager = getattr(self._megatrons, self.names[0])

        def measured(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self._counts.add_load(*self.load(*args, *kwargs.values()))
            return eager(*args, **kwargs)

        return patch_attributes(self._megatrons, {self.names[0]: measured})

    def on_device(self) -> Callable[[], None]:
        """Make passes read nothing on the host; return the undo function."""
        return patch_attributes(self._megatrons, {n: getattr(self, n) for n in self.names})

    def load(self, *args: Any) -> tuple[int, torch.Tensor]:
        """Return the tokens of a microbatch and the rows that need room, in an eager pass.

        Args:
            args: Arguments of Megatron's method with the first name of `names`.
        """
        raise NotImplementedError

    def _most_rows(self, num_tokens: int) -> int:
        return num_tokens * min(self._top_k, self._num_local)

    def _summed(
        self, rows: torch.Tensor, *, is_fused: bool, routing_map: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of each token's rows."""
        shape = self._megatrons.hidden_shape_before_permute
        if not is_fused:
            assert self._chosen is not None
            return self._chosen.sum_rows(self._chosen.clear(rows), shape[0])
        summed: torch.Tensor = self._module.unpermute(
            rows, self._places, restore_shape=shape, routing_map=routing_map, fused=True
        )
        return summed

    def _bounded(self, num_tokens: int, demand: torch.Tensor) -> int:
        """Return the room in rows; record whether ``demand`` exceeds it."""
        most = self._most_rows(num_tokens)
        rows = self._room.rows(num_tokens, most)
        if rows < most and torch.is_grad_enabled():
            self._counts.add(self._index, demand > rows)
        return rows


class AllToAllRows(Dispatch):
    """Replacement of the all-to-all dispatcher: pieces of equal size for each pair of ranks."""

    name = "all-to-all"
    names = (
        "dispatch_preprocess",
        "token_dispatch",
        "dispatch_postprocess",
        "combine_preprocess",
        "token_combine",
        "combine_postprocess",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cut: Shuffle | None = None
        self._by_expert: Shuffle | None = None
        self._splits: DeviceSplits | None = None

    def load(self, *args: Any) -> tuple[int, torch.Tensor]:
        """See `Dispatch`."""
        chosen = args[1]
        by_rank = chosen.sum(0).view(self._num_ranks, self._num_local).sum(1)
        return chosen.shape[0], by_rank.max()

    def dispatch_preprocess(
        self, hidden: torch.Tensor, chosen: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort tokens by expert."""
        megatrons = self._megatrons
        megatrons.hidden_shape, megatrons.probs = hidden.shape, probs
        if megatrons.shared_experts is not None:
            megatrons.shared_experts.pre_forward_comm(hidden)
        hidden = hidden.view(-1, hidden.shape[-1])
        megatrons.hidden_shape_before_permute = hidden.shape
        num_rows = hidden.shape[0] * self._top_k
        if self._is_fused:
            rows, row_probs, self._places, *_ = self._module.permute(
                hidden, chosen, probs=probs, num_out_tokens=num_rows, fused=True
            )
            self._splits = DeviceSplits(chosen.sum(0).cumsum(0).int())
            return rows, row_probs
        self._chosen = ChosenRows.of(
            chosen,
            num_rows,
            are_exact=not self._has_padding,
            # Else the rows are sorted by rank, and again where they are received.
            are_reversed=self.are_reversed and self._num_ranks * megatrons.tp_size == 1,
        )
        self._splits = self._chosen.splits
        return self._chosen.take_rows(hidden), self._chosen.take(probs)

    def token_dispatch(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send each rank of the experts its piece."""
        megatrons, shared = self._megatrons, self._megatrons.shared_experts
        if self._num_ranks > 1:
            assert self._splits is not None
            by_rank = self._splits.counts.view(self._num_ranks, self._num_local).sum(1)
            piece = self._bounded(rows.shape[0] // self._top_k, by_rank.max())
            self._cut = pieces_of(by_rank, rows.shape[0], piece)
            rows, probs = self._cut.move(rows), self._cut.move(probs)
        # Megatron's order: the shared experts overlap with the transfer of the rows.
        _wait(shared)
        rows = self._module.all_to_all(megatrons.ep_group, rows)
        if shared is not None:
            shared.linear_fc1_forward_and_act(rows)
        return rows, self._module.all_to_all(megatrons.ep_group, probs)

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, DeviceSplits, torch.Tensor]:
        """Sort the received rows by local expert."""
        megatrons, splits = self._megatrons, self._splits
        assert splits is not None
        num_sources = self._num_ranks * megatrons.tp_size
        if num_sources == 1:
            return rows, splits, probs
        gather = self._module.gather_from_sequence_parallel_region
        piece = rows.shape[0] // self._num_ranks
        if megatrons.tp_size > 1:
            rows = gather(rows, group=megatrons.tp_group)
            probs = gather(probs, group=megatrons.tp_group)
        counts = gather(splits.counts, group=megatrons.tp_ep_group)
        counts = counts.view(self._num_ranks, megatrons.tp_size, -1).transpose(0, 1)
        counts = counts[:, :, self._local].reshape(num_sources, self._num_local)
        self._by_expert, splits = paired_rows(counts, piece, are_reversed=self.are_reversed)
        return self._by_expert.move(rows), splits, self._by_expert.move(probs)

    def combine_preprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Move results back to the pieces of their inputs."""
        megatrons = self._megatrons
        if self._by_expert is None:
            return rows
        rows = self._by_expert.move_back(rows)
        if megatrons.tp_size > 1:
            scatter = self._module.reduce_scatter_to_sequence_parallel_region
            summed = scatter(rows.to(megatrons.probs.dtype), group=megatrons.tp_group)
            rows = summed.to(rows.dtype)
        return rows

    def token_combine(self, rows: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
        """Send pieces back."""
        megatrons, shared = self._megatrons, self._megatrons.shared_experts
        _wait(shared)
        rows = self._module.all_to_all(megatrons.ep_group, rows)
        if shared is not None:
            shared.linear_fc2_forward(rows)
            shared.post_forward_comm()
        return rows if self._cut is None else self._cut.move_back(rows)

    def combine_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Add up the results of each token."""
        megatrons = self._megatrons
        output = self._summed(rows, is_fused=self._is_fused)
        self._chosen = self._by_expert = self._cut = None
        self._places = self._splits = megatrons.probs = None
        output = output.view(megatrons.hidden_shape)
        if megatrons.shared_experts is not None:
            output += megatrons.shared_experts.get_output()
        return output


class AllGatherRows(Dispatch):
    """Replacement of the all-gather dispatcher's methods on the tokens of all ranks."""

    name = "all-gather"
    names = ("dispatch_postprocess", "combine_preprocess")

    def load(self, *_args: Any) -> tuple[int, torch.Tensor]:
        """See `Dispatch`."""
        chosen = self._megatrons.routing_map
        return chosen.shape[0], chosen[:, self._local].sum()

    def dispatch_postprocess(
        self, hidden: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, DeviceSplits, torch.Tensor]:
        """Sort the tokens of local experts."""
        megatrons = self._megatrons
        megatrons.hidden_shape_before_permute = hidden.shape
        chosen = megatrons.routing_map[:, self._local].contiguous()
        num_tokens = hidden.shape[0]
        are_exact = self._num_ranks == 1 and not self._has_padding
        num_rows = num_tokens * self._top_k
        if self._num_ranks > 1:
            num_rows = self._bounded(num_tokens, chosen.sum())
        is_fused = self._is_fused and are_exact
        self._chosen = ChosenRows.of(
            chosen,
            num_rows,
            are_exact=are_exact,
            are_reversed=self.are_reversed and not is_fused,
        )
        if is_fused:
            rows, _, self._places, *_ = self._module.permute(
                hidden, chosen, num_out_tokens=num_rows, fused=True
            )
        else:
            rows = self._chosen.take_rows(hidden)
        megatrons.local_map, megatrons.routing_map = chosen, None
        megatrons.local_probs = probs.new_empty(0)  # Megatron combines rows in its dtype
        local_probs = self._chosen.take(probs[:, self._local].contiguous())
        return rows, self._chosen.splits, local_probs

    def combine_preprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Add up the local results of each token."""
        megatrons, chosen = self._megatrons, self._chosen
        assert chosen is not None
        is_fused = self._is_fused and chosen.unused is None
        output = self._summed(rows, is_fused=is_fused, routing_map=megatrons.local_map)
        self._chosen = self._places = megatrons.local_map = None
        return output


def _wait(shared_experts: Any) -> None:
    """Make the stream of overlapped shared experts wait, in releases whose dispatcher does."""
    if hasattr(shared_experts, "wait_current_stream"):
        shared_experts.wait_current_stream()
