"""The byte-level vocabulary: every byte is a token, and one more ends a document."""

from __future__ import annotations

__all__ = ["END_OF_DOCUMENT", "NUM_TOKENS"]

END_OF_DOCUMENT = 256
"""Token after the last byte of a document."""

NUM_TOKENS = 257
"""Number of tokens: 256 bytes and the end of a document. Models may round up their tables."""
