"""LoRA adapters of peft: chunks that are frozen in part, and what changes between steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from split_models import WIDTH, Block
from torch import nn
from toys import all_equal

from chunkgraph.engine import Chunk, ChunkGraphs
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend


@pytest.fixture(scope="module")
def peft() -> Any:
    """Import peft here: it takes seconds, which other test processes need not wait."""
    return pytest.importorskip("peft")


def adapted(peft: Any, module: nn.Module, dropout: float) -> Any:
    """Freeze a module, and give its layers adapters that change results."""
    layers = ["qkv", "out", "up", "down"]
    config = peft.LoraConfig(
        r=2, target_modules=layers, lora_dropout=dropout, init_lora_weights=False
    )
    return peft.get_peft_model(module, config)


class Pipeline:
    """Two stages, each with graphs; each step has three microbatches in flight."""

    def __init__(self, stages: list[Any], backend: GraphBackend, *, is_graphed: bool) -> None:
        self.device, self.stages = backend.device, [stage.to(backend.device) for stage in stages]
        self.graphs = ChunkGraphs(self.stages, 3, backend=backend)
        self.is_eager = not is_graphed
        self.results: list[torch.Tensor] = []
        self.parameters = [p for stage in self.stages for p in stage.parameters()]
        self.optimizer = torch.optim.AdamW([p for p in self.parameters if p.requires_grad], 0.01)

    def train(self, reference: Callable[[], None] = lambda: None) -> None:
        """Run one step, with a reference pass while microbatches are in flight."""
        self.optimizer.zero_grad()
        first, second = self.graphs.callables
        with self.graphs.step(3, eager=self.is_eager):
            flying = []
            for _ in range(3):
                hidden = first(torch.randn(2, 5, WIDTH).to(self.device))
                received = hidden.detach().requires_grad_(hidden.requires_grad)
                flying.append((hidden, received, second(received)))
            reference()
            for hidden, received, output in flying:
                loss = output.square().mean()
                if loss.requires_grad:
                    loss.backward()
                if hidden.requires_grad:
                    hidden.backward(received.grad)
                self.results.append(loss.detach().clone())
        self.optimizer.step()
        self.results += [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def evaluate(self) -> None:
        """Keep what the stages compute now, in evaluation mode."""
        x = torch.randn(2, 5, WIDTH).to(self.device)
        calls = self.stages if self.is_eager else self.graphs.callables
        for stage, call in zip(self.stages, calls, strict=True):
            stage.eval()
            x = call(x)
            stage.train()
        self.results.append(x)


def pipeline_of(
    peft: Any, backend: GraphBackend, *, is_graphed: bool, is_frozen: bool = False
) -> Pipeline:
    """Make a pipeline of a linear layer, and a block with two adapters before or after it."""
    torch.manual_seed(3)
    model = adapted(peft, Block(0.1), dropout=0.1)
    model.add_adapter("other", model.peft_config["default"])
    if is_frozen:
        model.set_adapter("default", inference_mode=True)
    stages = [nn.Linear(WIDTH, WIDTH), model]
    return Pipeline(stages[::-1] if is_frozen else stages, backend, is_graphed=is_graphed)


# By name, what a program does with a model, whether it is frozen, and what the next step says.
CHANGES: dict[str, tuple[Callable[[Any], object], bool, str]] = {
    "merge": (lambda m: m.merge_adapter(), False, r"merged_adapters was \[\] .* is \['default'\]"),
    "merge frozen": (lambda m: m.merge_adapter(), True, r"merged_adapters was \[\] "),
    "merge safely": (lambda m: m.merge_adapter(safe_merge=True), False, r"base_layer\.weight was"),
    "disable": (lambda m: m.base_model.disable_adapter_layers(), False, "requires_grad was True"),
    "disable frozen": (lambda m: m.base_model.disable_adapter_layers(), True, "_disable_adapters"),
    "switch": (lambda m: m.set_adapter("other"), False, "requires_grad was True"),
    "switch frozen": (lambda m: m.set_adapter("other", inference_mode=True), True, "active_adap"),
    "scale": (lambda m: m.model.up.set_scale("default", 3.0), False, r"up\.scaling was .* 12\.0"),
    "add": (lambda m: m.add_adapter("new", m.peft_config["default"]), False, "scaling was .*'new'"),
    "delete": (lambda m: m.delete_adapter("other"), False, "other was removed"),
    "unload": (lambda m: m.merge_and_unload(), False, "was replaced by another module"),
}


@pytest.mark.parametrize(("change", "is_frozen", "message"), CHANGES.values(), ids=CHANGES)
def test_a_change_that_lasts_is_refused_and_captured_again(
    peft: Any, backend: GraphBackend, change: Any, is_frozen: bool, message: str
) -> None:
    results = []
    for is_graphed in (False, True):
        pipeline = pipeline_of(peft, backend, is_graphed=is_graphed, is_frozen=is_frozen)
        for step in range(6):
            if step == 3:
                change(pipeline.stages[0 if is_frozen else 1])
                if is_graphed:
                    with pytest.raises(ReplayMismatchError, match=message):
                        pipeline.train()
                    pipeline.graphs.release()
            torch.manual_seed(step)
            pipeline.train()
            pipeline.evaluate()
        results.append(pipeline.results)
    assert all_equal(*results)
    assert pipeline.graphs.counters.replayed_steps == 4


def merged(model: Any, evaluate: Callable[[], None]) -> None:
    model.merge_adapter()
    evaluate()
    model.unmerge_adapter()


def disabled(model: Any, evaluate: Callable[[], None]) -> None:
    with model.disable_adapter():
        evaluate()


def switched(model: Any, evaluate: Callable[[], None]) -> None:
    model.set_adapter("other")
    evaluate()
    model.set_adapter("default")


def loaded(model: Any, evaluate: Callable[[], None]) -> None:
    state = {name: t * 0.5 for name, t in model.state_dict().items() if "lora" in name}
    model.load_state_dict(state, strict=False)
    evaluate()


# Eager training refuses to load values while they are in use.
@pytest.mark.parametrize(
    ("around", "in_step"),
    [(loaded, False), *product([merged, disabled, switched], [False, True])],
)
def test_what_is_undone_equals_eager_without_a_capture(
    peft: Any, backend: GraphBackend, around: Callable[..., None], in_step: bool
) -> None:
    results = []
    for is_graphed in (False, True):
        pipeline = pipeline_of(peft, backend, is_graphed=is_graphed)
        torch.manual_seed(5)
        for _ in range(4):
            reference = partial(around, pipeline.stages[1], pipeline.evaluate)
            if in_step:
                pipeline.train(reference)
            else:
                reference()
                pipeline.train()
        results.append(pipeline.results)
    assert all_equal(*results)
    assert pipeline.graphs.counters.replayed_steps == 3


class Adapted(nn.Module):
    """A layer with an adapter that is switched off by an attribute, as Megatron-Bridge's are."""

    def __init__(self) -> None:
        super().__init__()
        self.to_wrap, self.adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to_wrap.requires_grad_(False)
        self._adapter_enabled = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.to_wrap(x)
        return result + self.adapter(x) if self._adapter_enabled else result


