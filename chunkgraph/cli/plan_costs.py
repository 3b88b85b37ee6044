"""Read the costs of an action for ``chunkgraph plan``, from numbers or from a JSON file."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chunkgraph._text import did_you_mean, shorten, shown
from chunkgraph.errors import ConfigError
from chunkgraph.schedules import CostModel

__all__ = ["COSTS_HELP", "add_costs_argument", "costs_of"]

COSTS_HELP = """\
--costs has the ms of one microbatch on one chunk: F (forward), B (whole
backward), I and W (its halves), send (a message). I and W default to half of B,
B to their sum, send to 0. A FILE has them as the JSON object "costs_ms", as in
{"costs_ms": {"F": 1.6, "I": 2.4, "W": 2.4}}, at its top or in one of the
"variants" of a document; FILE:VARIANT names one of several.
"""
_NAMES = ("F", "B", "I", "W", "send")
_MAX_BYTES = 64 * 2**20
# The shortest action determines the resolution of a picture.
_MAX_RATIO = 50


def add_costs_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--costs``."""
    parser.add_argument(
        "--costs",
        metavar="FILE[:VARIANT]|F=MS,...",
        help="measured costs of one chunk, such as F=1.6,I=2.4,W=2.4 (default F=1,I=1,W=1)",
    )


def costs_of(argument: str | None) -> CostModel | None:
    """Return the costs of ``--costs``; None without the option.

    Raises:
        ConfigError: The value has no costs, or invalid ones.
    """
    if argument is None:
        return None
    where = f"plan: --costs {shown(argument)}"
    if "=" in argument and not Path(argument).exists():
        return _model(where, _from_pairs(where, argument))
    name, _, variant = argument.rpartition(":")
    if name and not Path(argument).exists():
        return _model(where, _from_file(where, Path(name), variant))
    return _model(where, _from_file(where, Path(argument), None))


def _from_pairs(where: str, text: str) -> dict[str, Any]:
    pairs = [part.partition("=") for part in text.split(",")]
    names = [name.strip() for name, _, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: {shown(name)} is given twice")
    return {name: value for name, (_, _, value) in zip(names, pairs, strict=True)}


def _from_file(where: str, path: Path, variant: str | None) -> Mapping[str, Any]:
    try:
        if not path.is_file():
            raise ConfigError(f"{where}: neither a file nor costs such as F=1.6,I=2.4,W=2.4")
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{where}: larger than {_MAX_BYTES} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: cannot be read as JSON ({shorten(str(error))})") from None
    document = document if isinstance(document, dict) else {}
    variants = document.get("variants")
    costs = {
        str(one.get("name")): dict(one["costs_ms"])
        for one in (variants if isinstance(variants, list) else ())
        if isinstance(one, dict) and isinstance(one.get("costs_ms"), dict)
    }
    if variant is not None and variant in costs:
        return costs[variant]
    if variant is None and isinstance(document.get("costs_ms"), dict):
        return dict(document["costs_ms"])
    if variant is None and len(costs) == 1:
        return next(iter(costs.values()))
    if costs:
        names = ", ".join(costs)
        raise ConfigError(
            f"{where}: has costs of the variants {names}. Name one of them, as in "
            f"--costs {path}:{next(iter(costs))}"
        )
    raise ConfigError(
        f'{where}: has no "costs_ms" at its top or in a variant. Add it, as in '
        '{"costs_ms": {"F": 1.6, "I": 2.4, "W": 2.4}}'
    )


def _model(where: str, values: Mapping[str, Any]) -> CostModel:
    costs = {}
    for name, value in values.items():
        if name not in _NAMES:
            hint = did_you_mean(name, _NAMES)
            raise ConfigError(
                f"{where}: there is no cost {shown(name)}, but {', '.join(_NAMES)}.{hint}"
            )
        try:
            costs[name] = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            costs[name] = math.nan
        if not (0 < costs[name] < math.inf or (name == "send" and costs[name] == 0)):
            raise ConfigError(f"{where}: {name} is {shown(value)}, but must be ms above 0")
    if "F" not in costs or not ("B" in costs or {"I", "W"} <= costs.keys()):
        raise ConfigError(f"{where}: give F, and B or both I and W; there is {shown(list(costs))}")
    if "B" in costs:
        costs = {"I": costs["B"] / 2, "W": costs["B"] / 2, **costs}
    else:
        costs["B"] = costs["I"] + costs["W"]
    if max(costs[name] for name in "FBIW") > _MAX_RATIO * min(costs[name] for name in "FBIW"):
        raise ConfigError(
            f"{where}: the largest is more than {_MAX_RATIO} times the smallest, which no picture "
            "to scale can show. Check their units"
        )
    return CostModel(
        forward_ms=costs["F"],
        backward_ms=costs["B"],
        input_grad_ms=costs["I"],
        weight_grad_ms=costs["W"],
        send_ms=costs.get("send", 0.0),
    )
