"""torch's optimizers in one graph with norm and clipping: equal to eager steps to the last bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.errors import CaptureError, ConfigError
from chunkgraph.graphs import GraphBackend
from chunkgraph.optimizer import CapturedOptimizer

NUM_STEPS = 8


class Model(nn.Module):
    """A captured body, and an embedding and a head that autograd trains eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)


def new_model(backend: GraphBackend) -> Model:
    torch.manual_seed(3)
    return Model().to(backend.device)


def adamw(parameters: Any, lr: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1, fused=True)


def adam(parameters: Any, lr: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, weight_decay=0.1, amsgrad=True, fused=True)


def sgd(parameters: Any, lr: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True, fused=True)


def groups_of(model: Model) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed}, {"params": []}, {"params": others, "weight_decay": 0.0}]


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)


def warmup(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 3)


def train(
    model: Model,
    body: Callable[[torch.Tensor], torch.Tensor],
    step: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    *,
    graphs: ChunkGraphs | None = None,
    set_to_none: bool = True,
    num_steps: int = NUM_STEPS,
    before_step: Callable[[int, torch.optim.Optimizer], None] = lambda _i, _o: None,
) -> list[torch.Tensor]:
    """Train steps of 1 to 3 microbatches; return losses and norms."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(5)
    values = []
    for i in range(num_steps):
        before_step(i, optimizer)
        optimizer.zero_grad(set_to_none=set_to_none)
        count = 1 + i % 3
        tokens = torch.randint(6, (count, 5), generator=generator).to(device)

        def microbatches(tokens: torch.Tensor = tokens) -> None:
            for row in tokens:
                loss = model.head(body(model.embedding(row))).square().mean()
                loss.backward()
                values.append(loss.detach().clone())

        if graphs is None:
            microbatches()
        else:
            with graphs.step(count):
                microbatches()
        values.append(step().clone())
        scheduler.step()
    return values


def state_of(model: Model, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [*model.parameters()]
    for p in model.parameters():
        tensors += [v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in tensors]


def is_equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    pairs = zip(mine, theirs, strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def tensor_lr(backend: GraphBackend, lr: float) -> torch.Tensor:
    """Return the rate as eager training has it: in the type that kernels read."""
    dtype = torch.float64 if backend.device.type == "cpu" else torch.float32
    return torch.tensor(lr, dtype=dtype, device=backend.device)


def run_eagerly(
    backend: GraphBackend, new_optimizer: Any, new_scheduler: Any, max_norm: float, **options: Any
) -> list[torch.Tensor]:
    model = new_model(backend)
    optimizer = new_optimizer(groups_of(model), 1e-2)
    scheduler = new_scheduler(optimizer)

    def step() -> torch.Tensor:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:  # the same tensor for the kernels
            group["lr"] = tensor_lr(backend, float(group["lr"]))
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return norm

    values = train(model, model.body, step, optimizer, scheduler, **options)
    return values + state_of(model, optimizer)


def run_captured(
    backend: GraphBackend, new_optimizer: Any, new_scheduler: Any, max_norm: float, **options: Any
) -> tuple[list[torch.Tensor], CapturedOptimizer]:
    model = new_model(backend)
    optimizer = new_optimizer(groups_of(model), 1e-2)
    scheduler = new_scheduler(optimizer)
    graphs = ChunkGraphs(model.body, 1, backend=backend)
    captured = graphs.capture_optimizer(optimizer, max_norm=max_norm)
    (body,) = graphs.callables
    values = train(model, body, captured.step, optimizer, scheduler, graphs=graphs, **options)
    assert graphs.counters.replays > 0
    result = values + state_of(model, optimizer)
    graphs.release()
    return result, captured


@pytest.mark.parametrize("new_optimizer", [adamw, adam, sgd])
@pytest.mark.parametrize("new_scheduler", [cosine, warmup])
@pytest.mark.parametrize("max_norm", [0.05, 1e3])
def test_captured_steps_equal_eager_ones(
    backend: GraphBackend, new_optimizer: Any, new_scheduler: Any, max_norm: float
) -> None:
    eager = run_eagerly(backend, new_optimizer, new_scheduler, max_norm)
    values, captured = run_captured(backend, new_optimizer, new_scheduler, max_norm)
    assert is_equal(values, eager)
    assert captured.graph.num_captures >= 1
    assert captured.graph.num_replays >= 3  # gradients of eager layers may move at first


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_kept_or_dropped(backend: GraphBackend, set_to_none: bool) -> None:
    eager = run_eagerly(backend, adamw, cosine, 0.05, set_to_none=set_to_none)
    values, _ = run_captured(backend, adamw, cosine, 0.05, set_to_none=set_to_none)
    assert is_equal(values, eager)


def test_gradients_that_move_in_every_step_are_copied(backend: GraphBackend) -> None:
    kept = []

    def keep(_step: int, optimizer: torch.optim.Optimizer) -> None:
        """Keep the gradients of the head, so that the next ones lie elsewhere."""
        groups = optimizer.param_groups
        kept.append([p.grad for g in groups for p in g["params"] if p.shape[0] in (4, 6)])

    eager = run_eagerly(backend, adamw, cosine, 0.05, before_step=keep)
    values, captured = run_captured(backend, adamw, cosine, 0.05, before_step=keep)
    assert is_equal(values, eager)
    assert captured.graph.num_replays >= 3


def test_a_changed_weight_decay_captures_again(backend: GraphBackend) -> None:
    def change(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == 5:
            optimizer.param_groups[0]["weight_decay"] = 0.3

    eager = run_eagerly(backend, adamw, cosine, 0.05, before_step=change, num_steps=9)
    values, captured = run_captured(backend, adamw, cosine, 0.05, before_step=change, num_steps=9)
    assert is_equal(values, eager)
    assert captured.graph.num_captures == 2


def test_replaced_parameters_are_those_of_the_norm(backend: GraphBackend) -> None:
    def replace(step: int, optimizer: torch.optim.Optimizer) -> None:
        params = optimizer.param_groups[0]["params"]
        if step == 5:
            params[0] = nn.Parameter(params[0].detach() * 30)
            params.reverse()

    eager = run_eagerly(backend, adamw, cosine, 0.05, before_step=replace, num_steps=9)
    values, _ = run_captured(backend, adamw, cosine, 0.05, before_step=replace, num_steps=9)
    assert is_equal(values, eager)


def test_a_weight_decay_that_always_changes_stays_eager(backend: GraphBackend) -> None:
    def change(step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.1 + step / 100

    eager = run_eagerly(backend, adamw, cosine, 0.05, before_step=change)
    values, captured = run_captured(backend, adamw, cosine, 0.05, before_step=change)
    assert is_equal(values, eager)
    assert captured.graph.num_captures == 0


def small(backend: GraphBackend) -> tuple[nn.Linear, torch.optim.Optimizer, CapturedOptimizer]:
    torch.manual_seed(7)
    layer = nn.Linear(4, 4).to(backend.device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    return layer, optimizer, CapturedOptimizer(optimizer, backend, max_norm=1.0)


def run_small(layer: nn.Linear, step: Callable[[], Any], num_steps: int) -> None:
    for i in range(num_steps):
        layer.zero_grad(set_to_none=False)
        x = torch.full((2, 4), 0.1 * (i + 1), device=layer.weight.device)
        layer(x).square().sum().backward()
        step()


def test_a_checkpoint_holds_python_numbers_and_resumes(backend: GraphBackend) -> None:
    layer, optimizer, captured = small(backend)
    run_small(layer, captured.step, 4)
    assert captured.graph.num_replays > 0
    saved = copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
    assert type(saved[1]["param_groups"][0]["lr"]) is float
    assert saved[1]["param_groups"][0]["capturable"] is False
    run_small(layer, captured.step, 3)
    other, resumed, graphed = small(backend)
    run_small(other, graphed.step, 4)  # the load replaces the tensors that its graph reads
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    run_small(other, graphed.step, 3)
    assert graphed.graph.num_captures == 2
    pairs = zip(layer.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_norm_belongs_to_the_caller(backend: GraphBackend) -> None:
    layer, _, captured = small(backend)
    norms: list[torch.Tensor] = []
    run_small(layer, lambda: norms.append(captured.step()), 5)
    assert len({float(norm) for norm in norms}) == 5


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-2), "AdamW without fused=True or capturable=True"),
        (lambda p: torch.optim.SGD(p, lr=1e-2), "SGD without fused=True"),
        (lambda p: torch.optim.RMSprop(p, lr=1e-2), "torch's RMSprop is not supported"),
    ],
)
def test_other_optimizers_are_refused(backend: GraphBackend, optimizer: Any, message: str) -> None:
    layer = nn.Linear(4, 4).to(backend.device)
    with pytest.raises(ConfigError, match=message):
        CapturedOptimizer(optimizer(layer.parameters()), backend)


@pytest.mark.parametrize("is_global", [False, True])
def test_hooks_are_refused_before_a_step_except_the_profilers(
    backend: GraphBackend, is_global: bool
) -> None:
    layer, optimizer, captured = small(backend)
    register = register_optimizer_step_pre_hook if is_global else optimizer.register_step_pre_hook
    of_torch = register(torch.profiler._optimizer_post_hook)
    run_small(layer, captured.step, 3)
    weight, handle = layer.weight.detach().clone(), register(lambda *_: None)
    with pytest.raises(ConfigError, match=r"hook on the optimizer's step \(<function"):
        run_small(layer, captured.step, 1)
    with pytest.raises(ConfigError, match="hook on the optimizer's step"):
        CapturedOptimizer(optimizer, backend)
    handle.remove()
    of_torch.remove()
    assert captured.graph.num_replays == 2
    assert torch.equal(layer.weight, weight)


def test_graphs_are_not_copied(backend: GraphBackend) -> None:
    layer, _, captured = small(backend)
    run_small(layer, captured.step, 3)
    for one in (captured, ChunkGraphs(layer, 1, backend=backend)):
        with pytest.raises(TypeError, match=f"A {type(one).__name__} cannot be copied"):
            copy.deepcopy({"trainer": one})


def test_a_failed_capture_raises_or_stays_eager(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(norm: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        assert norm[0].sum().item() is not None
        return norm[0].sum()

    monkeypatch.setattr("chunkgraph.optimizer.captured.get_total_norm", read)
    layer, _, captured = small(backend)
    with pytest.raises(CaptureError):
        run_small(layer, captured.step, 3)
    layer = nn.Linear(4, 4).to(backend.device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    graphs = ChunkGraphs(layer, 1, backend=backend, options=CaptureOptions(on_failure="eager"))
    lenient = graphs.capture_optimizer(optimizer, max_norm=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_small(layer, lenient.step, 4)
    assert sum("runs eagerly on this rank" in str(w.message) for w in caught) == 1
    assert lenient.graph.num_replays == 0
    new = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones_like(layer.weight))
    new.grad = torch.ones_like(new)
    assert lenient.step() == 16
