"""Resolve scope ``auto``: the whole chunk if it can be captured, else the block and the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.captured_part import CapturedScope, Scope, find_block, innermost, lacks
from chunkgraph.megatron.core.fp8_recipe import fp8_recipe

__all__ = [
    "ChosenScope",
    "ScopeObstacle",
    "choose_scope",
    "refuse_for_scope",
    "scope_obstacles",
]


@dataclass(frozen=True)
class ChosenScope:
    """The captured scope, and why it is not the whole chunk.

    Attributes:
        scope: ``block`` or ``chunk``.
        why_block: Why ``auto`` resolved to ``block``; "" for ``chunk`` or a requested scope.
    """

    scope: CapturedScope
    why_block: str = ""


@dataclass(frozen=True)
class ScopeObstacle:
    """A setting with which only the block can be captured.

    Attributes:
        setting: The setting in Megatron's config.
        flag: The flag on the command line of a pretrain script.
        why: The consequence in a graph.
        is_met: Whether a config has the setting, with packed microbatches (True) or without.
    """

    setting: str
    flag: str
    why: str
    is_met: Callable[[Any, bool], bool]


def choose_scope(
    scope: Scope,
    config: Any,
    model_chunks: Sequence[nn.Module],
    *,
    is_packed: bool,
    agree: Callable[[Sequence[int]], list[int]] | None,
) -> ChosenScope:
    """Resolve ``auto``: the whole chunk if there is no obstacle on any rank, else the block.

    Capture sessions run the collectives of the captured part, so all ranks use the same scope.

    Args:
        scope: The requested scope.
        config: Megatron's TransformerConfig.
        model_chunks: The model chunks of this rank.
        is_packed: Whether microbatches hold packed sequences.
        agree: Element-wise maximum over all ranks, which call this together; None for one rank.
    """
    if scope != "auto":
        return ChosenScope(scope)
    obstacles = [obstacle.flag for obstacle in _OBSTACLES if obstacle.is_met(config, is_packed)]
    if not obstacles:
        obstacles = [why for chunk in model_chunks if (why := _obstacle_in_model(chunk))][:1]
    is_block = bool(obstacles)
    if agree is not None:
        (answer,) = agree([int(is_block)])
        is_block = bool(answer)
    if not is_block:
        return ChosenScope("chunk")
    return ChosenScope("block", ", ".join(obstacles) or "the model on another rank")


def scope_obstacles(config: Any, scope: Scope, *, is_packed: bool) -> list[ScopeObstacle]:
    """Return the settings with which scope ``chunk`` is refused; none for other scopes.

    Args:
        config: An object that has all or some fields of TransformerConfig as attributes.
        scope: The requested scope.
        is_packed: Whether microbatches hold packed sequences.
    """
    if scope != "chunk":
        return []
    return [obstacle for obstacle in _OBSTACLES if obstacle.is_met(config, is_packed)]


def refuse_for_scope(config: Any, scope: Scope, *, is_packed: bool) -> None:
    """Refuse settings with which the output layer and the loss cannot be captured.

    Args:
        config: Megatron's TransformerConfig.
        scope: The requested scope.
        is_packed: Whether microbatches hold packed sequences.

    Raises:
        ConfigError: There are such settings; the message lists all of them.
    """
    obstacles = scope_obstacles(config, scope, is_packed=is_packed)
    if obstacles:
        raise ConfigError(
            "Chunk graphs with scope 'chunk' cannot hold this model:\n  - "
            + "\n  - ".join(f"{obstacle.setting}: {obstacle.why}" for obstacle in obstacles)
            + "\nTurn these off, or use scope='auto' or 'block'."
        )


def _predicts(config: Any) -> bool:
    return bool(getattr(config, "mtp_num_layers", None))


_OBSTACLES = (
    ScopeObstacle(
        "cross_entropy_fusion_impl='te'",
        "--cross-entropy-fusion-impl te",
        "its backward reads the loss gradient on the host",
        lambda config, _: (
            getattr(config, "cross_entropy_loss_fusion", False)
            and getattr(config, "cross_entropy_fusion_impl", "native") == "te"
        ),
    ),
    ScopeObstacle(
        "fp8_recipe='delayed' with mtp_num_layers",
        "--fp8-recipe delayed with --mtp-num-layers",
        "every prediction layer updates the scales in the middle of the backward, but a graph "
        "updates them once, at its end",
        lambda config, _: fp8_recipe(config) == "delayed" and _predicts(config),
    ),
    ScopeObstacle(
        "defer_embedding_wgrad_compute=True",
        "--defer-embedding-wgrad-compute",
        "its queue is Python state that a replay does not advance",
        lambda config, _: bool(getattr(config, "defer_embedding_wgrad_compute", False)),
    ),
    ScopeObstacle(
        "mtp_num_layers with packed sequences",
        "--mtp-num-layers with packed sequences",
        "Megatron then reads the offsets on the host",
        lambda config, is_packed: is_packed and _predicts(config),
    ),
)


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
