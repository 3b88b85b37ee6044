"""Capture and replay of one callable: CUDA graphs, and a CPU recorder with the same contract."""

from chunkgraph.graphs.addresses import AddressRange, AddressRanges, tensor_at
from chunkgraph.graphs.allocations import Allocation, AllocationLog, block_bytes
from chunkgraph.graphs.contract import Graph, GraphBackend, Pool
from chunkgraph.graphs.cuda import CUDABackend
from chunkgraph.graphs.failure import SourceLocation, capture_failure, location_of
from chunkgraph.graphs.operators import InputWatch, storage_address
from chunkgraph.graphs.recorder import RecorderBackend, host_call

__all__ = [
    "AddressRange",
    "AddressRanges",
    "Allocation",
    "AllocationLog",
    "CUDABackend",
    "Graph",
    "GraphBackend",
    "InputWatch",
    "Pool",
    "RecorderBackend",
    "SourceLocation",
    "block_bytes",
    "capture_failure",
    "host_call",
    "location_of",
    "storage_address",
    "tensor_at",
]
