"""Which scope ``auto`` is: the whole chunk wherever it can be captured, and why where it cannot."""

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
    """What is captured, and why it is no more.

    Attributes:
        scope: see the module's table.
        why_block: what keeps ``auto`` from the whole chunk; "" where nothing does, or a scope was
            asked for.
    """

    scope: CapturedScope
    why_block: str = ""


@dataclass(frozen=True)
class ScopeObstacle:
    """A setting with which only the block can be captured.

    Attributes:
        setting: as it stands in Megatron's config.
        flag: as it stands on the command line of a pretrain script.
        why: what would go wrong.
        is_met: whether a config, of packed microbatches or not, has it.
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
    """Settle ``auto``: the whole chunk where nothing stands against it on any rank.

    Capture sessions run collectives of what is captured, so that all ranks take the same.

    Args:
        scope: the requested scope.
        config: Megatron's TransformerConfig.
        model_chunks: of this rank.
        is_packed: whether microbatches hold packed sequences.
        agree: element-wise maximum over all ranks, which call this together; None: there is one.
    """
    if scope != "auto":
        return ChosenScope(scope)
    found = [obstacle.flag for obstacle in _OBSTACLES if obstacle.is_met(config, is_packed)]
    if not found:
        found = [why for chunk in model_chunks if (why := _obstacle_in_model(chunk))][:1]
    is_block = bool(found)
    if agree is not None:
        (answer,) = agree([int(is_block)])
        is_block = bool(answer)
    if not is_block:
        return ChosenScope("chunk")
    return ChosenScope("block", ", ".join(found) or "the model on another rank")


def scope_obstacles(config: Any, scope: Scope, *, is_packed: bool) -> list[ScopeObstacle]:
    """Return the settings with which scope ``chunk`` is refused; none for other scopes.

    Args:
        config: anything that has TransformerConfig's fields as attributes, or some of them.
        scope: the requested scope.
        is_packed: whether microbatches hold packed sequences.
    """
    if scope != "chunk":
        return []
    return [obstacle for obstacle in _OBSTACLES if obstacle.is_met(config, is_packed)]


def refuse_for_scope(config: Any, scope: Scope, *, is_packed: bool) -> None:
    """Check the settings that matter only where the output layer and the loss are captured.

    Args:
        config: Megatron's TransformerConfig.
        scope: the requested scope.
        is_packed: whether microbatches hold packed sequences.

    Raises:
        ConfigError: naming every setting that cannot be captured.
    """
    obstacles = scope_obstacles(config, scope, is_packed=is_packed)
    if found := [f"{obstacle.setting}: {obstacle.why}" for obstacle in obstacles]:
        raise ConfigError(
            "Chunk graphs with scope 'chunk' cannot hold this model:\n  - "
            + "\n  - ".join(found)
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
        "every predicting layer updates the scales once more in the middle of the backward, but a "
        "graph does it once, at the end",
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
