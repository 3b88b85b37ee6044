"""Recognise hybrid models, whose names differ between releases, and the recipe of FP8."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

from chunkgraph.megatron.core.access import private_names

_HYBRID = "megatron.core.models.hybrid"


class HybridNames:
    """Look up the hybrid model and its layer stack in the installed release.

    Attributes:
        model: The class HybridModel; MambaModel in older releases.
        stack: The class HybridStack; MambaStack in older releases.
        spec_argument: Name of the model's argument for the spec of the stack.
        pattern_argument: Name of the model's argument for the pattern of layers.
        knows_stages: Whether the pattern may mark where stages end, and stages may interleave.

    Raises:
        ConfigError: The release has moved one of them.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec(_HYBRID) is not None:
            (self.model,) = private_names(f"{_HYBRID}.hybrid_model", "HybridModel")
            (self.stack,) = private_names(f"{_HYBRID}.hybrid_block", "HybridStack")
            self._specs = f"{_HYBRID}.hybrid_layer_specs", "hybrid_stack_spec"
        else:
            (self.model,) = private_names("megatron.core.models.mamba.mamba_model", "MambaModel")
            (self.stack,) = private_names("megatron.core.ssm.mamba_block", "MambaStack")
            self._specs = "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"
        arguments = inspect.signature(self.model.__init__).parameters
        self.spec_argument = next(name for name in arguments if name.endswith("stack_spec"))
        self.knows_stages = "hybrid_layer_pattern" in arguments and "vp_stage" in arguments
        self.pattern_argument = (
            "hybrid_layer_pattern"
            if "hybrid_layer_pattern" in arguments
            else "hybrid_override_pattern"
        )

    def transformer_engine_spec(self) -> Any:
        """Return Megatron's Transformer Engine spec of the stack."""
        return private_names(*self._specs)[0]


def is_stack(module: object) -> bool:
    """Return whether ``module`` is Megatron's stack of hybrid layers, or a subclass."""
    return _is_one_of(module, {"HybridStack", "MambaStack"})


def is_hybrid_model(module: object) -> bool:
    """Return whether ``module`` is Megatron's hybrid model, or a subclass."""
    return _is_one_of(module, {"HybridModel", "MambaModel"})


def _is_one_of(module: object, names: set[str]) -> bool:
    """Compare by name: importing the classes takes a second, and kernels that may be missing."""
    return any(
        base.__name__ in names and base.__module__.startswith("megatron.core.")
        for base in type(module).__mro__
    )


def fp8_recipe(config: Any) -> str | None:
    """Return the FP8 recipe of ``config`` (``delayed``, ``tensorwise``, ...); None without FP8."""
    if not getattr(config, "fp8", None):
        return None
    recipe = getattr(config, "fp8_recipe", None) or "delayed"
    return str(getattr(recipe, "value", recipe))
