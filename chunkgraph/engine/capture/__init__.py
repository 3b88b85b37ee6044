"""A capture session: slots of all chunks, and what is checked before graphs are kept."""
