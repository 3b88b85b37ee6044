"""Trains a small GPT with Megatron-Bridge on CPUs: ``bridge_pretrain.py FILE KIND``.

KIND is ``eager`` or ``chunk``. Each step's loss and gradient norm are added to FILE.rankN in
hexadecimal. Bridge imports Transformer Engine and other packages that need a GPU, though this model
uses none of them: stand-ins have any name that an import asks for.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from chunkgraph.megatron.cpu.pretrain import cpu_pretrain_host

_FUSIONS = ("gradient_accumulation_fusion", "persist_layer_norm", "bias_dropout_fusion")
_FUSIONS += ("masked_softmax_fusion", "apply_rope_fusion", "bias_activation_fusion")
_MASKS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
STAND_INS = ("transformer_engine", "transformer_engine_torch", "modelopt", "megatron.energon")
STAND_INS += ("nvidia_resiliency_ext", "wandb", "mlflow", "comet_ml", "flashinfer", "timm")
STAND_INS += ("open_clip", "qwen_vl_utils", "fla", "diffusers", "mistral_common")


class AnyName(type):
    """A class with any attribute, which is such a class too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (), {})


class StandIn(ModuleType):
    """A module with any name."""

    __version__ = "2.20.2"
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        return getattr(AnyName("StandIn", (), {}), name)


class Finder:
    """Finds the stand-ins."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Return a spec for a stand-in."""
        is_one = any(name == one or name.startswith(f"{one}.") for one in STAND_INS)
        return ModuleSpec(name, self, is_package=True) if is_one else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a stand-in."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


def import_core() -> None:
    """Import what looks for Transformer Engine, and must not find a stand-in."""
    import megatron.core.distributed
    import megatron.core.extensions
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer
    import megatron.core.transformer.cuda_graphs  # noqa: F401
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None  # the wheel has them built, and no Makefile


def configuration() -> Any:
    """Return a configuration of a small model, a stage on each rank."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as settings
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    model = GPTModelProvider(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        seq_length=16,
        vocab_size=64,
        make_vocab_size_divisible_by=64,
        pipeline_model_parallel_size=int(os.environ["WORLD_SIZE"]),
        pipeline_dtype=torch.float32,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        batch_p2p_comm=False,
        use_cpu_initialization=True,
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
        **dict.fromkeys(_FUSIONS, False),
    )
    return settings.ConfigContainer(
        model=model,
        train=settings.TrainingConfig(train_iters=4, global_batch_size=8, micro_batch_size=2),
        validation=settings.ValidationConfig(eval_interval=2, eval_iters=1),
        optimizer=settings.OptimizerConfig(
            lr=1e-3, min_lr=0.0, weight_decay=0.01, params_dtype=torch.float32
        ),
        scheduler=settings.SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
        ),
        ddp=settings.DistributedDataParallelConfig(use_distributed_optimizer=False),
        dataset=settings.MockGPTDatasetConfig(
            seq_length=16,
            random_seed=1234,
            num_workers=0,
            dataloader_type="single",
            **dict.fromkeys(_MASKS, False),
        ),
        logger=settings.LoggerConfig(log_interval=1),
        tokenizer=settings.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=63),
        checkpoint=settings.CheckpointConfig(use_persistent_ckpt_worker=False),
        rng=settings.RNGConfig(seed=1234),
        dist=settings.DistributedInitConfig(distributed_backend="gloo"),
    )


def main(file: str, kind: str) -> None:
    """Train, and record each step."""
    with cpu_pretrain_host():
        import_core()
        sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
        from megatron.bridge.training import eval as evaluation
        from megatron.bridge.training import train
        from megatron.bridge.training.callbacks import Callback
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        from chunkgraph.integrations.megatron_bridge import ChunkGraphsCallback

        # ModelOpt's own returns None too, unless it distills.
        for module in (train, evaluation):
            module.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None

        class Log(Callback):
            """Records each step."""

            def on_train_step_end(self, context: Any) -> None:
                values = [*(context.loss_dict or {}).values(), context.grad_norm]
                words = " ".join(float(value).hex() for value in values)
                with open(f"{file}.rank{os.environ['RANK']}", "a", encoding="utf-8") as log:
                    log.write(f"{words}\n")

        callbacks: list[Any] = [Log()]
        if kind == "chunk":
            graphs = ChunkGraphsCallback()

            class Counts(Callback):
                """Prints the counters before the graphs are detached."""

                def on_train_end(self, context: Any) -> None:
                    print(graphs.graphs.counters, flush=True)

            callbacks += [Counts(), graphs]
        pretrain(configuration(), forward_step, callbacks=callbacks)


if __name__ == "__main__":
    main(*sys.argv[1:])
