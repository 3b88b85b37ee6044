"""The sections of a configuration, with Megatron's names where the meaning is Megatron's.

A docstring under each field says what it is and in which unit. Sizes are counts of the thing named
unless another unit is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from chunkgraph.packing.seq_counts import default_seq_buckets
from chunkgraph.settings.stash import StashConfig

__all__ = [
    "BenchConfig",
    "CaptureConfig",
    "Config",
    "DataConfig",
    "ExpertConfig",
    "ModelConfig",
    "PackingConfig",
    "PipelineConfig",
    "RunConfig",
    "StashConfig",
    "TrainConfig",
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The GPT or hybrid model that is trained."""

    num_layers: int
    """Layers of the whole model, all stages together."""
    hidden_size: int
    """Width of the residual stream, in elements."""
    ffn_hidden_size: int
    """Width of the feed-forward layer, in elements."""
    num_attention_heads: int
    """Attention heads of each layer, all tensor-parallel ranks together."""
    seq_length: int
    """Tokens of each packed sequence."""
    vocab_size: int = 264
    """Rows of the embedding: 256 bytes and the end of a document, rounded up to a multiple of 8."""
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    """How a token learns its position."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Normalization in front of attention and feed-forward."""
    swiglu: bool = False
    """Gated SiLU in the feed-forward layer instead of GELU."""
    hidden_dropout: float = 0.0
    """Probability that an element of a layer's output is dropped."""
    attention_dropout: float = 0.0
    """Probability that an attention weight is dropped."""
    untie_embeddings_and_output_weights: bool = True
    """Whether the output layer has weights of its own."""
    params_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and activations; gradients accumulate in float32."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Activations computed anew in the backward instead of kept: whole layers (``full``), the
    parts of a layer in ``recompute_modules`` (``selective``), or none (null)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With ``full``: groups of ``recompute_num_layers`` layers, all of them (``uniform``), or only
    so many layers of each chunk, one by one (``block``)."""
    recompute_num_layers: int | None = None
    """With ``full``: layers in a group, or of a chunk; see ``recompute_method``."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """With ``selective``: ``core_attn``, ``mlp``, ``layernorm`` and what else the installed
    Megatron-core offers."""
    fp8: Literal["hybrid", "e4m3"] | None = None
    """Matrix products of the layers in FP8: E4M3 with E5M2 for gradients (``hybrid``), E4M3 alone,
    or not at all (null). Needs Transformer Engine's layers."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise"] = "delayed"
    """With ``fp8``: where scales come from: earlier microbatches (``delayed``), the tensor itself
    (``tensorwise``), or each of its blocks (``blockwise``)."""
    hybrid_layer_pattern: str | None = None
    """Null for a GPT model. Otherwise the layers of a hybrid model, one sign each: ``M`` Mamba-2,
    ``*`` attention, ``-`` feed-forward, ``E`` experts; ``|`` between pipeline stages, all or none.
    ``num_layers`` counts all of them. Quote it in YAML, where ``*`` and ``-`` mean something."""
    mamba_state_dim: int = 128
    """Elements of a Mamba head's state for each of its ``mamba_head_dim``."""
    mamba_head_dim: int = 64
    """Width of a Mamba head, in elements."""
    mamba_num_groups: int = 8
    """Groups of Mamba heads that share what goes into and comes out of their states."""
    mamba_num_heads: int | None = None
    """Mamba heads of each layer; null: as many as make up twice ``hidden_size``."""
    layer_spec: str = "auto"
    """``local``, ``transformer_engine``, ``auto`` (the former on a CPU, the latter on a GPU), or
    ``package.module:function`` that returns a Megatron module spec: of a GPT layer, from whose
    attention and feed-forward a hybrid model takes its own, or of a whole hybrid stack."""


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """The experts that take the place of feed-forward layers (mixture of experts)."""

    num_moe_experts: int | None = None
    """Experts of a layer, all expert-parallel ranks together; null: no experts."""
    moe_router_topk: int = 2
    """Experts that each token goes to."""
    moe_ffn_hidden_size: int | None = None
    """Width of each expert, in elements; null is ``model.ffn_hidden_size``."""
    moe_expert_capacity_factor: float | None = None
    """Room of an expert, as a multiple of the tokens it would get if all got the same;
    ``num_moe_experts / moe_router_topk`` has room for all tokens. Null with flex."""
    moe_pad_expert_input_to_capacity: bool = True
    """Whether an expert's input is filled up to its room, so that its shape is fixed (not with
    flex)."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens get to the ranks of their experts."""
    moe_flex_dispatcher_backend: Literal["hybridep", "deepep"] | None = None
    """What ``flex`` dispatches with: DeepEP's HybridEP, or DeepEP within a node."""
    moe_expert_rank_capacity_factor: float | None = None
    """With flex, rows that the experts of a rank have room for together, as a multiple of the
    tokens of a microbatch times ``moe_router_topk``."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the loss that balances the experts' loads."""
    moe_z_loss_coeff: float | None = None
    """Weight of the loss that keeps the router's logits small; null: none."""
    moe_router_load_balancing_type: Literal[
        "aux_loss", "seq_aux_loss", "global_aux_loss", "none"
    ] = "aux_loss"
    """Over what loads are balanced: a microbatch, each sequence, or the microbatches of a step."""
    moe_layer_freq: tuple[int, ...] | None = None
    """For each layer 1 (experts) or 0 (feed-forward); null: experts in all."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of all shared experts together, in elements; null: no shared experts."""
    moe_router_enable_expert_bias: bool = False
    """Whether a bias that follows the loads takes part in the choice (with sigmoid scores)."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """What turns the router's logits into scores."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Type of the router's arithmetic; null is that of the model."""
    moe_router_pre_softmax: bool = False
    """Whether scores are taken over all experts, instead of over the chosen ones."""
    moe_router_num_groups: int | None = None
    """Groups of experts of which a token may only use some; null: no groups."""
    moe_router_group_topk: int | None = None
    """How many groups a token may use."""
    moe_grouped_gemm: bool = False
    """Whether the experts of a rank are multiplied together (Transformer Engine layers)."""
    use_transformer_engine_op_fuser: bool = False
    """Whether they are one operation of Transformer Engine, which takes the number of tokens of
    each expert from the device (flex)."""
    token_drops: Literal["warn", "count", "raise", "rerun"] = "warn"
    """What is done about tokens that an expert (with flex: a rank; raise and rerun alone) has
    no room for: count them and ``warn`` once (and
    refuse capacity factors below 1), ``count`` them, ``raise`` an error, or ``rerun`` the step
    eagerly with room for all and capture with more room from then on."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the model is spread over ranks."""

    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers between them."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Model chunks on each rank; null means 1."""
    microbatch_group_size_per_vp_stage: int | None = None
    """Microbatches that pass through a chunk before the next chunk's turn; null means the pipeline
    size, which is Megatron's own default."""
    tensor_model_parallel_size: int = 1
    """Ranks that share each layer between them."""
    sequence_parallel: bool = False
    """Whether those ranks also share the sequence where a layer is not split (normalization,
    dropout). Needs Transformer Engine's layers."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of each sequence between them. Needs Transformer Engine's
    layers."""
    data_parallel_size: int = 1
    """Copies of the whole model, each with data of its own."""
    expert_model_parallel_size: int = 1
    """Ranks, among the copies, that share the experts between them."""

    @property
    def num_model_chunks(self) -> int:
        """Model chunks on each rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def microbatch_group_size(self) -> int:
        """Microbatches in a group, with the default applied."""
        return self.microbatch_group_size_per_vp_stage or self.pipeline_model_parallel_size

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return (
            self.pipeline_model_parallel_size
            * self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The steps of the run."""

    num_microbatches: tuple[int, ...]
    """Microbatches of each step, for each data-parallel rank; the list's length is the number of
    steps."""
    micro_batch_size: int = 1
    """Sequences in a microbatch."""
    seed: int = 1234
    """Seed of the initial weights, the dropout and the order of the data."""
    lr: float = 1e-3
    """Adam's learning rate."""
    clip_grad: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it. 0 turns it off."""
    compare: Literal["eager", "none"] = "eager"
    """Whether the same steps are also trained eagerly and compared to the last bit."""
    use_ddp: bool = True
    """Whether chunks are wrapped in Megatron's DistributedDataParallel."""
    overlap_grad_reduce: bool = False
    """Whether DDP reduces gradients while the backward pass runs."""
    gradient_accumulation_fusion: bool = False
    """Whether Transformer Engine's layers add weight gradients to main_grad in the GEMM."""
    use_distributed_optimizer: bool = False
    """Whether the optimizer's state is spread over the data-parallel ranks."""
    overlap_param_gather: bool = False
    """Whether parameters that the sharded optimizer updated are gathered during the forward."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard scalars; null writes none."""
    deterministic: bool = True
    """Whether only kernels are used that repeat to the last bit."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text."""

    path: str | None = None
    """Text file, read as bytes, documents separated by blank lines; null is the text
    shipped with the package."""
    document_counts: tuple[int, ...] = ()
    """Documents of a microbatch, drawn from a distribution: how many 50%, 90%, 99% and all
    microbatches do not exceed, in stretches of the text of random lengths. Empty: whole documents
    of the text, as many as have room. Only with packing."""


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """Documents of any lengths in microbatches of one shape, each apart from the others."""

    max_packed_seqs: int = 0
    """Sequences of a microbatch: its documents and one for the rest of the tokens; 0 turns packing
    off. A step with a microbatch of more documents runs eagerly."""
    max_packed_tokens: int | None = None
    """Tokens of a microbatch; null is ``model.seq_length``. With ``context_parallel_sizes`` those
    that one rank holds."""
    max_document_tokens: int | None = None
    """Tokens of the longest document; null allows all of a microbatch's. A step with a longer one
    runs eagerly. Kernels are told the limit, which makes cuDNN's attention no faster; it takes more
    sequences for the rest of the tokens, on top of ``max_packed_seqs``."""
    pad_seq_to_mult: int = 1
    """Rows that each document is padded to a multiple of. With the block of rows that Mamba's
    kernels work on (Megatron: 128) no document moves another's last bits; half a block of each
    document is then padding, on average."""
    buckets: tuple[float, ...] = ()
    """Shorter microbatches that are captured too, as parts of the tokens or as numbers of tokens
    above 1; each microbatch takes the smallest that it fits."""
    seq_buckets: tuple[int, ...] | None = None
    """Fewer sequences than ``max_packed_seqs`` that are captured too; each microbatch takes the
    fewest that hold its documents, since attention's time grows with all of them, empty or not.
    Null: `default_seq_buckets`."""
    context_parallel_sizes: tuple[int, ...] = ()
    """How many of the data-parallel ranks may share a microbatch, powers of two. Each microbatch
    has one of these sizes; a step then takes the documents that ``num_microbatches`` of full length
    hold, in as many microbatches as its schedule makes of them. Empty: no sharing."""
    context_parallel_schedule: Literal["smallest", "random"] = "smallest"
    """Which size a microbatch gets: the ``smallest`` that holds its documents, or, to try graphs
    out, one at ``random`` by ``train.seed``."""
    cuda_graph_cp_sizes: tuple[int, ...] = ()
    """Of ``context_parallel_sizes``, those that are captured; steps with another run eagerly.
    Empty: all."""


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """How the chunks are captured."""

    enabled: bool = True
    """Whether chunks are captured at all; false trains eagerly through the same code."""
    scope: Literal["auto", "block", "chunk"] = "auto"
    """What is captured: the transformer block, or all of the model's forward (``chunk``), with the
    embedding on the first stage, and final norm, output layer and loss on the last; ``auto`` takes
    the latter where it can be captured."""
    num_warmup_steps: int = 1
    """Eager training steps before the capture session."""
    memory_plan: Literal["shared_temporaries", "shared_backward", "pool_per_slot"] = (
        "shared_backward"
    )
    """Where graphs keep their memory: all backwards in one scratch pool, or a pool per slot."""
    shared_slots: bool = False
    """Whether the chunks of a rank share its slots, as many as it ever has microbatches in flight:
    less memory in interleaved schedules, for graphs of every chunk in every slot."""
    memset_kernels: bool = True
    """Whether small memsets inside CUDA graphs run as kernels, for which the GPU waits less."""
    verify: Literal["none", "poison", "shadow"] = "none"
    """How replays are checked: ``poison`` fills freed slots and scratch with NaN, to expose a read
    of stale memory; ``shadow`` compares every replay with an eager pass on the same inputs."""
    num_verify_steps: int | None = None
    """Replayed steps after a capture that are verified; null: no end."""
    verify_every: int = 1
    """Of those, every so many."""
    on_failure: Literal["raise", "eager"] = "raise"
    """What a failed capture does once the model has been put back in order."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What ``chunkgraph bench`` measures; ``train.num_microbatches`` is gone through repeatedly."""

    num_warmup_steps: int = 3
    """Steps before the measured ones, captures included."""
    num_steps: int = 20
    """Measured steps."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The processes of the run."""

    timeout_s: float = 120.0
    """Longest time a collective, or a worker that reports nothing, may take, in seconds."""
    debug: bool = False
    """Whether errors show tracebacks and workers print their warnings."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run computes.

    Raises:
        ConfigError: A value is out of range, or two values cannot go together.
        TopologyError: The sizes cannot form a pipeline.
    """

    model: ModelConfig
    """The model."""
    train: TrainConfig
    """The steps."""
    name: str = "chunkgraph"
    """Name of the run, for headings and folders."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """Where to train; ``auto`` is ``cuda`` where there is a GPU."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """The ranks."""
    moe: ExpertConfig = field(default_factory=ExpertConfig)
    """The experts."""
    stash: StashConfig = field(default_factory=StashConfig)
    """What they save for the backward."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text."""
    packing: PackingConfig = field(default_factory=PackingConfig)
    """Its documents in a microbatch."""
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    """The graphs."""
    bench: BenchConfig = field(default_factory=BenchConfig)
    """The measurement."""
    run: RunConfig = field(default_factory=RunConfig)
    """The processes."""

    def __post_init__(self) -> None:
        from chunkgraph.settings.rules import check_config

        check_config(self)

    @property
    def seq_buckets(self) -> tuple[int, ...]:
        """Fewer sequences that are captured too, by ``packing.seq_buckets`` or by default."""
        packing = self.packing
        if packing.seq_buckets is not None:
            return packing.seq_buckets
        # With sizes that change, tokens are those of a rank, and this size is 1.
        return default_seq_buckets(
            packing.max_packed_seqs,
            self.tokens_per_sequence,
            self.pipeline.context_parallel_size,
            packing.buckets,
        )

    @property
    def tokens_per_sequence(self) -> int:
        """Tokens of a sequence in the pipeline; packed ones may have a length of their own."""
        packed = self.packing.max_packed_tokens if self.packing.max_packed_seqs else None
        return packed or self.model.seq_length
