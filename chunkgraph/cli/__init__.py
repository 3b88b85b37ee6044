"""The ``chunkgraph`` command line and its subcommands."""
