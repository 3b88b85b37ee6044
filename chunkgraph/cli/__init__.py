"""The command line: ``chunkgraph plan`` and ``chunkgraph train``."""
