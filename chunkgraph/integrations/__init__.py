"""Chunk graphs in frameworks for reinforcement learning: `verl`, `nemo_rl` and `slime`.

Each module has one function, `install`, for the workers that train. It imports the framework, so
nothing here is imported with chunkgraph.
"""
