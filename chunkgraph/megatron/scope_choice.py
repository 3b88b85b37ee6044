"""Which scope ``auto`` is: the whole chunk wherever it can be captured, and why where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from chunkgraph.megatron.captured_part import CapturedScope, Scope, find_block, innermost, lacks
from chunkgraph.settings.rule import Facts, Rule
from chunkgraph.settings.words import FLAGS

__all__ = [
    "SCOPE_RULES",
    "ChosenScope",
    "choose_scope",
]


@dataclass(frozen=True)
class ChosenScope:
    """What is captured, and why it is no more.

    Attributes:
        scope: see the module's table.
        why_block: what keeps ``auto`` from the whole chunk; "" where nothing does, or a scope was
            asked for.
    """

    scope: CapturedScope
    why_block: str = ""


def choose_scope(
    scope: Scope,
    facts: Facts,
    model_chunks: Sequence[nn.Module],
    *,
    agree: Callable[[Sequence[int]], list[int]] | None,
) -> ChosenScope:
    """Settle ``auto``: the whole chunk where nothing stands against it on any rank.

    Capture sessions run collectives of what is captured, so that all ranks take the same.

    Args:
        scope: the requested scope.
        facts: of the model.
        model_chunks: of this rank.
        agree: element-wise maximum over all ranks, which call this together; None: there is one.
    """
    if scope != "auto":
        return ChosenScope(scope)
    flags = facts.within(FLAGS)
    found = [rule.subject(flags) for rule in _OBSTACLES if rule.broken(facts)]
    if not found:
        found = [why for chunk in model_chunks if (why := _obstacle_in_model(chunk))][:1]
    is_block = bool(found)
    if agree is not None:
        (answer,) = agree([int(is_block)])
        is_block = bool(answer)
    if not is_block:
        return ChosenScope("chunk")
    return ChosenScope("block", ", ".join(found) or "the model on another rank")


_OBSTACLES = (
    Rule(
        "cross_entropy_fusion_impl: its backward reads the loss gradient on the host",
        lambda f: f.cross_entropy_loss_fusion and f.cross_entropy_fusion_impl == "te",
    ),
    Rule(
        "fp8_recipe mtp_num_layers=: every predicting layer updates the scales once more in the "
        "middle of the backward, but a graph does it once, at the end",
        lambda f: f.fp8_recipe == "delayed" and f.mtp_num_layers,
    ),
    Rule("defer_embedding_wgrad_compute: its queue is Python state that a replay does not advance"),
    Rule("mtp_num_layers= packed: Megatron then reads the offsets on the host"),
)
"""Settings with which only the block can be captured."""


def _for_chunks(rule: Rule) -> Rule:
    return replace(
        rule,
        text=f"scope {rule.text}; leave it out, or use {{scope=block}}",
        when=lambda f: f.scope == "chunk" and rule.broken(f),
    )


SCOPE_RULES = tuple(map(_for_chunks, _OBSTACLES))
"""Those obstacles where a user asks for the whole chunk."""

_METHODS = (
    "forward",
    "_preprocess",
    "_postprocess",
    "compute_language_model_loss",
    "compute_output_layer_and_language_model_loss",
)
"""What runs around the block."""


def _obstacle_in_model(model_chunk: nn.Module) -> str:
    """Why ``auto`` leaves the model around the block alone, or "".

    Of Megatron's own methods the code was read; others may do anything. Hooks are Python, which a
    replay does not run.
    """
    model: Any = innermost(model_chunk)
    name = type(model).__name__
    block = find_block(model_chunk, name)
    if lacks(model, block):
        return f"{name}, which is not built like GPTModel"
    libraries = ("megatron.core.", "torch.")
    others = [vars(c) for c in type(model).__mro__ if not c.__module__.startswith(libraries)]
    for method in _METHODS:
        if any(method in names for names in (vars(model), *others)):
            return f"{name}, which has a {method} of its own"
    inner = set(block.modules())
    for path, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if module not in inner and not all(map(_is_librarys, hooks)):
            return f"hooks on {path or name}"
    return ""


def _is_librarys(hook: Callable[..., Any]) -> bool:
    """Whether a hook is of a library whose hooks chunk graphs follow (DDP's parameter gathers)."""
    return (getattr(hook, "__module__", None) or "").startswith(
        ("megatron.core.", "transformer_engine.")
    )