def _switched_off(model: Any) -> Any:
    class Off(ExitStack):
        def __enter__(self) -> Any:
            model._adapter_enabled = False
            self.callback(setattr, model, "_adapter_enabled", True)
            return self

    return Off()


@pytest.mark.parametrize("kind", ["peft", "bridge"])
def test_reference_passes_with_disabled_adapters_have_graphs(
    request: pytest.FixtureRequest, backend: GraphBackend, kind: str
) -> None:
    """They run between training steps; base weights are copied in place meanwhile."""
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(3)
        model: Any = Adapted()
        if kind == "peft":
            model = adapted(request.getfixturevalue("peft"), Block(0.1), dropout=0.1)
        model.to(backend.device)
        graphs = ChunkGraphs(Chunk.from_module(model, "it"), 1, backend=backend)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
        values = []
        for step in range(4):
            x = torch.randn(2, 5, WIDTH).to(backend.device)
            off = model.disable_adapter() if kind == "peft" else _switched_off(model)
            with torch.no_grad(), off, graphs.step(2, forward_only=True, eager=not is_graphed):
                values += [graphs.callables[0](x).clone() for _ in range(2)]
            with torch.no_grad(), graphs.step(1, forward_only=True, eager=not is_graphed):
                values.append(graphs.callables[0](x).clone())
            with graphs.step(1, eager=not is_graphed):
                loss = graphs.callables[0](x).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values += [loss.detach().clone(), *(p.detach().clone() for p in model.parameters())]
            with torch.no_grad():
                for p in (p for p in model.parameters() if not p.requires_grad):
                    p.copy_(p * (1 + 0.1 * step))
        results.append(values)
    assert all_equal(*results)
    assert graphs.counters.fallbacks == {"forward only": 2, "capture warmup": 1}
    assert graphs.forward_only.counters.replayed_steps == 6
    if kind == "bridge":
        refused = pytest.raises(ReplayMismatchError, match="_adapter_enabled was True")
        with refused, _switched_off(model), graphs.step(1):
            pass
