"""Paged slots: fewer slots than microbatches in flight, and what forwards saved on the host.

`limits.py` says how many slots each chunk gets. In the capture session `pages.py` tests that all
slots of a chunk are alike. `replayer.py` runs steps by a plan of `chunkgraph.slots.pages`.
"""
