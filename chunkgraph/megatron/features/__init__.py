"""Capabilities of a model that captures and replays have to know, a folder each."""
