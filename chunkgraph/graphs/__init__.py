"""Capture and replay of one callable: CUDA graphs, and a CPU recorder with the same contract."""

from chunkgraph.graphs.addresses import AddressRange, AddressRanges, Pool, tensor_at
from chunkgraph.graphs.allocations import Allocation, block_bytes
from chunkgraph.graphs.contract import CopyNode, Graph, GraphBackend
from chunkgraph.graphs.copies import Copier
from chunkgraph.graphs.cuda import CUDABackend
from chunkgraph.graphs.failure import capture_failure
from chunkgraph.graphs.operators import storage_address
from chunkgraph.graphs.recorder import RecorderBackend, host_call, is_capturing

__all__ = [
    "AddressRange",
    "AddressRanges",
    "Allocation",
    "CUDABackend",
    "Copier",
    "CopyNode",
    "Graph",
    "GraphBackend",
    "Pool",
    "RecorderBackend",
    "block_bytes",
    "capture_failure",
    "host_call",
    "is_capturing",
    "storage_address",
    "tensor_at",
]
