"""Packed sequences: fixed shapes, their banks, and offsets in static inputs."""
