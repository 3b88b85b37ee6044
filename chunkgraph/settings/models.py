"""The settings of a training run as pydantic models, with Megatron's names for Megatron's settings.

A setting is a field of a section: its docstring is its help, and its type holds bounds and choices.
Loading, errors, flags, the documentation's table and the JSON schema follow from the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, StrictBool
from pydantic_core import PydanticCustomError

from chunkgraph._text import parse_bytes
from chunkgraph.packing import ContextLimits
from chunkgraph.packing.seq_counts import default_seq_buckets

if TYPE_CHECKING:
    from chunkgraph.settings.loader import Config

_END = 2**63
Count = Annotated[int, Field(strict=True, gt=0, lt=_END)]
Natural = Annotated[int, Field(strict=True, ge=0, lt=_END)]
Positive = Annotated[float, Field(strict=True, gt=0)]
NotNegative = Annotated[float, Field(strict=True, ge=0)]


def _is_size(text: str) -> str:
    if not parse_bytes(text):
        raise PydanticCustomError("size", "Text should be a size like 80GiB or 80GB")
    return text


Size = Annotated[str, AfterValidator(_is_size)]


@dataclass(frozen=True)
class Flag:
    """Mark a setting with the flag that chunkgraph adds to a pretrain script."""

    name: str


@dataclass(frozen=True)
class Needs:
    """Mark a setting with the dotted path of the one without which it has no effect."""

    path: str


class Section(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        str_max_length=4096,
        use_attribute_docstrings=True,
        defer_build=True,  # commands that read no file start faster
    )
    switch: ClassVar[str | None] = None
    """Setting of this section without which all others have no effect."""


class ModelConfig(Section):
    """The GPT or hybrid model to train."""

    num_layers: Count
    """Number of layers in the whole model, over all pipeline stages."""
    hidden_size: Count
    """Width of the residual stream, in elements."""
    ffn_hidden_size: Count
    """Width of the feed-forward layer, in elements."""
    num_attention_heads: Count
    """Number of attention heads per layer, over all tensor-parallel ranks."""
    seq_length: Count
    """Number of tokens per sequence."""
    vocab_size: Count = 264
    """Rows of the embedding. The built-in text needs 257, for bytes and the end of a document."""
    swiglu: StrictBool = False
    """Use gated SiLU instead of GELU in the feed-forward layer."""
    untie_embeddings_and_output_weights: StrictBool = True
    """Give the output layer its own weights."""
    params_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and activations. Gradients accumulate in float32."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Activations to recompute in the backward pass instead of saving: every layer (full), the
    parts of a layer in recompute_modules (selective), or none (null)."""
    recompute_modules: Annotated[tuple[str, ...], Strict(False)] = ("core_attn",)
    """With selective recomputation: core_attn, mlp, layernorm, and any other part that the
    installed Megatron-core offers."""
    fp8: Literal["hybrid", "e4m3"] | None = None
    """FP8 format for the matrix products of layers: E4M3 with E5M2 for gradients (hybrid), E4M3
    only, or no FP8 (null). Needs Transformer Engine's layers."""
    fp8_recipe: Annotated[Literal["delayed", "tensorwise", "blockwise"], Needs("model.fp8")] = (
        "delayed"
    )
    """With fp8, where scales come from: earlier microbatches (delayed), the tensor itself
    (tensorwise), or each block of it (blockwise)."""
    hybrid_layer_pattern: str | None = None
    """Layers of a hybrid model, one character each: M (Mamba-2), * (attention), - (feed-forward),
    E (experts); | between all pipeline stages, or none. num_layers counts them. Null: a GPT."""
    layer_spec: str = "auto"
    """Layers: local, transformer_engine, auto (local on a CPU, transformer_engine on a GPU), or
    package.module:function that returns a Megatron module spec. Hybrid ones are never local."""
    transformer_config: dict[str, Any] = {}
    """More fields of Megatron's TransformerConfig, such as normalization or moe_layer_freq. They
    replace values that follow from other settings. Dropout is 0 unless set here."""


