"""Runs ``chunkgraph`` with a stand-in for the training worker: driver.py TARGET ARGUMENT...

``alone:TARGET`` starts the workers one after the other without the import of torch, which takes
longest. It is for tests of the command's handling of results.
"""

from __future__ import annotations

import os
import subprocess
import sys

from chunkgraph.cli import __main__, train
from chunkgraph.jobs import launcher


class WithoutTorch(launcher.Launcher):
    """Runs each worker to its end."""

    def run(self) -> None:
        for rank in range(self.num_ranks):
            subprocess.run(
                [sys.executable, *self.command],
                env={**os.environ, **self.environment, "RANK": str(rank)},
                check=True,
            )


if __name__ == "__main__":
    target = sys.argv[1].removeprefix("alone:")
    if target != sys.argv[1]:
        launcher.Launcher = WithoutTorch  # type: ignore[misc]
    train._WORKER = target
    sys.exit(__main__.main(sys.argv[2:]))
