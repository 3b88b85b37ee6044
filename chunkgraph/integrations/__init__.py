"""Chunk graphs in other frameworks, which only these modules import."""
