"""A few facts about a module for each call: small modules whole, of larger ones a part in turn."""

from __future__ import annotations

from collections.abc import Collection
from itertools import cycle
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn

__all__ = ["Windows"]

_SMALL = 8
"""Of as many layers and parameters, every call looks at all; of more it looks at the module itself,
at its first parameter, and at one layer and one tensor in turn."""

_requires_grad = attrgetter("requires_grad")
_training = itemgetter("training")


class Windows:
    """What calls look at, one window after the other.

    Args:
        module: as it is captured.
        caches: buffers of these names are left out.
    """

    def __init__(self, module: nn.Module, caches: Collection[str] = ()) -> None:
        attributes = [vars(m) for m in module.modules()]
        places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
            (holder, key, tensor)
            for m in module.modules()
            for holder in (m._parameters, m._buffers)
            for key, tensor in holder.items()
            if tensor is not None and key not in caches
        ]
        places.sort(key=lambda place: not isinstance(place[2], nn.Parameter))
        parameters = [tensor for _, _, tensor in places if isinstance(tensor, nn.Parameter)]
        tensors = [tensor for _, _, tensor in places] or [torch.empty(0)]
        windows = []
        for i in range(max(len(attributes), len(tensors))):
            own, tensor = attributes[i % len(attributes)], tensors[i % len(tensors)]
            mode, trains = own["training"], tensor.requires_grad
            windows.append((own, mode, tensor, trains, tensor.data_ptr()))
        self._next = cycle(windows).__next__
        self._own, self._mode = attributes[0], module.training
        self._first, self._trains = tensors[0], tensors[0].requires_grad
        self._holder: dict[str, Any] = places[0][0] if places else {"": self._first}
        self._key = places[0][1] if places else ""
        is_small = max(len(attributes), len(parameters)) <= _SMALL
        self._all = attributes if is_small else []
        self._modes = [*map(_training, self._all)]
        self._parameters = parameters if is_small else []
        self._flags = [*map(_requires_grad, self._parameters)]

    def next_is_as_captured(self) -> bool:
        """Whether what the next window shows is as it was."""
        own, mode, tensor, trains, address = self._next()
        first = self._first
        if (
            self._own["training"] is not self._mode
            or own["training"] is not mode
            or first.requires_grad is not self._trains
            or tensor.requires_grad is not trains
            or tensor.data_ptr() != address
            or self._holder.get(self._key) is not first
        ):
            return False
        return not self._all or (
            [*map(_training, self._all)] == self._modes
            and [*map(_requires_grad, self._parameters)] == self._flags
        )
