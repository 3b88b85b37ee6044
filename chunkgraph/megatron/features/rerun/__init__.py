"""Run a step again if tokens found no room in it."""