class PipelineConfig(Section):
    """How the model is distributed over ranks."""

    pipeline_model_parallel_size: Count = 1
    """Number of pipeline ranks, which split the layers."""
    virtual_pipeline_model_parallel_size: Count | None = None
    """Model chunks per rank. Null: 1."""
    microbatch_group_size_per_vp_stage: Count | None = None
    """Microbatches that pass through a chunk before the next chunk runs. Null: the pipeline size,
    Megatron's default."""
    schedule: Annotated[str, Flag("--pipeline-schedule")] = "auto"
    """Schedule of training steps: a name that chunkgraph plan --help lists, or a CSV file of
    actions. auto: Megatron's own."""
    tensor_model_parallel_size: Count = 1
    """Number of tensor-parallel ranks, which split each layer."""
    sequence_parallel: StrictBool = False
    """Split the sequence over tensor-parallel ranks where a layer is not split otherwise. Needs
    Transformer Engine's layers."""
    context_parallel_size: Count = 1
    """Number of context-parallel ranks, which split each sequence. Needs Transformer Engine's
    layers."""
    data_parallel_size: Count = 1
    """Number of copies of the model, each with its own data."""
    expert_model_parallel_size: Annotated[Count, Needs("moe.num_moe_experts")] = 1
    """Number of data-parallel ranks that split the experts between them."""

    @property
    def num_model_chunks(self) -> int:
        """Return the number of model chunks on each rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def microbatch_group_size(self) -> int:
        """Return the microbatches of a group, with the default applied."""
        return self.microbatch_group_size_per_vp_stage or self.pipeline_model_parallel_size

    @property
    def world_size(self) -> int:
        """Return the number of processes of the run."""
        return (
            self.pipeline_model_parallel_size
            * self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
        )


class ExpertConfig(Section):
    """The experts that replace feed-forward layers (mixture of experts)."""

    switch = "num_moe_experts"

    num_moe_experts: Count | None = None
    """Experts per layer, over all expert-parallel ranks. Null: no experts."""
    moe_router_topk: Count = 2
    """Experts per token."""
    moe_ffn_hidden_size: Count | None = None
    """Width of each expert, in elements. Null: model.ffn_hidden_size."""
    moe_expert_capacity_factor: Positive | None = None
    """Capacity of an expert, as a multiple of its tokens under even load; its input is padded to
    it. num_moe_experts / moe_router_topk has room for all tokens. Null: dropless, as with flex."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach the ranks of their experts. flex: by DeepEP's HybridEP, with a router in
    float32."""
    moe_expert_rank_capacity_factor: Positive | None = None
    """With flex, rows for all experts of a rank, as a multiple of a microbatch's tokens times
    moe_router_topk. A step that needs more runs again. Null: by the loads of eager steps."""
    moe_aux_loss_coeff: NotNegative = 0.0
    """Weight of the loss that balances the load of experts."""
    token_drops: Annotated[
        Literal["warn", "count", "raise", "rerun"], Flag("--cuda-graph-token-drops")
    ] = "warn"
    """What to do about tokens that an expert with a capacity drops: warn once, and refuse factors
    below 1; only count them; raise an error; or rerun the step eagerly and recapture with room."""


class TrainConfig(Section):
    """The training steps."""

    num_microbatches: Annotated[tuple[Count, ...], Strict(False)]
    """Microbatches of each step, per data-parallel rank. The length of the list is the number of
    steps."""
    micro_batch_size: Count = 1
    """Sequences per microbatch."""
    seed: Natural = 1234
    """Seed for the initial weights, dropout and the order of the data."""
    lr: Positive = 1e-3
    """Learning rate of Adam."""
    compare: Literal["eager", "none"] = "eager"
    """Also train the same steps eagerly and compare every bit (eager), or do not (none)."""
    overlap_grad_reduce: StrictBool = False
    """Reduce gradients while the backward pass runs."""
    gradient_accumulation_fusion: StrictBool = False
    """Accumulate weight gradients into main_grad in the GEMM. Needs Transformer Engine or APEX."""
    use_distributed_optimizer: StrictBool = False
    """Shard the optimizer state over the data-parallel ranks."""
    overlap_param_gather: StrictBool = False
    """Gather parameters of a sharded optimizer while the next forward runs."""
    deterministic: StrictBool = True
    """Use only kernels whose results repeat to the last bit."""


class DataConfig(Section):
    """The training text."""

    path: str | None = None
    """Text file, read as bytes; blank lines separate documents. Null: the text that ships with the
    package."""


class PackingConfig(Section):
    """Documents of any length, packed into microbatches of one shape without mixing."""

    switch = "max_packed_seqs"

    max_packed_seqs: Annotated[Natural, Flag("--cuda-graph-max-packed-seqs")] = 0
    """Sequences per packed microbatch: its documents, and one for the tokens that remain. Steps
    with more run eagerly."""
    max_packed_tokens: Annotated[Count | None, Flag("--cuda-graph-max-packed-tokens")] = None
    """Rows per packed microbatch; with context_parallel_sizes, rows per rank. Null:
    model.seq_length."""
    buckets: Annotated[
        tuple[Positive, ...], Strict(False), Flag("--cuda-graph-packed-buckets")
    ] = ()
    """Shorter microbatches to capture as well, as fractions of the rows or as numbers of rows."""
    seq_buckets: Annotated[tuple[Natural, ...], Strict(False)] | None = None
    """Smaller sequence counts to capture as well. Null: powers of two from 64 (32 for at most 1024
    rows per rank) to half of max_packed_seqs."""
    context_parallel_sizes: Annotated[
        tuple[int, ...], Strict(False), Flag("--cuda-graph-cp-sizes")
    ] = ()
    """Numbers of data-parallel ranks that may share a microbatch, powers of two. It uses the
    smallest that holds its documents."""

    def limits(
        self, seq_length: int, world_size: int, multiple_of: int, *, counts_padding: bool
    ) -> ContextLimits:
        """Return the limits of schedules with these context-parallel sizes; see `ContextLimits`."""
        return ContextLimits(
            world_size=world_size,
            max_tokens_per_rank=self.max_packed_tokens or seq_length,
            max_packed_seqs=self.max_packed_seqs,
            sizes=self.context_parallel_sizes,
            multiple_of=multiple_of,
            counts_padding=counts_padding,
        )


class CaptureConfig(Section):
    """How chunks are captured."""

    enabled: StrictBool = True
    """Capture chunks as graphs. False trains eagerly through the same code."""
    scope: Annotated[Literal["auto", "block", "chunk"], Flag("--cuda-graph-chunk-scope")] = "auto"
    """What a graph holds: the transformer block, or the whole chunk with embedding, output layer
    and loss. auto: the chunk if possible, and the norm, clipping and cast of the optimizer too."""
    num_warmup_steps: Natural = 1
    """Eager training steps before the capture."""
    max_slot_memory: Annotated[Size | None, Flag("--cuda-graph-max-slot-memory")] = None
    """Most memory of a rank's slots (20GiB); the rest moves to the host."""
    verify: Annotated[Literal["none", "poison", "shadow"], Flag("--cuda-graph-verify")] = "none"
    """How to check replays, slowly: fill freed memory with NaN (poison), or compare every replay
    with an eager pass (shadow)."""
    on_failure: Annotated[Literal["raise", "eager"], Flag("--cuda-graph-on-failure")] = "raise"
    """After a capture that failed on any rank: raise the error, or train eagerly."""

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments of the engine's ``CaptureOptions``."""
        return self.model_dump(exclude={"enabled", "scope"})

    @property
    def captures_optimizer(self) -> bool:
        """Tell whether the optimizer's step is captured too."""
        return self.scope == "auto"


