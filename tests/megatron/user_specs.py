"""Layer specs as a user would write them, named in configurations as ``user_specs:function``."""

from __future__ import annotations

import os
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_layer import TransformerLayer


class WatchfulLayer(TransformerLayer):
    """Looks at its output on the host, which no graph can hold."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output, after a look at it."""
        hidden, context = super().forward(*args, **kwargs)
        largest = hidden.abs().max().item()  # the line that the error must name
        if largest > 1e6:
            raise FloatingPointError(largest)
        return hidden, context


def watchful() -> Any:
    """The local spec with `WatchfulLayer`."""
    spec = get_gpt_layer_local_spec()
    spec.module = WatchfulLayer
    return spec


class FailsOnce(TransformerLayer):
    """Raises in the last rank's forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Fail, or do as the layer does."""
        if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            raise RuntimeError("told to fail")
        return super().forward(*args, **kwargs)


def fails_on_last_rank() -> Any:
    """The local spec with `FailsOnce`."""
    spec = get_gpt_layer_local_spec()
    spec.module = FailsOnce
    return spec
