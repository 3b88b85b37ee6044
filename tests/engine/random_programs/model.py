"""The modules of a random program, and the order of a step's forwards and backwards."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import nn

from .layers import BATCH, TIME, WIDTH, make_layer
from .programs import ChunkSpec, Program, Step


class Outputs(NamedTuple):
    """A named tuple, as a user may define."""

    main: torch.Tensor
    extras: tuple[Any, ...]


class RandomChunk(nn.Module):
    """Layers one after another, then further outputs."""

    def __init__(self, spec: ChunkSpec, *, gives_loss: bool) -> None:
        super().__init__()
        self.spec = spec
        self.gives_loss = gives_loss
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make_layer(kind) for kind in spec.layers)
        self.ids = nn.Embedding(10, WIDTH) if "ids" in spec.arguments else None
        self.head = nn.Linear(WIDTH, 2) if "head" in spec.kinds else None
        self.register_buffer("num_calls", torch.zeros(1) if "buffer" in spec.kinds else None)

    def forward(
        self,
        x: torch.Tensor,
        second: torch.Tensor | None = None,
        *,
        ids: torch.Tensor | None = None,
        scale: float = 1.0,
        mask: torch.Tensor | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        h = self.first(x)
        if second is not None:
            h = h + second.tanh()
        if ids is not None and self.ids is not None:
            h = h + self.ids(ids)
        for layer in self.layers:
            h = layer(h)
        if mask is not None:
            h = h.masked_fill(mask, 0.0)
        h = h * scale
        if options is not None:
            h = h.clamp(max=options["bounds"][0]) + options["shift"]
        extras = tuple(self._extra(kind, x, h) for kind in self.spec.kinds)
        main = h.float().square().mean() if self.gives_loss else h
        return _in_form(self.spec.form, main, extras)

    def _extra(self, kind: str, x: torch.Tensor, h: torch.Tensor) -> Any:
        match kind:
            case "metric":
                return h.float().mean()
            case "norm":
                return h.float().norm() - h.float().norm()
            case "detached":
                return h.detach()[0]
            case "head":
                return self.head(h.to(self.head.weight.dtype))
            case "view":
                return h[:, 1:]
            case "none":
                return None
            case "plain":
                return 3
            case "integers":
                return h.detach().argmax(-1)
            case "identity":
                return x
            case "twice":
                return h
            case "parameter":
                return self.first.weight
            case "buffer":
                return self.num_calls.add_(1)
        raise AssertionError(kind)


def _in_form(form: str, main: torch.Tensor, extras: tuple[Any, ...]) -> Any:
    match form:
        case "tensor":
            return main
        case "tuple":
            return (main, *extras)
        case "list":
            return [main, *extras]
        case "dict":
            return {"main": main, **{f"extra {i}": extra for i, extra in enumerate(extras)}}
        case "named":
            return Outputs(main, extras)
        case "nested":
            return {"extras": list(extras), "main": [(main,)]}
    raise AssertionError(form)


def parts_of(form: str, result: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Return the main output and the others."""
    match form:
        case "tensor":
            return result, ()
        case "tuple" | "list":
            return result[0], tuple(result[1:])
        case "dict":
            return result["main"], tuple(v for k, v in result.items() if k != "main")
        case "named":
            return result.main, result.extras
        case "nested":
            return result["main"][0][0], tuple(result["extras"])
    raise AssertionError(form)


def build(program: Program) -> list[RandomChunk]:
    """Build the chunks from the program's seed."""
    torch.manual_seed(program.seed)
    last = len(program.chunks) - 1
    chunks = [
        RandomChunk(spec, gives_loss=program.loss == "inside" and c == last)
        for c, spec in enumerate(program.chunks)
    ]
    if program.tied and last:
        chunks[last].first.weight = chunks[0].first.weight
    parameters = parameters_of(chunks)
    for index in program.frozen:
        parameters[index % len(parameters)].requires_grad_(False)
    return chunks


def parameters_of(chunks: list[RandomChunk]) -> list[nn.Parameter]:
    """Return all parameters, a tied one once."""
    return list(dict.fromkeys(p for chunk in chunks for p in chunk.parameters()))


def new_input(shape: tuple[int, ...] = (BATCH, TIME, WIDTH)) -> torch.Tensor:
    """Make the input of a microbatch."""
    return torch.randn(shape)


def order_of(program: Program, step: Step) -> list[tuple[str, int, int]]:
    """Return a legal order of ("F" or "B", chunk, microbatch), within the slots.

    Where backwards run through all chunks, each microbatch has one, of the last chunk.
    """
    num, choose = len(program.chunks), random.Random(step.seed)
    joined = program.links == "joined"
    forwarded, order = [0] * num, []
    at: dict[int, int] = {}  # microbatches in flight: chunk whose backward is next
    while True:
        held = [sum(1 for m, c in at.items() if forwarded[k] > m and k <= c) for k in range(num)]
        forwards = [
            ("F", c, forwarded[c])
            for c in range(num)
            if forwarded[c] < step.count
            and (c == 0 or forwarded[c - 1] > forwarded[c])
            and _has_slot(program, c, held, forwarded, at)
        ]
        done = [m for m in at if forwarded[-1] > m]
        backwards = [("B", at[m], m) for m in sorted(done)]
        if step.order != "unordered":  # of each chunk, in the order of its forwards
            backwards = [b for b in backwards if b == min(x for x in backwards if x[1] == b[1])]
            backwards = [b for b in backwards if not any(m < b[2] and at[m] >= b[1] for m in at)]
        if not forwards and not backwards:
            assert not at, "no event is legal"
            return order
        if step.order == "deep":
            event = (backwards or forwards[::-1])[0]
        elif step.order == "wide":
            event = (forwards or backwards)[0]
        else:
            event = choose.choice(forwards + backwards)
        order.append(event)
        op, c, m = event
        if op == "F":
            forwarded[c] += 1
            if c == 0:
                at[m] = num - 1
        elif joined or c == 0:
            del at[m]
        else:
            at[m] = c - 1


def _has_slot(
    program: Program, c: int, held: list[int], forwarded: list[int], at: dict[int, int]
) -> bool:
    if not program.shared_slots:
        return held[c] < program.num_slots[c]
    # Keep as many slots free as the microbatch ahead of all others still needs.
    num = len(program.chunks)
    free = program.num_slots[0] - sum(held) - 1
    if c > 0:
        is_ahead = forwarded[c] == min((m for m in at if forwarded[-1] <= m), default=forwarded[c])
        return free >= 0 and (is_ahead or free >= _missing(num, forwarded, at))
    return free >= (max(_missing(num, forwarded, at), 0) if at else num - 1)


def _missing(num: int, forwarded: list[int], at: dict[int, int]) -> int:
    """Count the forwards that the first microbatch in flight still needs."""
    first = min((m for m in at if forwarded[-1] <= m), default=None)
    if first is None:
        return 0
    return sum(1 for c in range(num) if forwarded[c] <= first)
