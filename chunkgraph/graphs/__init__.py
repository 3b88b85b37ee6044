"""Capture and replay of one callable: CUDA graphs, and a CPU recorder with the same contract."""

from chunkgraph.graphs.addresses import AddressRange, AddressRanges, tensor_at
from chunkgraph.graphs.allocations import Allocation, AllocationLog, block_bytes
from chunkgraph.graphs.captured_generator import DrawOffsets
from chunkgraph.graphs.contract import CopyNode, Graph, GraphBackend, Pool, Router
from chunkgraph.graphs.cuda import CUDABackend
from chunkgraph.graphs.cuda_draws import resumed_generators
from chunkgraph.graphs.failure import capture_failure
from chunkgraph.graphs.input_watch import InputWatch
from chunkgraph.graphs.location import SourceLocation, location_of
from chunkgraph.graphs.recorder import RecorderBackend, host_call, is_capturing
from chunkgraph.graphs.recording import storage_address
from chunkgraph.graphs.temporaries import OperatorTrace, ScratchRouter, watch_operators

__all__ = [
    "AddressRange",
    "AddressRanges",
    "Allocation",
    "AllocationLog",
    "CUDABackend",
    "CopyNode",
    "DrawOffsets",
    "Graph",
    "GraphBackend",
    "InputWatch",
    "OperatorTrace",
    "Pool",
    "RecorderBackend",
    "Router",
    "ScratchRouter",
    "SourceLocation",
    "block_bytes",
    "capture_failure",
    "host_call",
    "is_capturing",
    "location_of",
    "resumed_generators",
    "storage_address",
    "tensor_at",
    "watch_operators",
]
