"""Train stages that are cut by module names, as torchtitan's are, under 1F1B and ZBV.

    torchrun --nproc-per-node 4 examples/torchtitan_stages.py

Each stage is a copy of a whole debug model without the modules of other stages, in a PipelineStage.
With torchtitan 0.3, that is its Llama 3 model, and it cuts the stages; otherwise both are imitated.
The schedule's class comes from its name. The loss is a sum over tokens, scaled by their number.
Compares losses with those of the same steps without graphs.

From torch 2.15 on the pipeline has two ranks, and `fully_shard` (FSDP2) shards every stage over
the others, with mixed precision. Older releases cannot keep unsharded parameters where graphs read
them: there all ranks form one pipeline of stages that are not sharded. On torch 2.11 without GPUs
only 1F1B runs, since stages of one rank cannot be neighbours over gloo.
"""

import copy
import os
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from chunkgraph.pipelining import GraphedSchedule

try:  # torchtitan 0.3 has no public names for these
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part
    from torchtitan.distributed.pipeline_parallel import _split_module as split_module
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    HAS_TORCHTITAN = True
except ImportError:
    HAS_TORCHTITAN = False

VOCABULARY, WIDTH, SEQUENCE, NUM_LAYERS, NUM_STEPS = 64, 32, 16, 6, 4
NUM_MICROBATCHES = 4
IS_SHARDED = hasattr(FSDPModule, "set_keep_unsharded_storage")  # torch 2.15

uses_gpus = torch.cuda.is_available()
has_neighbours = uses_gpus or not torch.__version__.startswith("2.11.")
schedules = ("1F1B", "ZBVZeroBubble") if has_neighbours else ("1F1B",)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if uses_gpus else torch.device("cpu")
if uses_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if uses_gpus else "gloo")
num_ranks = 2 if IS_SHARDED else dist.get_world_size()
mesh = init_device_mesh(
    device.type, (num_ranks, dist.get_world_size() // num_ranks), mesh_dim_names=("pp", "dp")
)
rank = mesh.get_local_rank("pp")


class Model(nn.Module):
    """A debug model, whose forward runs the modules that remain in it."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        layers = {
            str(i): nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for i in range(NUM_LAYERS)
        }
        self.layers = nn.ModuleDict(layers)
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        """Run a stage: tokens or hidden states in, hidden states or logits out."""
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.lm_head is None else self.lm_head(self.norm(x))


def new_model():
    """Return the whole model, from the same seed every time."""
    torch.manual_seed(0)
    if not HAS_TORCHTITAN:
        return Model()
    config = llama3_configs["debugmodel"](attn_backend="flex")
    for layer in config.layers:  # a sequence is one document here, and needs no mask
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()
    return model


def module_names(num_stages):
    """Return the modules of each stage."""
    if HAS_TORCHTITAN:
        return _generate_llm_fqn_per_model_part(num_stages, NUM_LAYERS)
    parts = [f"layers.{i}" for i in range(NUM_LAYERS)]
    cuts = [NUM_LAYERS * i // num_stages for i in range(num_stages + 1)]
    names = [parts[a:b] for a, b in pairwise(cuts)]
    return [["tok_embeddings", *names[0]], *names[1:-1], [*names[-1], "norm", "lm_head"]]


if not HAS_TORCHTITAN:

    def split_module(whole, names):
        """Return a copy of a model with these modules alone."""
        part = copy.deepcopy(whole)
        for name in ("tok_embeddings", "norm", "lm_head"):
            if name not in names:
                setattr(part, name, None)
        for number in [n for n in part.layers if f"layers.{n}" not in names]:
            del part.layers[number]
        return part


def shard(part):
    """Apply FSDP2 to the layers of a stage, then to the stage, as torchtitan does."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*part.layers.values(), part):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)


def stages_of(schedule, *, has_graphs):
    """Return this rank's stages of a new model."""
    is_single = issubclass(get_schedule_class(schedule), PipelineScheduleSingle)
    num_stages = num_ranks if is_single else 2 * num_ranks
    whole = new_model().to(device)
    stages = []
    for i in [rank] if is_single else [rank, num_stages - 1 - rank]:
        part = split_module(whole, module_names(num_stages)[i])
        options = {}
        if IS_SHARDED:
            shard(part)
            if not has_graphs:
                # Torch 2.15 loses gradients of sharded stages whose backward it splits. With this
                # the whole backward runs where the input gradient is due.
                options["dw_builder"] = lambda: lambda: None
        group = mesh.get_group("pp")
        stages.append(PipelineStage(part, i, num_stages, device, group=group, **options))
    return stages


def loss_fn(logits, labels):
    """Sum over tokens, as a share of all tokens of a step."""
    logits, labels = logits.flatten(0, 1).float(), labels.flatten()
    total = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return total / (NUM_MICROBATCHES * SEQUENCE)


def train(schedule, *, has_graphs):
    """Train a few steps; return the losses, which only the rank of the last stage has."""
    stages = stages_of(schedule, has_graphs=has_graphs)
    cls = get_schedule_class(schedule)
    local = stages[0] if issubclass(cls, PipelineScheduleSingle) else stages

    def make(count):
        return cls(local, count, loss_fn=loss_fn, scale_grads=False)

    graphed = GraphedSchedule(stages, make, (NUM_MICROBATCHES,)) if has_graphs else None
    step = (graphed or make(NUM_MICROBATCHES)).step
    optimizer = torch.optim.AdamW([p for s in stages for p in s.submod.parameters()], lr=0.01)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    every_loss = []
    for _ in range(NUM_STEPS):
        tokens = torch.randint(VOCABULARY, (NUM_MICROBATCHES, SEQUENCE + 1), generator=generator)
        tokens, losses = tokens.to(device), []
        args = [tokens[:, :-1]] if any(s.is_first for s in stages) else []
        is_last = any(s.is_last for s in stages)
        options = {"target": tokens[:, 1:], "losses": losses} if is_last else {}
        optimizer.zero_grad()
        step(*args, return_outputs=False, **options)
        optimizer.step()
        every_loss += [loss.detach() for loss in losses]
    return every_loss, graphed and graphed.graphs.counters


if dist.get_rank() == 0:
    print(
        f"torch {torch.__version__}, {'' if HAS_TORCHTITAN else 'without '}torchtitan: "
        f"{num_ranks} pipeline ranks, stages "
        + (f"sharded over {mesh['dp'].size()}" if IS_SHARDED else "not sharded: FSDP2 needs 2.15")
    )
same = True
for name in schedules:
    expected, _ = train(name, has_graphs=False)
    losses, counters = train(name, has_graphs=True)
    same = same and len(expected) == len(losses) and all(map(torch.equal, expected, losses))
    print(f"rank {dist.get_rank()}: {name}: {counters}; losses equal to eager: {same}")
dist.destroy_process_group()
raise SystemExit(not same)
