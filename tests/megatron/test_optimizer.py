"""The step of Megatron's optimizer as one graph: equal to Megatron's own to the last bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import expert_cases
import pytest
import torch
from extended_config import config_from_mapping
from in_process import EXPERTS, Trained

from chunkgraph.graphs import RecorderBackend
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.optimizer import MegatronOptimizerStep
from chunkgraph.megatron.site import Site

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(120)]

COUNTS = (2, 1, 3, 2, 2, 1)


def parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain; releases before 0.17 chain only several."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


class Training:
    """A model with Megatron's optimizer and scheduler, eager or in graphs.

    Args:
        graphed: Whether chunks and optimizer are captured.
        options: Of Megatron's `OptimizerConfig`.
        dtype: Of the parameters.
        ddp: Options of DDP.
        moe: Settings of experts.
    """

    def __init__(
        self,
        device: torch.device,
        make_config: Callable[..., dict[str, Any]],
        *,
        graphed: bool,
        options: dict[str, Any],
        dtype: str = "bfloat16",
        ddp: dict[str, Any] | None = None,
        moe: dict[str, Any] | None = None,
    ) -> None:
        is_distributed = options.get("use_distributed_optimizer", False)
        config = config_from_mapping(
            make_config(
                model={
                    "params_dtype": dtype,
                    "untie_embeddings_and_output_weights": False,
                    "swiglu": True,
                },
                train={"use_distributed_optimizer": is_distributed},
                moe=moe or {},
            )
        )
        self.trained = Trained(device, config, {} if graphed else None, ddp_options=ddp or {})
        self.optimizer = self._new_optimizer(options, dtype)
        scheduler = import_megatron("megatron.core.optimizer_param_scheduler")
        self.scheduler = scheduler.OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-4,
            lr_warmup_steps=2,
            lr_decay_steps=20,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=20,
            wd_incr_style="constant",
        )
        self.captured: Any = None
        if graphed:
            self.captured = self.trained.graphs.capture_optimizer(self.optimizer)

    def _new_optimizer(self, options: dict[str, Any], dtype: str) -> Any:
        optimizers = import_megatron("megatron.core.optimizer")
        optimizer = optimizers.get_megatron_optimizer(
            optimizers.OptimizerConfig(
                **{
                    "optimizer": "adam",
                    "lr": 1e-2,
                    "min_lr": 1e-4,
                    "weight_decay": 0.1,
                    "bf16": dtype == "bfloat16",
                    "params_dtype": getattr(torch, dtype),
                    "clip_grad": 1.0,
                    "log_num_zeros_in_grad": True,
                    **options,
                }
            ),
            self.trained.chunks,
        )
        self.inner = [part.optimizer for part in parts_of(optimizer)]
        self.trained.chunks[0].config.grad_scale_func = optimizer.scale_loss
        return optimizer

    def step(self, step: int, *, spoil: Callable[[Any], None] = lambda _: None) -> list[Any]:
        """Train a step; return losses, norm, count of zeros, success and learning rate."""
        self.optimizer.zero_grad()
        losses = self.trained.step(step, COUNTS[step % len(COUNTS)])
        spoil(self.trained.chunks[0])
        rate = self.optimizer.param_groups[0]["lr"]
        success, norm, num_zeros = self.optimizer.step()
        if success:
            self.scheduler.step(increment=1)
        numbers = [None if value is None else float(value) for value in (norm, num_zeros)]
        return [*losses, *numbers, success, rate]

    def steps(self, first: int, last: int, **options: Any) -> list[list[Any]]:
        return [self.step(step, **options) for step in range(first, last)]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the inner optimizers."""
        groups = [group for inner in self.inner for group in inner.param_groups]
        return [p for group in groups for p in group["params"]]

    def tensors(self) -> list[torch.Tensor]:
        """Return parameters of the model and of the optimizer, and its state."""
        tensors = [p for chunk in self.trained.chunks for p in chunk.parameters()]
        for inner in self.inner:
            for group in inner.param_groups:
                for p in group["params"]:
                    tensors.append(p)
                    tensors += [t for _, t in sorted(inner.state[p].items())]
        return [t.detach().clone() for t in tensors]


def is_equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(mine, theirs, strict=True)
    )


CASES: dict[str, dict[str, Any]] = {
    "bf16": {"options": {}},
    "bf16_distributed": {"options": {"use_distributed_optimizer": True}},
    "bf16_gradients": {"options": {}, "ddp": {"grad_reduce_in_fp32": False}},
    "bf16_gradients_distributed": {
        "options": {"use_distributed_optimizer": True},
        "ddp": {"grad_reduce_in_fp32": False},
    },
    "rarely_clipped": {"options": {"clip_grad": 1.8}},
    "not_clipped": {"options": {"clip_grad": 0.0, "log_num_zeros_in_grad": False}},
    "fp32": {"options": {}, "dtype": "float32"},
    "sgd": {"options": {"optimizer": "sgd", "sgd_momentum": 0.9}},
    "experts": {"options": {}, "moe": EXPERTS},
    "experts_distributed": {"options": {"use_distributed_optimizer": True}, "moe": EXPERTS},
    "dropless": {"options": {}, "moe": expert_cases.EXPERTS},
}


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_eager_ones(one_rank: Any, make_config: Any, name: str) -> None:
    case = CASES[name]
    eager = Training(one_rank, make_config, graphed=False, **case)
    expected = eager.steps(0, 8)
    graphed = Training(one_rank, make_config, graphed=True, **case)
    assert graphed.captured.why_eager == ""
    assert graphed.steps(0, 8) == expected
    assert is_equal(graphed.tensors(), eager.tensors())
    assert graphed.captured.gradients.num_captures == 1
    assert graphed.captured.gradients.num_replays == 7
    norms = [values[-4] for values in expected]
    assert name == "not_clipped" or len(set(norms)) == len(norms)


