"""Count the tokens of a value in a JSON line."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

from chunkgraph._text import did_you_mean, name_list, shorten, shown
from chunkgraph.errors import ConfigError
from chunkgraph.packing.offsets import MAX_TOKENS

__all__ = ["TokenCounts", "ValueKind", "find_key", "token_counts"]

# In order of preference: exact counts, then tokens, then text.
_USUAL_KEYS = (
    *("length", "num_tokens", "lengths", "seqlens", "input_ids", "tokens"),
    *("text", "messages", "conversation", "content"),
)
_KEYS_OF_LENGTHS = ("lengths", "seqlens")


class ValueKind(enum.Enum):
    """The kind of value under the key."""

    AUTO = "auto"
    LENGTH = "length"
    LENGTHS = "lengths"
    TOKENS = "tokens"
    TEXT = "text"


@dataclass(frozen=True)
class TokenCounts:
    """The documents of one line: their tokens, and how these were counted."""

    tokens: list[int]
    is_estimated: bool = False
    is_microbatch: bool = False
    """Whether the line is a packed microbatch."""


def find_key(value: Any, key: str | None, where: str) -> str:
    """Return the key that holds the document of a parsed line.

    Raises:
        ConfigError: the line is not an object, or does not have the key.
    """
    if not isinstance(value, dict):
        msg = f"{where}: a JSON {type(value).__name__}, not an object with keys."
        raise ConfigError(msg)
    if key is None:
        key = next((usual for usual in _USUAL_KEYS if usual in value), None)
        if key is None:
            keys = shorten(name_list(value))
            msg = f"{where}: none of the keys is a usual one ({keys}). Name the key: --key."
            raise ConfigError(msg)
    elif key not in value:
        keys, hint = shorten(name_list(value)), did_you_mean(key, value)
        msg = f"{where}: no key {shown(key)} among {keys}.{hint}"
        raise ConfigError(msg)
    return key


def token_counts(
    value: Any, kind: ValueKind, *, where: str, key: str, bytes_per_token: float
) -> TokenCounts:
    """Return the tokens of each document in a value.

    A number is a length; a list of numbers is a document's tokens (``LENGTHS``: the lengths of a
    microbatch); a string is text; a list of objects is a conversation with text in ``content``.

    Raises:
        ConfigError: the value is not of this kind.
    """
    if kind is ValueKind.AUTO and isinstance(value, list) and key in _KEYS_OF_LENGTHS:
        kind = ValueKind.LENGTHS
    any_kind = kind is ValueKind.AUTO
    if (any_kind or kind is ValueKind.LENGTH) and _is_int(value):
        return TokenCounts([value])
    if isinstance(value, list):
        if kind is ValueKind.LENGTHS and all(map(_is_int, value)):
            return TokenCounts(value, is_microbatch=True)
        if any_kind or kind is ValueKind.TEXT:
            turns = [turn.get("content") for turn in value if isinstance(turn, dict)]
            texts = [text for text in turns if isinstance(text, str)]
            if texts and len(texts) == len(value):
                return _estimate("".join(texts), bytes_per_token, where)
        if (any_kind or kind is ValueKind.TOKENS) and (not value or _is_int(value[0])):
            return TokenCounts([len(value)])
    if (any_kind or kind is ValueKind.TEXT) and isinstance(value, str):
        return _estimate(value, bytes_per_token, where)
    expected = "a length, tokens or text" if any_kind else f"what --value {kind.value} takes"
    msg = f"{where} is not {expected}: {shown(value)}."
    raise ConfigError(msg)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _estimate(text: str, bytes_per_token: float, where: str) -> TokenCounts:
    # Lone surrogates are legal in JSON strings; any bytes will do for an estimate.
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    tokens = num_bytes / bytes_per_token
    # Checked here, where it may still be infinite, so that the message can name the estimate.
    if tokens > MAX_TOKENS:
        msg = (
            f"{where}: {num_bytes} bytes at {bytes_per_token:g} bytes per token are {tokens:g} "
            f"tokens; a document has at most {MAX_TOKENS}. Raise the bytes per token."
        )
        raise ConfigError(msg)
    return TokenCounts([math.ceil(tokens)], is_estimated=True)
