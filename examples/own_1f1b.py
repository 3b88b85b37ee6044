"""Train through a 1F1B loop of your own, written with torch.distributed.

    torchrun --nproc-per-node 2 examples/own_1f1b.py

Runs on CPUs through gloo. Every step has another number of microbatches; losses are compared with
those of the same loop without graphs.
"""

import copy
from collections import deque

import torch
import torch.distributed as dist
from torch import nn

from chunkgraph import ChunkGraphs

ROWS, WIDTH = 8, 64
COUNTS = (4, 7, 3, 6)

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
stage = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())


def received(source):
    """Receive an activation or a gradient from a neighbour."""
    tensor = torch.empty(ROWS, WIDTH)
    dist.recv(tensor, source)
    return tensor


def agree(values):
    """Return the maximum of each value over all ranks: they replay, or run eagerly, together."""
    tensor = torch.tensor(values)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def one_f_one_b(forward, batch):
    """Run warmup forwards, then one forward and one backward at a time; return the losses."""
    in_flight, losses, sends = deque(), [], []

    def run_forward(microbatch):
        x = batch[microbatch] if rank == 0 else received(rank - 1).requires_grad_()
        y = forward(x)
        if rank == num_ranks - 1:
            y = nn.functional.mse_loss(y, batch[microbatch].roll(1, -1))
            losses.append(y.detach())
        else:
            sends.append(dist.isend(y.detach(), rank + 1))
        in_flight.append((x, y))

    def run_backward():
        x, y = in_flight.popleft()
        y.backward(None if rank == num_ranks - 1 else received(rank + 1))
        if rank > 0:
            sends.append(dist.isend(x.grad, rank - 1))

    num_warmup = min(num_ranks - 1 - rank, len(batch))
    for microbatch in range(len(batch)):
        run_forward(microbatch)
        if microbatch >= num_warmup:
            run_backward()
    while in_flight:
        run_backward()
    for send in sends:
        send.wait()
    return losses


def train(module, graphs=None):
    """Train a few steps and return all losses."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    every_loss = []
    for count in COUNTS:
        batch = torch.randn(count, ROWS, WIDTH, generator=generator)
        optimizer.zero_grad()
        if graphs is None:
            every_loss += one_f_one_b(module, batch)
        else:
            with graphs.step(count):
                every_loss += one_f_one_b(graphs.callables[0], batch)
        optimizer.step()
    return every_loss


expected = train(copy.deepcopy(stage))
graphs = ChunkGraphs.for_schedule("1f1b", stage, rank=rank, num_ranks=num_ranks, agree=agree)
losses = train(stage, graphs)
same = all(map(torch.equal, expected, losses))
print(f"rank {rank}: {graphs.counters}; losses equal to eager: {same}")
dist.destroy_process_group()
raise SystemExit(not same)
