"""A few facts about a module for each call: small modules whole, of larger ones a part in turn."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import cycle
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn

__all__ = ["Windows"]

_SMALL = 8
"""Of as many layers, or parameters, every call looks at all."""

_NUM_IN_TURN = 2
"""Of more it looks at so many in turn, next to the module itself and its first parameter."""

_requires_grad = attrgetter("requires_grad")
_training = itemgetter("training")


@dataclass(frozen=True)
class _Window:
    attributes: list[dict[str, Any]]
    modes: list[bool]
    parameters: list[torch.Tensor]
    trains: list[bool]
    holders: list[dict[str, Any]]
    keys: list[str]
    tensors: list[torch.Tensor]
    tensor: torch.Tensor
    address: int


class Windows:
    """What calls look at, one window after the other.

    Args:
        module: as it is captured.
        caches: buffers of these names are left out.
    """

    def __init__(self, module: nn.Module, caches: Collection[str] = ()) -> None:
        attributes = [vars(m) for m in module.modules()]
        places = [
            (holder, key, tensor)
            for m in module.modules()
            for holder in (m._parameters, m._buffers)
            for key, tensor in holder.items()
            if tensor is not None and key not in caches
        ]
        places.sort(key=lambda place: not isinstance(place[2], nn.Parameter))
        parameters = [tensor for _, _, tensor in places if isinstance(tensor, nn.Parameter)]
        of_modules, of_parameters = _in_turn(attributes), _in_turn(parameters)
        windows: list[_Window] = []
        for i in range(max(len(of_modules), len(of_parameters), len(places))):
            looked_at = of_modules[i % len(of_modules)]
            trained = of_parameters[i % len(of_parameters)]
            held = places[:1] + places[i % len(places) :][:1] if places else []
            tensor = held[-1][2] if held else _NOTHING
            windows.append(
                _Window(
                    looked_at,
                    [*map(_training, looked_at)],
                    trained,
                    [*map(_requires_grad, trained)],
                    [holder for holder, _, _ in held],
                    [key for _, key, _ in held],
                    [tensor for _, _, tensor in held],
                    tensor,
                    tensor.data_ptr(),
                )
            )
        self._next = cycle(windows).__next__

    def next_is_as_captured(self) -> bool:
        """Whether what the next window shows is as it was."""
        window = self._next()
        return (
            [*map(_training, window.attributes)] == window.modes
            and [*map(_requires_grad, window.parameters)] == window.trains
            and all(map(is_, map(dict.get, window.holders, window.keys), window.tensors))
            and window.tensor.data_ptr() == window.address
        )


_NOTHING = torch.empty(0, device="cpu")


def _in_turn(values: list[Any]) -> list[list[Any]]:
    """All of a few; of many the first, and others in turn."""
    if len(values) <= _SMALL:
        return [values]
    first, rest = values[0], values[1:]
    starts = range(0, len(rest), _NUM_IN_TURN)
    return [[first, *rest[start : start + _NUM_IN_TURN]] for start in starts]
