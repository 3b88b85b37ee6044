"""The experts of a configuration file as flags of a Megatron pretrain script."""

from __future__ import annotations

from dataclasses import fields

from chunkgraph.settings import Config

__all__ = ["expert_flags"]

_OURS = ("token_drops",)
_PADDING = "moe_pad_expert_input_to_capacity"
_BUDGET = "moe_expert_rank_capacity_factor"
_RENAMED = {"num_moe_experts": "--num-experts"}


def expert_flags(config: Config) -> list[tuple[str, str, str | None]]:
    """Key of the file, Megatron's flag and its value (None: without one); none without experts."""
    moe = config.moe
    if moe.num_moe_experts is None:
        return []
    found: list[tuple[str, str, str | None]] = [
        (
            "pipeline.expert_model_parallel_size",
            "--expert-model-parallel-size",
            str(config.pipeline.expert_model_parallel_size),
        )
    ]
    if config.pipeline.tensor_model_parallel_size > 1:
        # As `chunkgraph train` has it; Megatron would split experts over those ranks.
        found.append(
            ("pipeline.tensor_model_parallel_size", "--expert-tensor-parallel-size", "1"),
        )
    for item in fields(moe):
        value = getattr(moe, item.name)
        if item.name in _OURS or value is None or value is False:
            continue
        if item.name == _PADDING and moe.moe_token_dispatcher_type == "flex":
            continue
        if item.name == _BUDGET and not config.capture.enabled:
            continue  # nobody would count what it cuts
        flag = _RENAMED.get(item.name, f"--{item.name.replace('_', '-')}")
        text = str(list(value)) if isinstance(value, tuple) else str(value)
        found.append((f"moe.{item.name}", flag, None if value is True else text))
    return found
