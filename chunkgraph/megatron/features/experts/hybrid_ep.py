"""HybridEP's dispatch in graphs: rows for the loads of eager steps, numbers of rows on the device.

Without a number of rows HybridEP waits for the number of received rows. With one it reads nothing
on the host, omits rows that exceed it, and sets a flag on the device. It sorts rows by expert, in
the same order either way.
"""

from __future__ import annotations

from typing import Any

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import private_names, versions
from chunkgraph.megatron.features.experts.device_splits import DeviceSplits
from chunkgraph.megatron.features.experts.dropless_dispatch import Dispatch

__all__ = ["HybridEPRows", "manager_of", "overflow_of"]

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_HANDLE_LENGTH = 11
"""Length of the tuple that HybridEP's dispatch returns, in which `_OVERFLOW` is an index."""
_OVERFLOW = 10


def manager_of(layer: Any, kind: type[Any] | None = None) -> Any:
    """Return the object that sends the tokens of an expert layer.

    Args:
        layer: An expert layer.
        kind: Expected class; None for Megatron's class of HybridEP.

    Raises:
        ConfigError: It is of another class.
    """
    if kind is None:
        (kind,) = private_names(_DISPATCHER, "_HybridEPManager")
    manager = getattr(layer.token_dispatcher, "_comm_manager", None)
    if not isinstance(manager, kind):
        raise ConfigError(
            f"Layer {layer.layer_number} dispatches its tokens by {type(manager).__name__}, "
            f"not by {kind.__name__} of megatron-core {versions()['megatron_core']}. "
            "Give all layers one dispatcher."
        )
    return manager


def overflow_of(manager: Any) -> torch.Tensor:
    """Return whether HybridEP's last dispatch omitted rows, an integer on the device.

    Raises:
        ConfigError: This release of DeepEP does not return it.
    """
    handle = manager.handle
    if len(handle) != _HANDLE_LENGTH:
        raise ConfigError(
            f"DeepEP returns {len(handle)} values from a dispatch, expected {_HANDLE_LENGTH}. Use "
            "the hybrid-ep branch of 1.2.1."
        )
    overflow: torch.Tensor = handle[_OVERFLOW]
    return overflow


class HybridEPRows(Dispatch):
    """Replacement of the flexible dispatcher with HybridEP: rows of a rank have limited room."""

    name = "HybridEP"
    names = ("dispatch_postprocess", "dispatch_preprocess", "token_dispatch")

    def __init__(self, dispatcher: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(dispatcher, *args, **kwargs)
        self._manager = dispatcher._comm_manager
        self._is_limited = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """See `Dispatch`; Megatron accumulates the flag of omitted rows."""
        return (self._manager.over_budget,)

    def load(self, *args: Any) -> tuple[int, torch.Tensor]:
        """See `Dispatch`."""
        return self._num_tokens(), torch.tensor(args[0].shape[0])

    def dispatch_preprocess(
        self, hidden: torch.Tensor, chosen: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Set the number of rows in graphs; eager passes have room for all."""
        megatrons = self._megatrons
        sent: tuple[torch.Tensor, torch.Tensor] = type(megatrons).dispatch_preprocess(
            megatrons, hidden, chosen, probs
        )
        num_tokens = self._num_tokens()
        most = self._manager.group.size() * self._most_rows(num_tokens)
        self._is_limited = self._room.factor is not None
        if self._is_limited:
            self._manager.num_permuted_tokens = self._room.rows(num_tokens, most)
        return sent

    def token_dispatch(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Send rows to the ranks of their experts."""
        megatrons, manager = self._megatrons, self._manager
        if not self._is_limited:
            eager: tuple[torch.Tensor, torch.Tensor] = type(megatrons).token_dispatch(
                megatrons, *args, **kwargs
            )
            return eager
        # With any factor the manager keeps the numbers of rows, and leaves them on the device.
        manager.moe_expert_rank_capacity_factor = 1.0
        try:
            received: tuple[torch.Tensor, torch.Tensor] = type(megatrons).token_dispatch(
                megatrons, *args, **kwargs
            )
        finally:
            manager.moe_expert_rank_capacity_factor = None
        if torch.is_grad_enabled():
            self._note(overflow_of(manager))
        return received

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, DeviceSplits, torch.Tensor]:
        """Return the received rows, which are sorted by local expert."""
        counts = self._manager.get_number_of_tokens_per_expert().to(rows.device)
        # Of omitted rows DeepEP promises no counts.
        ends = counts.cumsum(0).clamp(max=rows.shape[0]).int()
        return rows, DeviceSplits(ends), probs

    def _num_tokens(self) -> int:
        """Return the tokens of the current microbatch on this rank."""
        *sizes, _ = self._megatrons.hidden_shape
        return int(torch.Size(sizes).numel())
