"""Attach graphs to Megatron-core's GPTModel and schedule in a training loop of your own.

    torchrun --nproc-per-node 2 examples/megatron_attach.py

Runs on CPUs: `cpu_host` stands in for the GPU, and the model has Megatron's local layers. On GPUs,
leave it out, use NCCL and Transformer Engine's layers.
"""

import torch
import torch.distributed as dist

from chunkgraph.megatron import attach
from chunkgraph.megatron.cpu.host import cpu_host

SEQUENCE, VOCABULARY, COUNTS = 16, 64, (4, 6, 3)


def loss_of(losses):
    """Return the mean over the tokens, and the values to log."""
    loss = losses.mean()
    return loss, {"loss": loss.detach().clone()}  # Megatron divides the loss in place


def forward_step(batches, model):
    """Run one microbatch, as in Megatron's pretrain scripts."""
    tokens = next(batches)
    positions = torch.arange(SEQUENCE).expand_as(tokens)
    return model(tokens, positions, None, labels=tokens.roll(-1, 1)), loss_of


def main():
    """Train a small GPT in two stages."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        pipeline_model_parallel_size=dist.get_world_size(),
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    graphs = attach([model])
    forward_backward = graphs.wrap_forward_backward(get_forward_backward_func())
    generator = torch.Generator().manual_seed(0)
    for count in COUNTS:
        tokens = torch.randint(VOCABULARY, (count, 2, SEQUENCE), generator=generator)
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(tokens),
            model=[model],
            num_microbatches=count,
            seq_length=SEQUENCE,
            micro_batch_size=2,
        )
        optimizer.step()
        if losses:
            print(f"loss {sum(one['loss'].item() for one in losses) / count:.4f}")
    print(f"rank {dist.get_rank()}: {graphs.counters}")
    graphs.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    with cpu_host():
        main()
