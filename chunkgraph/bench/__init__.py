"""Measure variants of a training run, in the workers of ``chunkgraph bench``."""

from __future__ import annotations
