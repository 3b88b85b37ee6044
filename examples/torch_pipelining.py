"""Train through torch's 1F1B schedule with captured stages.

    torchrun --nproc-per-node 2 examples/torch_pipelining.py [--lora]

Runs on GPUs, and without them on CPUs. Compares losses with those of the same steps without graphs.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from chunkgraph.pipelining import GraphedSchedule, GraphedStage

ROWS, WIDTH = 8, 64
COUNTS = (4, 8, 6, 4, 6)

uses_gpus = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if uses_gpus else torch.device("cpu")
if uses_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if uses_gpus else "gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(rank)
module = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()).to(device)
loss_fn = nn.functional.mse_loss
if "--lora" in sys.argv:  # frozen layers with adapters, added before the stage is made
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=4, target_modules=["1"], init_lora_weights=False), module)


def train(step, model):
    """Train for a few steps, each with another number of microbatches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(0)
    every_loss = []
    for count in COUNTS:
        x = torch.randn(ROWS * count, WIDTH).to(device)
        losses = []
        args = [x] if rank == 0 else []
        options = {"target": x.roll(1, -1), "losses": losses} if rank == num_ranks - 1 else {}
        optimizer.zero_grad()
        step(*args, num_microbatches=count, return_outputs=False, **options)
        optimizer.step()
        every_loss += [loss.detach() for loss in losses]
    return every_loss


eager_module = copy.deepcopy(module)
eager_stage = PipelineStage(eager_module, rank, num_ranks, device)
stage = GraphedStage(module, rank, num_ranks, device)


def eager_step(*args, num_microbatches, **options):
    """Make a schedule for one step, as without graphs."""
    Schedule1F1B(eager_stage, num_microbatches, loss_fn=loss_fn).step(*args, **options)


graphed = GraphedSchedule(stage, lambda n: Schedule1F1B(stage, n, loss_fn=loss_fn), (4, 6, 8))
expected, losses = train(eager_step, eager_module), train(graphed.step, module)
same = all(map(torch.equal, expected, losses))
print(f"rank {rank}: {graphed.graphs.counters}; losses equal to eager: {same}")
dist.destroy_process_group()
raise SystemExit(not same)
