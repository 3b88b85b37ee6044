"""The CPU recorder: a graph backend that needs no GPU, for tests and trials."""

from chunkgraph.graphs.recorder.backend import RecorderBackend, host_call

__all__ = ["RecorderBackend", "host_call"]
