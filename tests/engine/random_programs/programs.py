"""Random training programs as plain values, whose ``repr`` reproduces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .layers import EXOTIC, NESTING, PLAIN

T = TypeVar("T")

Choose = Callable[[Sequence[Any]], Any]
"""Gives one of the values; the first is the simplest."""


@dataclass(frozen=True)
class ChunkSpec:
    """A model chunk.

    ``form`` is what holds its outputs; ``extras`` are the outputs besides the main one, of which
    the loss uses those that end with "!"; ``arguments`` are those besides the main one.
    """

    layers: tuple[str, ...] = ("linear",)
    form: str = "tensor"
    extras: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of the further outputs."""
        return [extra.rstrip("!") for extra in self.extras]


@dataclass(frozen=True)
class Action:
    """An action of the caller before event ``at`` of a step, counting forwards and backwards."""

    at: int
    name: str
    value: int = 0


@dataclass(frozen=True)
class Step:
    """One step; ``order`` and ``seed`` choose its interleaving of forwards and backwards."""

    count: int = 1
    kind: str = "train"
    order: str = "deep"
    seed: int = 0
    backward: str = "each"
    zero: str = "none"
    before: tuple[str, ...] = ()
    inside: tuple[Action, ...] = ()
    after: tuple[str, ...] = ()
    updates: bool = True


@dataclass(frozen=True)
class Program:
    """Chunks, how they are captured, and the steps.

    ``tied`` chunks share a weight. A split ``backward`` runs its weight half right after the input
    half.
    """

    chunks: tuple[ChunkSpec, ...] = (ChunkSpec(),)
    steps: tuple[Step, ...] = (Step(), Step(), Step())
    seed: int = 0
    num_slots: tuple[int, ...] = (1,)
    engines: str = "one"
    shared_slots: bool = False
    verify: str = "none"
    on_failure: str = "raise"
    num_warmup_steps: int = 1
    tied: bool = False
    frozen: tuple[int, ...] = ()
    input_grads: bool = True
    links: str = "cut"
    loss: str = "square"
    autocast: str = "off"
    optimizer: str = "sgd"
    watches: bool = True
    backward: str = "whole"

    @property
    def sleeps(self) -> bool:
        """Whether graphs sleep and wake between steps."""
        return any("sleep" in (*s.before, *s.after) for s in self.steps)

    @property
    def is_plain(self) -> bool:
        """Whether the program has nothing that a contract may reasonably refuse."""
        kinds = {
            kind for chunk in self.chunks for layer in chunk.layers for kind in layer.split(":")
        }
        between = {name for s in self.steps for name in (*s.before, *s.after)}
        inside = {action.name for s in self.steps for action in s.inside}
        return (
            not kinds & EXOTIC.keys()
            and not between & set(EXOTIC_BETWEEN)
            and not inside & set(EXOTIC_INSIDE)
            and self.autocast == "off"
            and self.backward == "whole"
            and not self.tied
            and all(s.backward == "each" for s in self.steps)
            and not any(kind in EXOTIC_EXTRAS for c in self.chunks for kind in c.kinds)
        )


EXTRAS = ("metric", "detached", "head", "view", "none", "plain", "integers", "norm")
EXOTIC_EXTRAS = ("identity", "twice", "parameter", "buffer")
FORMS = ("tuple", "dict", "list", "named", "nested")
ARGUMENTS = ("ids", "scale", "mask", "options", "second")

INSIDE = (
    "draw",
    "keep_output",
    "keep_detached",
    "keep_view",
    "keep_loss",
    "read_grads",
    "clip",
    "scale_grads",
    "zero_in_place",
    "evaluate",
    "hook_input",
    "seed",
    "note",
)
EXOTIC_INSIDE = (
    "zero_to_none",
    "keep_grads",
    "optimizer_step",
    "change_output",
    "raise",
    "no_autocast",
    "autocast_backward",
    "change_scale",
    "negative_zero",
    "nan_scale",
    "other_strides",
    "same_tensor_twice",
    "write_buffer",
    "write_input",
    "same_input",
    "hook_output",
    "retain_output_grad",
    "create_graph",
    "without_gradients",
    "change_options",
    "skip_extras",
    "retain_graph",
    "drop",
    "expanded_input",
    "leaf_input",
)
BETWEEN = (
    "draw",
    "clip",
    "keep_grads",
    "scale_grads",
    "zero_to_none",
    "zero_in_place",
    "evaluate",
    "load_state_dict",
    "average",
    "swap_in_place",
    "change_rate",
    "write_buffer",
    "deepcopy",
    "release",
    "read_grads",
    "replace_grads",
    "zero_some",
    "preset_grads",
    "preset_transposed_grads",
    "without_gradients",
    "seed",
    "sleep",
)
EXOTIC_BETWEEN = (
    "freeze",
    "thaw",
    "freeze+release",
    "thaw+release",
    "eval_part",
    "train_part",
    "eval_part+release",
    "train_part+release",
    "flat_grads",
    "swap_data",
    "assign_state_dict",
    "replace_parameter",
    "replace_parameter+release",
    "replace_layer",
    "replace_layer+release",
    "add_hook",
    "add_hook+release",
    "main_data_transposed",
    "backward_outside",
    "add_forward_hook",
    "add_forward_hook+release",
    "anneal",
    "anneal+release",
    "change_epsilon",
    "change_epsilon+release",
    "as_vector",
    "as_vector+release",
    "change_temperature+release",
    "replace_mask+release",
    "replace_shift+release",
)


