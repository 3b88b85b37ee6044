"""Check a few facts about a module at each call: all of a small one, or parts in turn."""

from __future__ import annotations

from collections.abc import Collection
from itertools import cycle
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

__all__ = ["Windows"]

_SMALL = 8
"""Up to this many layers and parameters, every call checks all of them. Otherwise it checks the
module itself, its first parameter, and one layer or tensor in turn."""

_are_transforms_active = torch._C._are_functorch_transforms_active
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_requires_grad = attrgetter("requires_grad")
_training = itemgetter("training")


class Windows:
    """The parts of a module that calls check, one window after the other.

    Args:
        module: The module in the captured state.
        caches: Names of buffers to ignore.
    """

    def __init__(self, module: nn.Module, caches: Collection[str] = ()) -> None:
        # The wrapper of `torch.compile` has the mode of what it wraps.
        attributes = [own for m in module.modules() if "training" in (own := vars(m))]
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
        first, root = tensors[0], attributes[0]
        # One layer or tensor per window, since checking cold objects costs cache misses.
        pairs = [(own, first) for own in attributes] + [(root, tensor) for tensor in tensors[1:]]
        windows = [
            (own, own["training"], tensor, tensor.requires_grad, tensor.data_ptr())
            for own, tensor in pairs
        ]
        self._next = cycle(windows).__next__
        self._root, self._mode, self._first = root, module.training, first
        self._holder: dict[str, Any] = places[0][0] if places else {"": self._first}
        self._key = places[0][1] if places else ""
        is_small = max(len(attributes), len(parameters)) <= _SMALL
        self._all = attributes if is_small else []
        self._modes = [*map(_training, self._all)]
        self._parameters = parameters if is_small else []
        self._flags = [*map(_requires_grad, self._parameters)]

    def next_is_as_captured(self) -> bool:
        """Return whether the next window is unchanged, and no hook or transform is active."""
        own, mode, tensor, trains, address = self._next()
        return (
            self._root["training"] is self._mode
            and own["training"] is mode
            and tensor.requires_grad is trains
            and tensor.data_ptr() == address
            and self._holder.get(self._key) is self._first
            and _saved_tensors_hooks(False) is None
            and not _are_transforms_active()
            and forward_ad._current_level < 0
            and (
                not self._all
                or (
                    [*map(_training, self._all)] == self._modes
                    and [*map(_requires_grad, self._parameters)] == self._flags
                )
            )
        )
