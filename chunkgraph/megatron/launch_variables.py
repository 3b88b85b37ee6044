"""Environment variables between ``chunkgraph launch`` and the ranks that it starts."""

from __future__ import annotations

__all__ = ["REPORT_FOLDER_VARIABLE"]

REPORT_FOLDER_VARIABLE = "CHUNKGRAPH_REPORT_FOLDER"
"""Where ranks leave their pids and what went wrong."""
