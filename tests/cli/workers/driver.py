"""``chunkgraph`` with a stand-in for the training worker: driver.py TARGET ARGUMENT..."""

from __future__ import annotations

import sys

from chunkgraph.cli import __main__, train

if __name__ == "__main__":
    train._WORKER = sys.argv[1]
    sys.exit(__main__.main(sys.argv[2:]))
