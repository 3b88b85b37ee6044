"""Capturing whole chunks: contents of the graph, refusals, and detaching."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_copies import copied_by_host
from in_process import attach
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from chunkgraph.engine import replay as replayer
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.model_part import SCOPE_RULES, ChosenScope, choose_scope
from chunkgraph.megatron.refusals import facts_of_model
from chunkgraph.settings import Config
from chunkgraph.settings.rule import refusals

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

MakeConfig = Callable[..., dict[str, Any]]
LENGTH, BATCH = 16, 2


@pytest.fixture
def middle_stage(chunks: list[nn.Module], config: Config) -> Any:
    """Make a GPTModel of a stage that is neither first nor last."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModel(
        config=chunks[0].config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=config.model.vocab_size,
        max_sequence_length=LENGTH,
        pre_process=False,
        post_process=False,
        position_embedding_type="rope",
    ).train()


def _model(chunk: nn.Module) -> Any:
    return chunk.module if isinstance(getattr(chunk, "module", None), nn.Module) else chunk


def _batch(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 264, (BATCH, LENGTH), generator=generator)
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(LENGTH).expand(BATCH, LENGTH).contiguous(),
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
        "labels": tokens.roll(-1, dims=1).contiguous(),
    }


def _runs(
    graphs: Any, call: Callable[[int], torch.Tensor], num_steps: int = 3
) -> list[torch.Tensor]:
    """Return outputs of steps of one microbatch, each with the same random numbers."""

    def schedule(**kwargs: Any) -> torch.Tensor:
        torch.manual_seed(5)
        output = call(kwargs["num_microbatches"])
        output.sum().backward()
        return output.detach().clone()

    wrapped = graphs.wrap_forward_backward(schedule)
    return [wrapped(num_microbatches=1) for _ in range(num_steps)]


