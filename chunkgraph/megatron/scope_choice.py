"""Resolve scope ``auto``: the whole chunk if it can be captured, else the block and the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from chunkgraph.megatron.captured_part import CapturedScope, Scope, find_block, innermost, lacks
from chunkgraph.settings.rule import Facts, Rule
from chunkgraph.settings.words import FLAGS

__all__ = ["SCOPE_RULES", "ChosenScope", "choose_scope"]


@dataclass(frozen=True)
class ChosenScope:
    """The captured scope, and why it is not the whole chunk.

    Attributes:
        scope: ``block`` or ``chunk``.
        why_block: Why ``auto`` resolved to ``block``; "" for ``chunk`` or a requested scope.
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
    """Resolve ``auto``: the whole chunk if there is no obstacle on any rank, else the block.

    Capture sessions run the collectives of the captured part, so all ranks use the same scope.

    Args:
        scope: The requested scope.
        facts: Facts of the model.
        model_chunks: The model chunks of this rank.
        agree: Element-wise maximum over all ranks, which call this together; None for one rank.
    """
    if scope != "auto":
        return ChosenScope(scope)
    flags = facts.within(FLAGS)
    obstacles = [rule.subject(flags) for rule in _OBSTACLES if rule.broken(facts)]
    if not obstacles:
        obstacles = [why for chunk in model_chunks if (why := _obstacle_in_model(chunk))][:1]
    is_block = bool(obstacles)
    if agree is not None:
        (answer,) = agree([int(is_block)])
        is_block = bool(answer)
    if not is_block:
        return ChosenScope("chunk")
    return ChosenScope("block", ", ".join(obstacles) or "the model on another rank")


_OBSTACLES = (
    Rule(
        "cross_entropy_fusion_impl: its backward reads the loss gradient on the host",
        lambda f: f.cross_entropy_loss_fusion and f.cross_entropy_fusion_impl == "te",
    ),
    Rule(
        "fp8_recipe mtp_num_layers=: every prediction layer updates the scales in the middle of "
        "the backward, but a graph updates them once, at its end",
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
"""The same obstacles, where a user requests the whole chunk."""

_METHODS = (
    "forward",
    "_preprocess",
    "_postprocess",
    "compute_language_model_loss",
    "compute_output_layer_and_language_model_loss",
)
"""Methods of a model that run around the block."""


def _obstacle_in_model(model_chunk: nn.Module) -> str:
    """Return why ``auto`` captures only the block of this model, or "".

    A model that overrides Megatron's methods may run arbitrary code around its block, and a replay
    does not run hooks.
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
            return f"{name}, which overrides {method}"
    inner = set(block.modules())
    for path, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if module not in inner and not all(map(_is_library_hook, hooks)):
            return f"hooks on {path or name}"
    return ""


def _is_library_hook(hook: Callable[..., Any]) -> bool:
    """Return whether a library defines the hook; chunk graphs handle DDP's parameter gathers."""
    return (getattr(hook, "__module__", None) or "").startswith(
        ("megatron.core.", "transformer_engine.")
    )
