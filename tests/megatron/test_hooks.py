"""Hooks on modules inside a captured part, which a replay does not run, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.errors import CaptureError, ConfigError
from chunkgraph.megatron.attachment import attach

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]


def keep(*_: Any) -> None:
    pass


def _norm(chunk: nn.Module) -> nn.Module:
    return next(m for name, m in chunk.named_modules() if name.endswith("final_layernorm"))


def test_a_users_hook_is_refused_by_the_capture(chunks: list[Any]) -> None:
    graphs = attach(chunks, scope="block")
    _norm(chunks[0]).register_forward_hook(keep)
    block = next(m for name, m in chunks[0].named_modules() if name.endswith("decoder"))

    def schedule(**_: Any) -> None:
        hidden = torch.ones(16, 2, 32, requires_grad=True)
        mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
        block(hidden_states=hidden, attention_mask=mask).sum().backward()

    wrapped = graphs.wrap_forward_backward(schedule)
    wrapped(num_microbatches=1)
    with pytest.raises(CaptureError, match=r"hook on final_layernorm .*keep"):
        wrapped(num_microbatches=1)


@pytest.mark.parametrize(
    "module", ["megatron.core.transformer.moe.router_trace", "megatron.training.activation_logging"]
)
def test_traces_of_megatron_are_refused(
    chunks: list[Any], monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setattr(keep, "__module__", module)
    handle = _norm(chunks[0]).register_forward_hook(keep)
    with pytest.raises(ConfigError, match=f"final_layernorm has a hook of {module}"):
        attach(chunks)
    handle.remove()
    attach(chunks).detach()
