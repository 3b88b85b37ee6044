"""Read text files as lists of documents."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from chunkgraph._text import shown
from chunkgraph.errors import ConfigError

__all__ = ["read_documents", "shipped_text"]

_SHIPPED = "persuasion.txt"


def shipped_text() -> bytes:
    """Return the text in the package; for its origin and licence see SOURCES.md next to it."""
    return resources.files("chunkgraph.data").joinpath(_SHIPPED).read_bytes()


def read_documents(path: str | Path | None = None) -> list[bytes]:
    """Read the documents of a text, which blank lines separate.

    Args:
        path: a text file, read as bytes; None: the shipped text.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    if path is None:
        text = shipped_text()
    else:
        try:
            file = Path(path)
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise OSError(None, "it is a pipe or a device, which may not end")
            text = file.read_bytes()
        except OSError as error:
            msg = (
                f"data.path: cannot read {shown(str(path))}: {error.strerror or error}. Name a "
                "text file, or set data.path to null for the text that is shipped."
            )
            raise ConfigError(msg) from None
    paragraphs = re.split(rb"\n[ \t]*(?:\n[ \t]*)+", text.replace(b"\r\n", b"\n"))
    documents = [paragraph.strip(b"\n") for paragraph in paragraphs]
    documents = [document for document in documents if document.strip()]
    if not documents:
        msg = f"data.path: {shown(str(path))} is empty."
        raise ConfigError(msg)
    return documents