@pytest.fixture
def modes_may_be_active(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a mode of a test count the operators around replays."""
    monkeypatch.setattr(replayer, "refuse_contexts", lambda *_: None)


class _Operators(TorchDispatchMode):
    """Counts operators that run eagerly; it does not see those of a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if str(func) == "aten._foreach_copy_.default":
            self.seen["copied tensors"] += len(args[0])
        elif str(func) == "aten.copy_.default":
            self.seen["copied tensors"] += 1
        else:
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("modes_may_be_active")
def test_a_replayed_chunk_runs_nothing_but_the_copies_of_its_inputs(
    chunks: list[nn.Module],
) -> None:
    """It copies tokens, labels and mask, but no unread ids, and runs neither embedding nor loss."""
    model, batch = _model(chunks[0]), _batch()
    graphs = attach(chunks)
    assert graphs.scope == ChosenScope("chunk")
    operators = _Operators()

    def call(_: int) -> torch.Tensor:
        with operators:
            operators.seen.clear()
            return chunks[0](**batch)

    with copied_by_host():
        first, *others = _runs(graphs, call)
    assert graphs.counters.replays == 2
    assert all(torch.equal(output, first) for output in others)
    assert first.shape == (BATCH, LENGTH)
    # The caller may keep losses.
    assert operators.seen == {"copied tensors": 3, "aten.clone.default": 1}
    assert "forward" in model.__dict__
    assert "forward" not in model.decoder.__dict__
    graphs.detach()
    assert "forward" not in model.__dict__


@pytest.mark.usefixtures("modes_may_be_active")
def test_a_middle_stage_reads_the_received_tensor_alone(middle_stage: Any) -> None:
    """A replay copies the mask, and a hidden state that was not received in place."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(LENGTH, BATCH, 32, generator=generator)
    batch, operators = _batch(), _Operators()
    graphs = attach(middle_stage, scope="chunk")
    received: list[torch.Tensor] = []

    def call(_: int, into: torch.Tensor | None = None) -> torch.Tensor:
        tensor = values.clone().requires_grad_() if into is None else into
        received.append(tensor)
        middle_stage.set_input_tensor(tensor)
        with operators:
            operators.seen.clear()
            output = middle_stage(**batch)
        assert middle_stage.decoder.input_tensor is tensor
        return output

    def call_in_place(num_microbatches: int) -> torch.Tensor:
        memory = graphs.engine.reserve_input(0)
        assert memory is not None
        with torch.no_grad():
            memory.copy_(values)
        return call(num_microbatches, memory)

    with copied_by_host():
        first, second = _runs(graphs, call, num_steps=2)
        assert operators.seen["copied tensors"] == 2
        (third,) = _runs(graphs, call_in_place, num_steps=1)
        assert operators.seen["copied tensors"] == 1  # the mask
    assert graphs.counters.replays == 2
    assert torch.equal(second, first)
    assert torch.equal(third, first)
    assert received[0].grad is not None
    assert all(torch.equal(r.grad, received[0].grad) for r in received)


def test_a_subclass_gets_every_argument(middle_stage: Any) -> None:
    """A user's model may read arguments that Megatron's ignores."""
    parent = type(middle_stage)

    class Looks(parent):  # type: ignore[misc,valid-type]
        def forward(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(input_ids, *args, **kwargs) * input_ids.sum()

    middle_stage.__class__ = Looks
    graphs = attach(middle_stage, scope="chunk")
    hidden = torch.randn(LENGTH, BATCH, 32, generator=torch.Generator().manual_seed(2))

    def call(_: int) -> torch.Tensor:
        middle_stage.set_input_tensor(hidden.clone().requires_grad_())
        return middle_stage(**_batch())

    first, second = _runs(graphs, call, num_steps=2)
    assert torch.equal(first, second)
    middle_stage.set_input_tensor(hidden)
    with torch.no_grad():
        middle_stage.eval()
        plain = parent.forward(middle_stage, **_batch())
    assert not torch.equal(plain, middle_stage(**_batch()))


def test_python_code_as_an_argument_is_refused(chunks: list[nn.Module]) -> None:
    attach(chunks, scope="chunk")
    with pytest.raises(ConfigError, match=r"pipeline stage 0.*output_processor"):
        _model(chunks[0]).forward(**_batch(), output_processor=print)


@pytest.mark.parametrize(
    ("settings", "message", "flag"),
    [
        (
            {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
            "cross_entropy_fusion_impl='te'",
            "--cross-entropy-fusion-impl te",
        ),
        (
            {"defer_embedding_wgrad_compute": True},
            "defer_embedding_wgrad_compute=True",
            "--defer-embedding-wgrad-compute",
        ),
        ({"mtp_detach_heads": True}, "mtp_detach_heads=True", "--mtp-detach-heads"),
    ],
)
def test_settings_of_output_layer_and_loss_keep_the_block_and_are_refused_for_chunks(
    chunks: list[nn.Module], settings: dict[str, Any], message: str, flag: str
) -> None:
    vars(chunks[0].config).update(settings)
    with pytest.raises(ConfigError, match=rf"scope='chunk' with {message}"):
        attach(chunks, scope="chunk")
    attach(chunks, scope="block").detach()
    graphs = attach(chunks)
    assert graphs.scope == ChosenScope("block", flag)
    assert "forward" not in _model(chunks[0]).__dict__


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_predicting_layers_are_captured_where_their_state_can_be(
    chunks: list[nn.Module], is_packed: bool, recipe: str | None
) -> None:
    config = chunks[0].config
    vars(config).update(mtp_num_layers=1, fp8="hybrid" if recipe else None, fp8_recipe=recipe)
    facts = facts_of_model(config, {"packed": is_packed, "scope": "chunk"})
    chosen = choose_scope("auto", facts, chunks, agree=None)
    expected = [
        *(["--fp8-recipe delayed with --mtp-num-layers"] if recipe else []),
        *(["--mtp-num-layers with packed sequences"] if is_packed else []),
    ]
    assert chosen == ChosenScope("block" if expected else "chunk", ", ".join(expected))
    texts = refusals(SCOPE_RULES, facts)
    assert len(texts) == len(expected)
    assert all("mtp_num_layers" in text for text in texts)


def test_all_ranks_capture_the_same(chunks: list[nn.Module]) -> None:
    """A session runs the collectives of the captured parts."""
    config = chunks[0].config
    facts = facts_of_model(config)
    assert choose_scope("auto", facts, chunks, agree=lambda _: [1]) == (
        ChosenScope("block", "the model on another rank")
    )
    values: list[int] = []
    chunks[0].config.defer_embedding_wgrad_compute = True
    choose_scope("auto", facts, chunks, agree=lambda x: values.extend(x) or [1])
    assert values == [1]


def test_a_forward_or_hook_of_the_users_is_left_alone(chunks: list[nn.Module]) -> None:
    """Python around the block still runs; the work of Megatron and its layers is captured."""
    model, batch, seen = _model(chunks[0]), _batch(), []
    hook = model.output_layer.register_forward_hook(lambda *_: seen.append(1))
    graphs = attach(chunks)
    assert graphs.scope == ChosenScope("block", "hooks on output_layer")
    first, *others = _runs(graphs, lambda _: chunks[0](**batch))
    assert graphs.counters.replays == 2
    assert len(seen) == 3
    assert all(torch.equal(output, first) for output in others)
    graphs.detach()
    hook.remove()
    parent = type(model)
    name = parent.__name__

    class Looks(parent):  # type: ignore[misc,valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(2)
            return super().forward(*args, **kwargs)

    model.__class__ = Looks
    graphs = attach(chunks)
    assert graphs.scope == ChosenScope("block", "Looks, which overrides forward")
    _runs(graphs, lambda _: chunks[0](**batch))
    assert seen == [1, 1, 1, 2, 2, 2]
    graphs.detach()
    model.__class__ = parent
    model.compute_language_model_loss = model.compute_language_model_loss
    graphs = attach(chunks)
    graphs.detach()
    assert graphs.scope.why_block == f"{name}, which overrides compute_language_model_loss"


def test_a_model_unlike_gpt_is_not_captured_whole(chunks: list[nn.Module]) -> None:
    class Other(nn.Module):
        def __init__(self, decoder: nn.Module, config: Any) -> None:
            super().__init__()
            self.encoder, self.config = decoder, config

    other = Other(_model(chunks[0]).decoder, chunks[0].config)
    with pytest.raises(ConfigError, match=r"Other is not built like GPTModel.*scope='auto'"):
        attach(other, scope="chunk")
    attach(other, scope="block").detach()
    graphs = attach(other)
    assert graphs.scope == ChosenScope("block", "Other, which is not built like GPTModel")
    graphs.detach()
    with pytest.raises(ConfigError, match="'whole'"):
        attach(chunks, scope="whole")  # type: ignore[arg-type]
