"""Pretrain a GPT with Megatron's own training program, in the shape of its ``pretrain_gpt.py``.

It takes Megatron's flags and knows nothing of chunk graphs; run it by itself, or with

    chunkgraph launch scripts/pretrain_gpt.py FLAGS --cuda-graph-granularity chunk

``--exact-log FILE`` (ours) appends each logged loss, gradient norm and loss scale in hexadecimal;
``--mock-data`` trains on Megatron's synthetic tokens; ``--sft`` on conversations, several packed
into a sample and each attended to alone (0.19). Needs megatron-core 0.18 or newer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import (
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
)

Losses = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the script's own flags."""
    group = parser.add_argument_group("this script")
    group.add_argument("--exact-log", metavar="FILE", help="append losses in hexadecimal to FILE")
    return parser


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build the model chunk of one pipeline stage."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    use_te = args.transformer_impl == "transformer_engine"
    layer_spec: Any
    if args.spec is not None:
        layer_spec = import_module(args.spec)
    elif args.num_experts:
        layer_spec = get_gpt_decoder_block_spec(
            config, use_te, normalization=args.normalization, vp_stage=vp_stage
        )
    elif use_te:
        layer_spec = get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=args.qk_layernorm, multi_latent_attention=args.multi_latent_attention
        )
    else:
        layer_spec = get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm,
            multi_latent_attention=args.multi_latent_attention,
            normalization=args.normalization,
        )
    prediction_spec = None
    if args.mtp_num_layers:
        prediction_spec = get_gpt_mtp_block_spec(config, layer_spec, use_te, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec,
        mtp_block_spec=prediction_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def get_batch(data: Iterator[dict[str, torch.Tensor]], vp_stage: int | None) -> dict[str, Any]:
    """Return one microbatch, or nothing on a stage between the first and the last.

    The first of the tensor-parallel ranks reads it and sends it to the others. With ``--sft`` every
    stage gets one, since attention on every stage needs the documents.
    """
    args = get_args()
    if not (args.sft or is_first_or_last_pipeline_stage(vp_stage)):
        return {}
    size = (args.micro_batch_size, args.seq_length)
    shapes = {
        "tokens": (size, torch.int64),
        "labels": (size, torch.int64),
        "position_ids": (size, torch.int64),
        "loss_mask": (size, torch.float32),
    }
    if args.sft:
        shapes["cu_seqlens"] = ((args.micro_batch_size, args.seq_length + 1), torch.int32)
        shapes["max_seqlen"] = ((args.micro_batch_size,), torch.int32)
    elif args.create_attention_mask_in_dataloader:
        mask = (args.micro_batch_size, 1, args.seq_length, args.seq_length)
        shapes["attention_mask"] = (mask, torch.bool)
    if mpu.get_tensor_model_parallel_rank() == 0:
        read = next(data)
        batch = {name: read[name].cuda(non_blocking=True) for name in shapes}
    else:
        batch = {
            name: torch.empty(shape, dtype=dtype, device="cuda")
            for name, (shape, dtype) in shapes.items()
        }
    if mpu.get_tensor_model_parallel_world_size() > 1:
        source, group = (
            mpu.get_tensor_model_parallel_src_rank(),
            mpu.get_tensor_model_parallel_group(),
        )
        for tensor in batch.values():
            torch.distributed.broadcast(tensor, source, group=group)
    if args.sft:
        from megatron.core.utils import flatten_batch_for_packed_sequences

        return documents_on_this_cp_rank(flatten_batch_for_packed_sequences(batch))
    if args.context_parallel_size == 1:
        return batch
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )


