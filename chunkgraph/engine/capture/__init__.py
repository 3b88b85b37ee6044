"""Capture sessions: capture the slots of all chunks, and check them before graphs are kept."""