def both(
    one_rank: Any, make_config: Any, first: int, last: int, **case: Any
) -> tuple[Training, Training, list[list[Any]], list[list[Any]]]:
    """Train the same steps eagerly and in graphs; return both, and their results."""
    options = {key: case.pop(key) for key in ("spoil", "before") if key in case}
    trained, results = [], []
    for graphed in (False, True):
        training = Training(one_rank, make_config, graphed=graphed, **case)
        rows = []
        for step in range(first, last):
            options.get("before", lambda *_: None)(step, training)
            spoil = options.get("spoil", lambda *_: None)
            rows.append(training.step(step, spoil=lambda c, s=step, f=spoil: f(s, c)))
        trained.append(training)
        results.append(rows)
    return (*trained, *results)


class FusedAdam(torch.optim.Optimizer):
    """Adam of Transformer Engine, with its one kernel for each group."""

    capturable = master_weights = False

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)
        self.multi_tensor_adam = self._kernel
        self.num_kernels = 0

    def _kernel(self, tensors: Any, group: dict[str, Any], step: int) -> None:
        self.num_kernels += 1
        betas, eps, lr, wd = (group[name] for name in ("betas", "eps", "lr", "weight_decay"))
        for p, grad, m, v in tensors:
            m.lerp_(grad, 1 - betas[0])
            v.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
            denom = (v / (1 - betas[1] ** step)).sqrt_().add_(eps)
            p.add_((m / (1 - betas[0] ** step)).div_(denom).add_(p, alpha=wd), alpha=-lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            tensors = []
            for p in group["params"]:
                if not self.state[p]:
                    names = ("exp_avg", "exp_avg_sq")
                    self.state[p] = {name: torch.zeros_like(p) for name in names}
                tensors.append((p.data, p.grad.data, *self.state[p].values()))
            self.multi_tensor_adam(tensors, dict(group), group["step"])


@pytest.mark.parametrize("is_distributed", [False, True])
def test_a_step_that_begins_early_equals_an_eager_one(
    one_rank: Any, make_config: Any, monkeypatch: pytest.MonkeyPatch, is_distributed: bool
) -> None:
    optimizers = import_megatron("megatron.core.optimizer")
    monkeypatch.setattr(optimizers, "Adam", FusedAdam)
    monkeypatch.setattr(optimizers.distrib_optimizer, "Adam", FusedAdam, raising=False)
    monkeypatch.setattr(optimizers, "USING_PYTORCH_OPTIMIZER", False)
    case = {"options": {"use_distributed_optimizer": is_distributed}}
    eager = Training(one_rank, make_config, graphed=False, **case)
    expected = eager.steps(0, 6)
    graphed = Training(one_rank, make_config, graphed=True, **case)
    (inner,), step = graphed.inner, graphed.captured

    def state() -> list[Any]:
        return [*graphed.tensors(), *(torch.tensor(g.get("step", 0)) for g in inner.param_groups)]

    def begin(_: Any) -> None:
        before, num_kernels = state(), inner.num_kernels
        step.begin()
        assert is_equal(state(), before)
        assert inner.num_kernels == num_kernels

    assert graphed.steps(0, 6, spoil=begin) == expected
    assert is_equal(graphed.tensors(), eager.tensors())
    assert [g["step"] for g in inner.param_groups] == [
        g["step"] for g in eager.inner[0].param_groups
    ]
    assert step.gradients.num_replays == 5
    before = state()
    graphed.trained.step(6, 2)
    step.begin()
    step.withdraw()  # a check has failed
    assert is_equal(state(), before)


SCALED = {"bf16": False, "fp16": True, "initial_loss_scale": 2.0**10, "loss_scale_window": 3}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("is_distributed", [False, True])
def test_a_loss_scale_keeps_its_steps_with_overflows(
    one_rank: Any, make_config: Any, is_distributed: bool
) -> None:
    def overflow(step: int, chunk: Any) -> None:
        if step in (2, 5, 6):
            next(chunk.parameters()).main_grad.view(-1)[3] = float("inf")

    options = {**SCALED, "hysteresis": 1, "use_distributed_optimizer": is_distributed}
    case = {"options": options, "dtype": "float32", "spoil": overflow}
    eager, graphed, expected, found = both(one_rank, make_config, 0, 10, **case)
    # A step that overflows has neither norm nor count, and moves no rate.
    assert [row[-2] for row in expected] == [step not in (2, 5, 6) for step in range(10)]
    assert found == expected
    assert is_equal(graphed.tensors(), eager.tensors())
    scales = [float(t.optimizer.get_loss_scale()) for t in (eager, graphed)]
    assert scales[0] == scales[1] != 2.0**10
    assert graphed.captured.gradients.num_captures == 1
    assert graphed.captured.gradients.num_replays >= 5


def test_a_changed_weight_decay_needs_no_new_capture(one_rank: Any, make_config: Any) -> None:
    def change(step: int, training: Training) -> None:
        if step == 4:
            training.scheduler.start_wd = training.scheduler.end_wd = 0.3

    case = {"options": {}, "before": change}
    eager, graphed, expected, found = both(one_rank, make_config, 0, 9, **case)
    assert found == expected
    assert is_equal(graphed.tensors(), eager.tensors())
    assert graphed.captured.gradients.num_captures == 1


def checkpoint_of(training: Training) -> Any:
    """Return what Megatron saves; of a distributed optimizer without its files' format."""
    shards = [(p.detach(), training.inner[0].state[p]) for p in training.parameters()]
    return copy.deepcopy(
        (
            [chunk.state_dict() for chunk in training.trained.chunks],
            training.optimizer.state_dict(),
            shards,
            training.scheduler.state_dict(),
        )
    )


def load(training: Training, checkpoint: Any) -> None:
    models, optimizer, shards, scheduler = copy.deepcopy(checkpoint)
    for chunk, state in zip(training.trained.chunks, models, strict=True):
        chunk.load_state_dict(state)
    training.optimizer.load_state_dict(optimizer)
    for p, (value, state) in zip(training.parameters(), shards, strict=True):
        p.detach().copy_(value)
        training.inner[0].state[p] = state
    training.scheduler.num_steps = 0
    training.scheduler.load_state_dict(scheduler)


def file_bytes(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


def numbers_of(state: Any) -> Any:
    """Return a state's plain values and the types of all."""
    if isinstance(state, dict):
        return {key: numbers_of(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [numbers_of(value) for value in state]
    return type(state), None if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("name", ["bf16", "bf16_distributed", "dropless"])
def test_checkpoints_are_those_of_eager_training_and_resume_both_ways(
    one_rank: Any, make_config: Any, name: str
) -> None:
    case = CASES[name]
    eager, graphed, *_ = both(one_rank, make_config, 0, 4, **case)
    sizes = [file_bytes(training.trained.chunks[0].state_dict()) for training in (eager, graphed)]
    assert sizes[1] < 1.02 * sizes[0]  # with experts that share a storage
    saved = [checkpoint_of(training) for training in (eager, graphed)]
    assert numbers_of(saved[0][1]) == numbers_of(saved[1][1])
    expected = eager.steps(4, 8)
    assert graphed.steps(4, 8) == expected  # saving changed nothing
    load(graphed, saved[0])  # in the middle of a run, with graphs
    assert graphed.steps(4, 8) == expected
    assert graphed.captured.gradients.num_captures >= 1
    for resumes_graphed, checkpoint in ((False, saved[1]), (True, saved[0])):
        resumed = Training(one_rank, make_config, graphed=resumes_graphed, **case)
        load(resumed, checkpoint)
        assert resumed.steps(4, 8) == expected
        assert is_equal(resumed.tensors(), eager.tensors())


def new_step(training: Training) -> MegatronOptimizerStep:
    site = Site(chunks=training.trained.chunks)
    return MegatronOptimizerStep(training.optimizer, site, RecorderBackend())


def test_what_no_graph_can_hold_runs_eagerly_and_says_why(one_rank: Any, make_config: Any) -> None:
    def why(**changes: Any) -> str:
        training = Training(one_rank, make_config, graphed=False, options={})
        for part in parts_of(training.optimizer):
            for name, value in changes.items():
                setattr(part.config, name, value)
        step = new_step(training)
        assert "step" not in vars(training.optimizer)
        return step.why_eager

    assert why(optimizer_cpu_offload=True).startswith("optimizer_cpu_offload")
    assert why(reuse_grad_buf_for_mxfp8_param_ag=True).startswith("reuse_grad_buf")
    assert why(grad_norm_skip_threshold=2.0).startswith("grad_norm_skip_threshold")
    training = Training(one_rank, make_config, graphed=False, options={})
    for parameter in training.trained.chunks[0].parameters():
        del parameter.main_grad
    assert new_step(training).why_eager == "gradients are not in the buffers of DDP"


def test_detaching_restores_megatrons_step(one_rank: Any, make_config: Any) -> None:
    graphed = Training(one_rank, make_config, graphed=True, options={})
    expected = Training(one_rank, make_config, graphed=False, options={}).steps(0, 5)
    assert graphed.steps(0, 3) == expected[:3]
    graphed.trained.graphs.detach()
    assert "step" not in vars(graphed.optimizer)
    graphed.trained.train = import_megatron(
        "megatron.core.pipeline_parallel"
    ).get_forward_backward_func()
    assert graphed.steps(3, 5) == expected[3:]
