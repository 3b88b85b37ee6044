"""The command line: ``chunkgraph plan``, ``train`` and ``bench``."""
