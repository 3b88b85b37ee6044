"""The settings of a small model, for tests of settings, and those of a recomputed one."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "model": {
        "num_layers": 8,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 32,
    },
    "pipeline": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "train": {"num_microbatches": [4, 6]},
}
RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""Every layer runs its forward again in its backward."""
