"""torchrun with exact exit codes: ``python -m chunkgraph.jobs.torchrun TORCHRUN-ARGUMENT...``.

torchrun ends with 1 and a traceback for any exit codes of the ranks; job systems and scripts need
the code of the rank that failed first.
"""

from __future__ import annotations

import signal
import sys

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> int:
    """Run torchrun; return 0, the first failed rank's exit code, or 128 + the signal's number."""
    try:
        torchrun.run(torchrun.parse_args(sys.argv[1:]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        print(f"torchrun: rank {rank} was the first to fail; exit code {code}.", file=sys.stderr)
        return code
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        print(f"torchrun: ended by {name}, and the ranks of this node with it.", file=sys.stderr)
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
