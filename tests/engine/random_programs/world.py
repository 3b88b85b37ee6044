"""Runs a random program with eager chunks or graphs, and notes all that its caller sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.engine.split import SPLIT, WeightBackwards
from chunkgraph.graphs import RecorderBackend

from .layers import BATCH, TIME, WIDTH
from .model import build, new_input, order_of, parameters_of, parts_of
from .programs import Program, Step


class InterruptedStepError(Exception):
    """Raised by the caller in the middle of a step."""


@dataclass
class Seen:
    """A value at one moment, compared by its bits."""

    label: str
    key: Any
    value: torch.Tensor | None
    step: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seen) and (self.label, self.key) == (other.label, other.key)

    def __str__(self) -> str:
        if self.value is None:
            return str(self.key)
        flat = self.value.flatten()
        shown = ", ".join(f"{x:.9g}" for x in flat[:4].tolist()) if not flat.is_complex() else "..."
        return f"{self.key[:-1]} [{shown}{', ...' * (flat.numel() > 4)}]"


def seen(label: str, value: Any, step: int) -> Seen:
    """Return the visible properties of a value."""
    if not isinstance(value, torch.Tensor):
        return Seen(label, value, None, step)
    now = value.detach().clone(memory_format=torch.contiguous_format)
    if now.is_floating_point():
        now.masked_fill_(now.isnan(), torch.nan)  # IEEE 754 does not define the other bits of a NaN
    bits = now.reshape(-1).view(torch.uint8).numpy().tobytes() if now.numel() else b""
    what = str(value.dtype).removeprefix("torch."), tuple(value.shape), value.requires_grad
    return Seen(label, (*what, bits), now, step)


@dataclass
class Flight:
    """A microbatch of one chunk between its forward and its backward."""

    x: torch.Tensor
    main: torch.Tensor
    extras: tuple[Any, ...]


@dataclass
class Once:
    """Requests of actions to the next forward or backward."""

    call: set[str] = field(default_factory=set)
    backward: set[str] = field(default_factory=set)


class World:
    """One run of a program.

    Args:
        program: to run.
        uses_graphs: whether chunks are captured and replayed.
    """

    def __init__(self, program: Program, *, uses_graphs: bool) -> None:
        self.program = program
        self.log: list[Seen] = []
        self.kept: list[tuple[str, torch.Tensor]] = []
        self.retained: list[torch.Tensor] = []
        self.handles: list[Any] = []
        self.places, self.step = ["start"], -1
        self.chunks = build(program)
        self.parameters = parameters_of(self.chunks)
        self.optimizer = self._new_optimizer()
        self.engines: list[ChunkGraphs] = []
        self.weights: list[WeightBackwards] = []
        self.calls: list[Callable[..., Any]] = list(self.chunks)
        self.average = [p.detach().clone() for p in self.parameters]
        self.saved_state = [
            {k: v.clone() for k, v in chunk.state_dict().items()} for chunk in self.chunks
        ]
        if uses_graphs:
            self._attach()
        torch.manual_seed(program.seed + 1)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        if self.program.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters, lr=1e-2, weight_decay=0.1)
        momentum = 0.9 if self.program.optimizer == "momentum" else 0.0
        return torch.optim.SGD(self.parameters, lr=1e-2, momentum=momentum)

    def _attach(self) -> None:
        program = self.program
        options = CaptureOptions(
            num_warmup_steps=program.num_warmup_steps,
            shared_slots=program.shared_slots,
            verify=program.verify,  # type: ignore[arg-type]
            on_failure=program.on_failure,  # type: ignore[arg-type]
        )
        groups = [self.chunks] if program.engines == "one" else [[chunk] for chunk in self.chunks]
        slots = iter(program.num_slots)
        split = SPLIT if program.backward == "split" else None
        for group in groups:
            num_slots = [next(slots) for _ in group]
            backend = RecorderBackend(can_sleep=program.sleeps)
            chunks = [
                Chunk.from_module(module, f"chunk {c}", program=split)
                for c, module in enumerate(group)
            ]
            self.engines.append(ChunkGraphs(chunks, num_slots, options=options, backend=backend))
            self.weights.append(WeightBackwards(self.engines[-1]))
        self.calls = [call for engine in self.engines for call in engine.callables]

    @property
    def num_replays(self) -> int:
        """Number of replays of all engines."""
        return sum(engine.counters.replays for engine in self.engines)

    @property
    def where(self) -> str:
        """The present place in the program."""
        return self.places[-1]

    @where.setter
    def where(self, place: str) -> None:
        self.places.append(place)

    # -- values the caller sees ----------------------------------------------------------------

    def see(self, label: str, value: Any) -> None:
        """Note the current bits of a value."""
        self.log.append(seen(f"{self.where}: {label}", value, self.step))

    def see_grads(self) -> None:
        """Note every ``.grad``."""
        for name, parameter in self.named_parameters():
            self.see(f"{name}.grad", parameter.grad)

    def see_all(self) -> None:
        """Note all results of a step."""
        self.see_grads()
        for name, parameter in self.named_parameters():
            self.see(name, parameter)
        for c, chunk in enumerate(self.chunks):
            for name, buffer in chunk.named_buffers():
                self.see(f"chunk {c}.{name}", buffer)
            for name, module in chunk.named_modules():
                if module._forward_pre_hooks:  # assigns attributes, which a replay does not
                    continue
                for key, value in vars(module).items():
                    if isinstance(value, torch.Tensor):
                        self.see(f"chunk {c}.{name}.{key}", value)
        self.see("random state", torch.get_rng_state())

    def see_kept(self) -> None:
        """Note kept tensors again."""
        for label, tensor in self.kept:
            self.see(f"kept {label}", tensor)
        for tensor in self.retained:
            self.see("retained gradient", tensor.grad)

    def keep(self, label: str, tensor: torch.Tensor | None) -> None:
        """Keep a tensor, to compare it in the end."""
        if tensor is not None:
            self.kept.append((f"{label} of {self.where}", tensor))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters by chunk; a tied one under each name."""
        for c, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                yield f"chunk {c}.{name}", parameter

    # -- steps ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all steps; at an error ``where`` holds its place."""
        from .actions import between

        for s, step in enumerate(self.program.steps):
            self.step = s
            for name in step.before:
                self.where = f"before step {s}, {name}"
                between(self, name)
            self.where = f"step {s}"
            self._zero(step.zero)
            if step.kind == "evaluate":
                self.evaluate(step)
            else:
                self._train(s, step)
            self.where = f"after step {s}"
            self.see_all()
            if step.updates and step.kind != "evaluate":
                self.optimizer.step()
                for mean, parameter in zip(self.average, self.parameters, strict=True):
                    mean.lerp_(parameter.detach().to(mean.dtype), 0.1)
            for name in step.after:
                self.where = f"after step {s}, {name}"
                between(self, name)
        self.where = "the end"
        self.see_all()
        self.see_kept()

    def _zero(self, how: str) -> None:
        if how != "never":
            self.optimizer.zero_grad(set_to_none=how == "none")

    @contextmanager
    def _step(self, step: Step) -> Iterator[None]:
        """Enter the engines' steps, with autocast around or inside them."""
        autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        with ExitStack() as stack:
            if self.program.autocast == "outside":
                stack.enter_context(autocast)
            for engine in self.engines:
                stack.enter_context(
                    engine.step(
                        step.count,
                        eager=step.kind == "eager",
                        forward_only=step.kind == "evaluate",
                        shape_key=step.kind == "other shape",
                    )
                )
            if self.program.autocast == "step":
                stack.enter_context(autocast)
            yield

    def _train(self, s: int, step: Step) -> None:
        from .actions import inside

        self.once = Once()
        self.flights: dict[tuple[int, int], Flight] = {}
        self.received: dict[tuple[int, int], torch.Tensor] = {}
        self.done: set[tuple[int, int]] = set()
        order = order_of(self.program, step)
        self.shape = (BATCH + 1 if step.kind == "other shape" else BATCH, TIME, WIDTH)
        try:
            with self._step(step):
                for at, (op, c, m) in enumerate(order):
                    self.where = f"step {s}, event {at} ({op}, chunk {c}, microbatch {m})"
                    for action in step.inside:
                        if action.at % len(order) == at:
                            inside(self, action)
                    if op == "F":
                        self._forward(c, m)
                    elif (c, m) not in self.done:
                        self._backward(step, c, m)
                self.where = f"the end of step {s}"
        except InterruptedStepError:
            pass
        self.flights = {}
        self.received = {}

    def _forward(self, c: int, m: int) -> None:
        once, self.once.call = self.once.call, set()
        if c == 0:
            x = new_input(self.shape).requires_grad_(self.program.input_grads)
            if "same" in once and self.flights:
                x = next(iter(self.flights.values())).x
            if "leaf" in once:
                x = x.requires_grad_()
            if "expanded" in once:
                x = new_input((1, 1, WIDTH)).expand(self.shape)
            if "strides" in once:
                x = x.detach().transpose(0, 1).contiguous().transpose(0, 1)
                x.requires_grad_(self.program.input_grads)
        elif self.program.links == "joined":
            x = self.flights[c - 1, m].main
        else:
            x = self.flights[c - 1, m].main.detach().clone().requires_grad_()
        args, kwargs = self._arguments(c, x, once)
        with self._autocast(once):
            result = self.calls[c](*args, **kwargs)
        main, extras = parts_of(self.program.chunks[c].form, result)
        self.see("main output", main)
        self.see("its strides", main.stride())
        mixes = any(a.name == "leaf_input" for s in self.program.steps for a in s.inside)
        for i, (kind, extra) in enumerate(zip(self.program.chunks[c].kinds, extras, strict=True)):
            # A graph for inputs that require grad returns others as if they did, too.
            self.see(f"output {i}", extra.detach() if mixes and kind == "identity" else extra)
        self.flights[c, m] = Flight(x, main, extras)

    def _autocast(self, once: set[str]) -> AbstractContextManager[object]:
        if self.program.autocast != "forward" or "no autocast" in once:
            return nullcontext()
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def _arguments(
        self, c: int, x: torch.Tensor, once: set[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = self.program.chunks[c].arguments
        args: tuple[Any, ...] = (x,)
        kwargs: dict[str, Any] = {}
        if "second" in names:
            other = torch.randn(x.shape)
            args = (x, x if "same tensor" in once else other)
        if "ids" in names:
            kwargs["ids"] = torch.randint(10, x.shape[:2])
        if "scale" in names:
            kwargs["scale"] = 0.0 if self.program.seed % 8 == 0 else 1.5
            if "scale" in once:
                kwargs["scale"] = 2.0
            if "negative zero" in once:
                kwargs["scale"] = -0.0
            if "nan" in once:
                kwargs["scale"] = float("nan")
        if "mask" in names:
            kwargs["mask"] = torch.rand(x.shape) < 0.1
        if "options" in names:
            bounds = (1.5 if "options" in once else 2.5, "unused")
            kwargs["options"] = {"bounds": bounds, "shift": torch.randn(WIDTH)}
        return args, kwargs

    # -- backwards -----------------------------------------------------------------------------

    def _backward(self, step: Step, c: int, m: int) -> None:
        once, self.once.backward = self.once.backward, set()
        autocast = (
            torch.autocast("cpu", dtype=torch.bfloat16) if "autocast" in once else nullcontext()
        )
        with autocast:
            if c == len(self.chunks) - 1:
                self._backward_of_loss(step, c, m, once)
            else:
                self._backward_of_chunk(c, m, once)
        self._run_weights()
        if self.program.watches:
            self.see_grads()
        if self.program.links == "joined":
            for k in range(c + 1):
                self.flights.pop((k, m), None)

    def _run_weights(self) -> None:
        for engine, weights in zip(self.engines, self.weights, strict=True):
            for c in range(len(engine.callables)):
                while weights._waiting(c):
                    weights.run(c)

    def _used(self, c: int, flight: Flight, once: set[str]) -> list[torch.Tensor]:
        """Return the further outputs that the loss uses."""
        marks = [kind.endswith("!") for kind in self.program.chunks[c].extras]
        if "skip" in once:
            return []
        return [
            extra
            for extra, mark in zip(flight.extras, marks, strict=True)
            if mark and isinstance(extra, torch.Tensor) and extra.requires_grad
        ]

    def _loss(self, c: int, m: int, once: set[str]) -> torch.Tensor:
        flight = self.flights[c, m]
        main = flight.main.float()
        match self.program.loss:
            case "inside":
                loss = flight.main
            case "sum":
                loss = main.sum()
            case "dot":
                loss = (main * torch.randn(main.shape)).sum()
            case _:
                loss = main.square().mean()
        first = 0 if self.program.links == "joined" else c
        for k in range(first, c + 1):
            for extra in self._used(k, self.flights[k, m], once):
                loss = loss + extra.float().square().mean()
        return loss

    def _backward_of_loss(self, step: Step, c: int, m: int, once: set[str]) -> None:
        loss, microbatches = self._loss(c, m, once), [m]
        if step.backward == "sum":
            others = [k for (chunk, k) in self.flights if chunk == c and k != m]
            others = [k for k in others if (c, k) not in self.done][:1]
            for other in others:
                loss = loss + self._loss(c, other, once)
            microbatches += others
        self.see("loss", loss)
        if "keep" in once:
            self.keep("loss", loss.detach())
        first = 0 if self.program.links == "joined" else c
        inputs = [self.flights[first, k].x for k in microbatches]
        if "drop" in once:
            pass
        elif step.backward == "grad" and inputs[0].requires_grad:
            leaves = [*inputs, self.chunks[c].first.weight]
            leaves = [t for t in leaves if t.requires_grad]
            for i, grad in enumerate(torch.autograd.grad(loss, leaves, allow_unused=True)):
                self.see(f"autograd.grad {i}", grad)
                if i < len(inputs) and grad is not None:
                    inputs[i].grad = grad
        elif step.backward == "inputs" and inputs[0].requires_grad:
            loss.backward(inputs=inputs)
        else:
            loss.backward(
                retain_graph=True if "retain" in once else None, create_graph="create" in once
            )
            if "retain" in once:
                loss.backward()
        for k in microbatches:
            self.done.add((c, k))
            self._hand_over(first, k)

    def _backward_of_chunk(self, c: int, m: int, once: set[str]) -> None:
        flight = self.flights[c, m]
        grad = self.received.pop((c, m), None)
        used = self._used(c, flight, once)
        roots = [flight.main, *used] if grad is not None else used
        grads = [torch.ones_like(extra) for extra in used]
        if roots and flight.main.requires_grad and "drop" not in once:
            torch.autograd.backward(roots, [grad, *grads] if grad is not None else grads)
        self._hand_over(c, m)

    def _hand_over(self, c: int, m: int) -> None:
        """Pass the input's gradient to the previous chunk."""
        flight = self.flights.pop((c, m))
        grad = flight.x.grad if flight.x.is_leaf else None
        self.see("input's gradient", grad)
        if grad is not None:
            self.see("its strides", grad.stride())
        if c > 0 and grad is not None:
            self.received[c - 1, m] = grad.clone()

    # -- evaluation ----------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set all layers to evaluation, without gradients."""
        modes = [(module, module.training) for chunk in self.chunks for module in chunk.modules()]
        for module, _ in modes:
            module.training = False
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training

    def evaluate(self, step: Step | None) -> None:
        """Run one forward through all chunks, inside or outside of an evaluation step."""
        with self.evaluating(), self._step(step) if step is not None else nullcontext():
            for _ in range(step.count if step is not None else 1):
                x = new_input()
                for c, call in enumerate(self.calls):
                    args, kwargs = self._arguments(c, x, set())
                    x, _ = parts_of(self.program.chunks[c].form, call(*args, **kwargs))
                self.see("evaluation", x)