def make_program(choose: Choose) -> Program:
    """Draw a random program."""
    exotic = choose((False, False, True))
    chunks = tuple(_chunk(choose, exotic) for _ in range(choose((1, 1, 2, 3))))
    shared = choose((False, False, True))
    links = choose(("cut", "cut", "joined"))
    steps = tuple(_step(choose, exotic) for _ in range(choose((3, 4, 5, 6))))
    program = Program(
        chunks=chunks,
        steps=steps,
        seed=choose(range(1000)),
        num_slots=(
            (choose((3, 4, 5)),) * len(chunks)
            if shared
            else tuple(choose((1, 2, 3)) for _ in chunks)
        ),
        engines="one" if shared else choose(("one", "one", "each")),
        shared_slots=shared,
        verify=choose(("none", "none", "poison", "shadow")),
        on_failure=choose(("raise", "raise", "eager")),
        num_warmup_steps=choose((1, 1, 2)),
        tied=exotic and choose((False, False, True)),
        frozen=choose(((), (), (0,), (1, 4))),
        input_grads=choose((True, True, False)),
        links=links,
        loss=choose(("square", "dot", "inside", "sum")),
        autocast=choose(("off", "off", "off", "forward", "step", "outside")) if exotic else "off",
        optimizer=choose(("sgd", "momentum", "adamw")),
        watches=choose((True, True, False)),
        backward=choose(("whole", "whole", "whole", "split")) if exotic else "whole",
    )
    return _within_contract(program)


_STALE_CASTS = ("optimizer_step", "without_gradients", "evaluate")
"""Actions after which eager operators of the same autocast block read casts of other values."""


def _within_contract(program: Program) -> Program:
    """Return the program without what the contract leaves to its caller."""
    chunks, steps = program.chunks, program.steps
    if program.links == "joined":
        if any({"identity", "twice"} & {*chunk.kinds} for chunk in chunks):
            program = replace(program, links="cut")  # two readers of a sum of gradients
        elif program.tied:
            program = replace(program, engines="one")  # one backward through two engines
    if program.autocast in ("step", "outside"):
        if any("decay" in layer for chunk in chunks for layer in chunk.layers):
            return replace(program, autocast="forward")
        kept = [tuple(a for a in s.inside if a.name not in _STALE_CASTS) for s in steps]
        steps = tuple(replace(s, inside=i) for s, i in zip(steps, kept, strict=True))
        program = replace(program, steps=steps)
    return program


def _pick(choose: Choose, plain: Sequence[str], exotic: Sequence[str], is_exotic: bool) -> str:
    return str(choose(exotic if is_exotic and choose((False,) * 5 + (True,)) else plain))


def _layer(choose: Choose, exotic: bool, depth: int = 0) -> str:
    if depth < 2 and choose((False, False, False, True)):
        return f"{choose(tuple(NESTING))}:{_layer(choose, exotic, depth + 1)}"
    return _pick(choose, tuple(PLAIN), tuple(EXOTIC), exotic)


def _chunk(choose: Choose, exotic: bool) -> ChunkSpec:
    layers = tuple(_layer(choose, exotic) for _ in range(choose((1, 2, 3, 4))))
    form = choose(("tensor", *FORMS))
    num_extras = 0 if form == "tensor" else choose((1, 2, 3))
    extras = tuple(
        _pick(choose, EXTRAS, EXOTIC_EXTRAS, exotic) + choose(("", "!")) for _ in range(num_extras)
    )
    arguments = tuple(dict.fromkeys(choose(ARGUMENTS) for _ in range(choose((0, 0, 1, 2)))))
    return ChunkSpec(layers, form, extras, arguments)


def _step(choose: Choose, exotic: bool) -> Step:
    def between(lengths: Sequence[int]) -> tuple[str, ...]:
        num = choose(lengths)
        return tuple(_pick(choose, BETWEEN, EXOTIC_BETWEEN, exotic) for _ in range(num))

    return Step(
        count=choose((1, 2, 3, 4, 5, 6, choose((1, 8, 13, 50)))),
        kind=choose(("train",) * 12 + ("eager", "evaluate", "other shape")),
        order=choose(("deep", "wide", "random", "unordered")),
        seed=choose(range(100)),
        backward=choose(("each",) * 9 + ("sum", "grad", "inputs")) if exotic else "each",
        zero=choose(("none", "none", "in place", "never")),
        before=between((0, 0, 1, 2)),
        inside=tuple(
            Action(
                choose(range(20)),
                _pick(choose, INSIDE, EXOTIC_INSIDE, exotic),
                choose(range(4)),
            )
            for _ in range(choose((0, 0, 1, 2, 3)))
        ),
        after=between((0, 0, 0, 1)),
        updates=choose((True, True, True, False)),
    )
