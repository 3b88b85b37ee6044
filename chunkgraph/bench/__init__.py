"""What ``chunkgraph bench`` runs in its workers: one variant of a training run, measured."""

from __future__ import annotations