class StashConfig(Section):
    """Pages for the activations that experts save, only for rows that hold a token."""

    switch = "enabled"

    enabled: Annotated[StrictBool, Flag("--cuda-graph-stash")] = False
    """Keep what experts save in pages, for rows with a token."""
    initial_bytes: Natural | None = None
    """Bytes of pages to begin with. Null: 1.1 times what the eager steps before the capture
    used."""
    max_bytes: Natural | None = None
    """Bytes that the pages may grow to. Null: no limit."""


class RunConfig(Section):
    """The processes of the run."""

    timeout_s: Annotated[Positive, Field(le=10**9)] = 120.0
    """Longest time in seconds for a collective, or for a worker that reports nothing."""


class Settings(Section):
    """All settings of a run, not checked against each other; see `Config`."""

    device: Literal["cpu", "cuda", "auto"] = "auto"
    """Device to train on. auto: cuda where there is a GPU, otherwise cpu."""
    model: ModelConfig
    train: TrainConfig
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    moe: ExpertConfig = Field(default_factory=ExpertConfig)
    stash: StashConfig = Field(default_factory=StashConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    packing: PackingConfig = Field(default_factory=PackingConfig)
    capture: CaptureConfig = Field(default_factory=CaptureConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    @property
    def tokens_per_sequence(self) -> int:
        """Return the tokens of a sequence in the pipeline, packed or not."""
        packed_tokens = self.packing.max_packed_tokens if self.packing.max_packed_seqs else None
        return packed_tokens or self.model.seq_length


def derived_fields(config: Settings) -> dict[str, Any]:
    """Return fields of Megatron's TransformerConfig that are not settings.

    They follow from settings, unless ``model.transformer_config`` has them.
    """
    model, moe = config.model, config.moe
    fields: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    if model.recompute_granularity == "full":
        fields |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if moe.num_moe_experts is not None:
        is_flex = moe.moe_token_dispatcher_type == "flex"
        has_budget = moe.moe_expert_rank_capacity_factor is not None and config.capture.enabled
        # Megatron's local experts have no grouped GEMM on a CPU.
        if model.layer_spec != "local" and config.device != "cpu":
            fields["moe_grouped_gemm"] = True
        # The softmax over one chosen expert is always 1, so the router would not train.
        if moe.moe_router_topk == 1:
            fields["moe_router_pre_softmax"] = True
        if is_flex:
            fields |= {"moe_flex_dispatcher_backend": "hybridep", "moe_router_dtype": "fp32"}
        if is_flex and has_budget:  # Megatron asks for it
            fields["use_transformer_engine_op_fuser"] = True
        if moe.moe_expert_capacity_factor is not None and not is_flex:
            fields["moe_pad_expert_input_to_capacity"] = True
    return fields | model.transformer_config


def resolved(config: Config) -> Config:
    """Return an equivalent configuration with derived defaults filled in.

    Null stays where it means "none" (no limit, no experts), and values that depend on the machine
    stay automatic (``device: auto``, and the layers that follow from it).
    """
    model, moe, packing, pipeline = config.model, config.moe, config.packing, config.pipeline
    changes: dict[str, dict[str, Any]] = {
        "pipeline": {
            "virtual_pipeline_model_parallel_size": pipeline.num_model_chunks,
            "microbatch_group_size_per_vp_stage": pipeline.microbatch_group_size,
        }
    }
    if model.layer_spec == "auto" and config.device != "auto":
        spec = "local" if config.device == "cpu" else "transformer_engine"
        changes["model"] = {"layer_spec": spec}
    if moe.num_moe_experts is not None and moe.moe_ffn_hidden_size is None:
        changes["moe"] = {"moe_ffn_hidden_size": model.ffn_hidden_size}
    if packing.max_packed_seqs:
        rows, seq_buckets = config.tokens_per_sequence, packing.seq_buckets
        if seq_buckets is None:
            # With context_parallel_sizes, rows are those of a rank, and this size is 1.
            size = pipeline.context_parallel_size
            seq_buckets = default_seq_buckets(packing.max_packed_seqs, rows, size, packing.buckets)
        changes["packing"] = {"max_packed_tokens": rows, "seq_buckets": seq_buckets}
    return config.replace(**changes)