def documents_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """Keep the rows of each document that this context-parallel rank of C works on, in place.

    Every document is cut into 2 C pieces. Rank r has pieces r and 2 C - 1 - r, so that all ranks
    have the same share of causal attention; the data set pads documents for that. This is the rule
    of Transformer Engine's ``thd_get_partitioned_indices``, which needs a GPU.
    """
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    if size == 1:
        return batch
    starts, lengths = batch["cu_seqlens"][0, :-1].long(), batch["cu_seqlens"][0].diff().long()
    num_rows = batch["tokens"].shape[1] // size
    piece = lengths // (2 * size)
    begins = torch.stack([starts + rank * piece, starts + (2 * size - 1 - rank) * piece], 1)
    pieces = piece.repeat_interleave(2)
    ends = pieces.cumsum(0)
    shift = (begins.flatten() - (ends - pieces)).repeat_interleave(pieces, output_size=num_rows)
    rows = torch.arange(num_rows, device=shift.device) + shift
    for name in ("tokens", "labels", "position_ids", "loss_mask"):
        batch[name] = batch[name].index_select(1, rows)
    return batch


def packed_seq_params(batch: dict[str, Any]) -> PackedSeqParams | None:
    """Return the offsets of a microbatch's documents; None if they are not packed."""
    if "cu_seqlens" not in batch:
        return None
    offsets, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> Losses:
    """Return the masked sum of the losses, the number of tokens in it, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    for name, is_wrong in (("NaN", torch.isnan), ("Inf", torch.isinf)):
        if get_args().check_for_nan_in_loss_and_grad:
            get_rerun_state_machine().validate_result(
                loss, is_wrong, f"found {name} in local forward loss calculation"
            )
    report = torch.cat([loss.detach().clone().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(
    data: Iterator[dict[str, torch.Tensor]],
    model: torch.nn.Module,
    return_schedule_plan: bool = False,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Losses]]:
    """Run one microbatch through one model chunk, or plan that for overlapped transfers."""
    batch = get_batch(data, get_attr_wrapped_model(model, "vp_stage"))
    run: Any = model
    if return_schedule_plan:
        run = get_attr_wrapped_model(model, "build_schedule_plan")
    output = run(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
        packed_seq_params=packed_seq_params(batch),
    )
    return output, partial(loss_func, batch.get("loss_mask"))


def train_valid_test_datasets_provider(
    num_samples: list[int], vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """Build the three datasets on the ranks that read them."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader and not args.sft,
        **({"context_parallel_size": args.context_parallel_size} if args.sft else {}),
    )

    def reads_data() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and (
            args.sft or is_first_or_last_pipeline_stage(vp_stage)
        )

    kind = MockGPTDataset if args.mock_data else GPTDataset
    if args.sft:
        from megatron.training.datasets.sft_dataset import SFTDataset

        kind = SFTDataset
    datasets = BlendedMegatronDatasetBuilder(kind, num_samples, reads_data, config).build()
    return tuple(datasets)  # type: ignore[return-value]


# Every rank that reads data builds its own datasets.
train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def log_exactly(path: str) -> None:
    """Append the values that Megatron logs for every step to ``path``, in full precision."""
    from megatron.training import training

    log = training.training_log

    def training_log(losses: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        # Megatron passes all but the optional ones by position: ..., iteration, loss scale,
        # report memory, skipped, gradient norm.
        iteration, loss_scale, grad_norm = args[2], args[3], args[6]
        values = {name: float(value).hex() for name, value in losses.items()}
        rank = torch.distributed.get_rank()
        with open(f"{path}.rank{rank}", "a", encoding="utf-8") as file:
            numbers = f"{float(grad_norm or 0.0).hex()} {float(loss_scale or 0.0).hex()}"
            file.write(f"{iteration} {numbers} {values}\n")
        return log(losses, *args, **kwargs)

    training.training_log = training_log


if __name__ == "__main__":
    arguments = parse_and_validate_args(
        extra_args_provider=add_arguments, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
    if arguments.exact_log:
        log_exactly(arguments.exact_log)
    pretrain(
        pretrain_cfg_container_from_args(arguments),
        train_valid_test_datasets_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        model_provider=model_provider,
    )
