"""What differs between torch releases."""

from __future__ import annotations

import torch
from torch.distributed.pipelining import _utils

from chunkgraph.errors import ReplayMismatchError

HAS_LOCAL_STAGES = not torch.__version__.startswith("2.11.")
"""Whether neighbouring stages of one rank run on gloo: torch 2.11 lets the rank send to itself."""

ShapeError: type[Exception] = getattr(_utils, "PipeliningShapeError", ReplayMismatchError)
"""The error of a microbatch of another shape; torch 2.11 compares shapes itself."""
