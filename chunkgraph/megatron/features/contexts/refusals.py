"""Settings of a model that a changing context-parallel size does not support."""

from __future__ import annotations

from typing import Any

from chunkgraph.errors import ConfigError

__all__ = ["refuse_beside_contexts", "refused_with_contexts"]


def refused_with_contexts(config: Any) -> dict[str, bool]:
    """Name the settings that a changing size does not support, each with whether it is wanted.

    Args:
        config: Megatron's TransformerConfig, or anything with its fields.
    """
    recomputed = set()
    if getattr(config, "recompute_granularity", None) == "selective":
        recomputed = set(getattr(config, "recompute_modules", None) or ())
    return {
        "mtp_num_layers (several tokens are predicted over the rows of one rank alone)": bool(
            getattr(config, "mtp_num_layers", None)
        ),
        **{
            (f"recompute_modules={name} (computed anew with the group of another microbatch)"): name
            in recomputed
            for name in ("moe", "mla_up_proj")
        },
    }


def refuse_beside_contexts(**others: Any) -> None:
    """Stop if something is wanted that was not joined to banks of context-parallel sizes.

    Args:
        others: by the name that a user knows, whether it is wanted.

    Raises:
        ConfigError: naming all of them.
    """
    wanted = [name for name, is_wanted in others.items() if is_wanted]
    if wanted:
        raise ConfigError(
            f"attach(packing=PackedBanks.of_limits(...)) with {', '.join(wanted)}: graphs whose "
            "context-parallel size changes were not joined to them. Leave one of them out."
        )
