"""Paged slots: fewer slots than microbatches in flight, and what forwards saved on the host.

`limits.py` says how many slots each chunk gets. The capture session proves with `pages.py` that all
slots of a chunk are alike. `replayer.py` runs steps by a plan of `chunkgraph.slots.pages`, and
`pager.py` copies.
"""
