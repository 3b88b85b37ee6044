"""``scripts/pretrain_gpt.py`` with a hybrid model.

With ``--transformer-impl transformer_engine`` it has Megatron's layers; otherwise a stand-in
replaces Mamba's kernels.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from chunkgraph.megatron.core.model_kinds import HybridNames

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> HybridModel:
    """Build the model chunk of one pipeline stage."""
    args = get_args()
    return HybridModel(
        config=config or core_transformer_config_from_args(args),
        hybrid_stack_spec=_stack_spec(args.transformer_impl),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def _stack_spec(implementation: str) -> Any:
    if implementation == "transformer_engine":
        return HybridNames().transformer_engine_spec()
    import mamba_stand_in

    return mamba_stand_in.packed()


def packed_seq_params(batch: dict[str, Any]) -> PackedSeqParams:
    """Make the parameters with the number of rows, from which Megatron computes their documents."""
    offsets, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"].item())
    num_rows = batch["tokens"].numel()
    return PackedSeqParams("thd", *[offsets] * 2, None, None, *[longest] * 2, total_tokens=num_rows)


def main() -> None:
    """Run the script's main with the two functions above instead of its own."""
    spec = importlib.util.spec_from_file_location("pretrain_gpt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.packed_seq_params = packed_seq_params
    arguments = parse_and_validate_args(
        extra_args_provider=script.add_arguments,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
    if arguments.exact_log:
        script.log_exactly(arguments.exact_log)
    pretrain(
        pretrain_cfg_container_from_args(arguments),
        script.train_valid_test_datasets_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=script.forward_step,
        model_provider=model_provider,
    )


if __name__ == "__main__":
    main()
