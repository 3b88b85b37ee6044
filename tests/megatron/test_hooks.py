"""Hooks on modules inside a captured part are refused with their names and places."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.attachment import attach
from chunkgraph.megatron.captured_part import new_part
from chunkgraph.megatron.module_hooks import refuse_hooks

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

KEPT: list[Any] = []


def keep(_: nn.Module, _args: Any, output: Any) -> None:
    KEPT.append(output)


class _Watcher:
    def __call__(self, *_: Any) -> None:
        pass

    def watch(self, *_: Any) -> None:
        pass


def _norm(chunk: nn.Module) -> nn.Module:
    return next(m for name, m in chunk.named_modules() if name.endswith("final_layernorm"))


def test_a_hook_inside_the_block_is_refused_with_its_place(chunks: list[Any]) -> None:
    handle = _norm(chunks[0]).register_forward_hook(keep)
    with pytest.raises(ConfigError) as error:
        attach(chunks, scope="block")
    message = str(error.value)
    assert "rank 0, pipeline stage 0, chunk 0 has hooks" in message
    assert "forward hook of decoder.final_layernorm: " in message
    line = keep.__code__.co_firstlineno
    assert f".keep at {__file__}:{line}" in message
    handle.remove()
    attach(chunks, scope="block").detach()


def test_a_hook_around_the_captured_part_stays(chunks: list[Any]) -> None:
    """It runs outside of the graph, at every call."""
    block = next(m for name, m in chunks[0].named_modules() if name.endswith("decoder"))
    embedding = next(m for name, m in chunks[0].named_modules() if name.endswith("embedding"))
    block.register_forward_hook(keep)
    embedding.register_forward_hook(keep)
    attach(chunks, scope="block").detach()
    with pytest.raises(ConfigError, match="forward hook of embedding: "):
        attach(chunks, scope="chunk")


def test_a_hook_that_comes_after_attach_is_refused_at_the_capture(chunks: list[Any]) -> None:
    part = new_part("block", chunks[0], "rank 0, chunk 0")
    check = part.chunk().check_sample
    assert check is not None
    hidden = torch.zeros(16, 2, 32)
    check(hidden)
    _norm(chunks[0]).register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"forward pre-hook of decoder\.final_layernorm: "):
        check(hidden)


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        (lambda m: m.register_forward_hook(keep), "forward hook"),
        (lambda m: m.register_forward_pre_hook(functools.partial(keep, 1)), "forward pre-hook"),
        (lambda m: m.register_full_backward_hook(_Watcher()), "backward hook"),
        (lambda m: m.register_full_backward_pre_hook(_Watcher().watch), "backward pre-hook"),
        (lambda _: nn.modules.module.register_module_forward_hook(keep), "global forward hook"),
    ],
)
def test_every_kind_of_hook_is_named(register: Callable[..., Any], kind: str) -> None:
    module = nn.Linear(2, 2)
    handle = register(module)
    try:
        with pytest.raises(ConfigError, match=f"- {kind} of (out|all modules): .*test_hooks"):
            refuse_hooks({"out": module}, "rank 0")
    finally:
        handle.remove()
    refuse_hooks({"out": module}, "rank 0")


def test_hooks_of_weight_norms_and_parameter_gathers_stay() -> None:
    normed = nn.utils.spectral_norm(nn.Linear(2, 2))  # a hook of torch, which stays on the device

    def gather(*_: Any) -> None:
        pass

    gather.__module__ = "megatron.core.distributed.distributed_data_parallel"
    normed.register_forward_pre_hook(gather)
    refuse_hooks({"normed": normed}, "rank 0")
    gather.__module__ = "megatron.training.activation_logging"
    with pytest.raises(ConfigError, match=r"megatron\.training\.activation_logging"):
        refuse_hooks({"normed": normed}, "rank 0")
