"""Estimate the memory of a plan from the sizes of a transformer.

This is an estimate for choosing sizes, not a measurement.

Activations follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", section 4: a layer saves ``s b h (34 + 5 a s / h)`` bytes in 16-bit without recomputation,
and with tensor parallel size t ``s b h (10 + 24 / t + 5 a s / (h t))``. Term by term, with e bytes
per element (e = 2 and ffn = 4 h give the paper's numbers):

- not split by t without sequence parallelism: two norm inputs, the inputs of attention and MLP,
  4 e h; two dropout masks, 2 h;
- split by t: queries, keys, values and the input of the output projection, 4 e h (fewer with
  grouped queries; latent attention also keeps its compressed tokens); the MLP's middles, 2 e ffn;
- attention scores, split by t: softmax, its dropout mask and its dropped output, (2 e + 1) a s.
  Flash attention keeps none of the three, only one 4-byte log-sum-exp per head and token.

In FP8 the inputs of linear layers are kept in one byte, and weights have copies for both products.
Recomputed modules keep their inputs, which are counted as outputs of what comes before.

Experts replace the MLP. The experts of a rank save as many rows as they have room for; every layer
is assumed to have experts if one has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import mul

from chunkgraph.errors import ConfigError, TopologyError

from .plan import SlotPlan

_LOG_SUM_EXP_BYTES = 4
_FLOAT_BYTES = 4
_KEYS_OF_PART = 256
_NUM_EXCHANGED = 4
"""Copies of the exchanged rows: by token, by rank, as received, by expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSizes:
    """The sizes of multi-latent attention, under Megatron's names.

    Attributes:
        q_lora_rank: Width of the compressed queries; None if queries are not compressed.
        kv_lora_rank: Width of the compressed keys and values.
        qk_head_dim: Width of a head of queries and keys, without its position part.
        qk_pos_emb_head_dim: Width of the position part.
        v_head_dim: Width of a head of values.
    """

    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    def num_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Return the parameters of one layer's attention."""
        queries = num_heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)
        rank = self.q_lora_rank
        of_queries = hidden_size * queries if rank is None else rank * (hidden_size + queries)
        compressed = hidden_size * (self.kv_lora_rank + self.qk_pos_emb_head_dim)
        restored = self.kv_lora_rank * num_heads * (self.qk_head_dim + self.v_head_dim)
        return of_queries + compressed + restored + num_heads * self.v_head_dim * hidden_size

    def width(self, num_heads: int, *, recomputes: bool) -> int:
        """Return the saved elements of one token.

        Args:
            num_heads: Number of heads.
            recomputes: Whether queries, keys and values are recomputed.
        """
        compressed = (self.q_lora_rank or 0) + self.kv_lora_rank + self.qk_pos_emb_head_dim
        restored = 2 * (self.qk_head_dim + self.qk_pos_emb_head_dim) + self.v_head_dim
        return compressed + num_heads * (self.v_head_dim + (0 if recomputes else restored))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSizes:
    """The experts of a layer on one rank.

    Attributes:
        num_experts: Number of experts of the layer on all ranks.
        num_local_experts: Number of them on this rank.
        top_k: Number of experts of each token.
        ffn_hidden_size: Middle width of one expert.
        shared_ffn_hidden_size: Middle width of the shared experts, 0 without them.
        num_optimizer_shards: Number of ranks that share the optimizer's state of the experts.
        room: Rows that the experts of a rank have room for, as a multiple of those of an even load.
    """

    num_experts: int
    num_local_experts: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    num_optimizer_shards: int = 1
    room: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """The sizes of a model that the estimate depends on.

    Attributes:
        num_layers: Number of transformer layers of the model, spread evenly over all stages.
        hidden_size: Width h.
        ffn_hidden_size: Middle width of the MLP.
        num_attention_heads: Number of heads a.
        seq_length: Number of tokens s of one sequence on one rank.
        micro_batch_size: Number of sequences b in one microbatch.
        vocab_size: Number of rows of the embedding.
        num_query_groups: Number of heads of keys and values; None for as many as of queries.
        head_size: Width of a head; None for ``hidden_size / num_attention_heads``.
        latent: Sizes of multi-latent attention, None without it.
        experts: Sizes of the experts, None without experts.
        bytes_per_element: Bytes e of one element of an activation or a parameter.
        gradient_bytes_per_element: Bytes of one element of an accumulated gradient; Megatron
            accumulates in fp32.
        optimizer_bytes_per_parameter: Bytes of the optimizer's state for one parameter: two
            moments, and an fp32 copy of a 16-bit parameter.
        num_optimizer_shards: Number of data-parallel ranks that share this state.
        tensor_parallel_size: Size t.
        has_sequence_parallel: Whether norms and dropout are split over the tensor-parallel ranks.
        has_flash_attention: Whether attention is fused, so that its scores are not saved.
        has_gated_mlp: Whether the MLP has a gate, a third matrix (SwiGLU).
        has_tied_embeddings: Whether the output layer shares the embedding's weights. A rank then
            holds them once; the first and the last rank both hold them.
        recompute_group_size: Number of layers that are recomputed together and keep only their
            input; None without recomputation.
        num_recomputed_layers: Number of recomputed layers of each chunk; None for all.
        recomputed_modules: Parts of all layers that are recomputed, under Megatron's names.
        num_mtp_layers: Number of layers that predict further tokens, all on the last stage.
        is_deterministic: Whether attention adds up its gradients in a fixed order.
        is_quantized: Whether linear layers multiply in FP8.
        has_quantized_weights: Whether their weights are FP8 without a copy of 16 bits.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    vocab_size: int
    num_query_groups: int | None = None
    head_size: int | None = None
    latent: LatentSizes | None = None
    experts: ExpertSizes | None = None
    bytes_per_element: int = 2
    gradient_bytes_per_element: int = 4
    optimizer_bytes_per_parameter: int = 12
    num_optimizer_shards: int = 1
    tensor_parallel_size: int = 1
    has_sequence_parallel: bool = False
    has_flash_attention: bool = True
    has_gated_mlp: bool = False
    has_tied_embeddings: bool = False
    recompute_group_size: int | None = None
    num_recomputed_layers: int | None = None
    recomputed_modules: frozenset[str] = frozenset()
    num_mtp_layers: int = 0
    is_deterministic: bool = False
    is_quantized: bool = False
    has_quantized_weights: bool = False

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool)
            if is_count and value < 1 and name != "num_mtp_layers":
                raise ConfigError(f"model: {name} is {value}, but must be at least 1")

    @property
    def hidden_bytes(self) -> int:
        """Return the bytes of one hidden-state tensor of one microbatch."""
        tokens = self.seq_length * self.micro_batch_size
        return self._split(tokens * self.hidden_size * self.bytes_per_element, self._num_splits)

    @property
    def layer_activation_bytes(self) -> int:
        """Return the bytes that one layer saves for its backward, for one microbatch."""
        tokens = self.seq_length * self.micro_batch_size
        hidden, element = self.hidden_size, self.bytes_per_element
        norms = 0 if "layernorm" in self.recomputed_modules else element
        whole = hidden * (2 * element + 2 * min(norms, self._input_bytes) + 2)
        split = element * self._attention_width + self._mlp_bytes
        if self.is_quantized:  # the output projection's input is also attention's output
            split += hidden * self._input_bytes
        if self.has_flash_attention:
            split += _LOG_SUM_EXP_BYTES * self.num_attention_heads
        else:
            split += (2 * element + 1) * self.num_attention_heads * self.seq_length
        of_split = self._split(tokens * split, self.tensor_parallel_size)
        return self._split(tokens * whole, self._num_splits) + of_split

    @property
    def layer_forward_bytes(self) -> int:
        """Return the bytes that the forward of a recomputed layer holds at its peak."""
        of_mlp = self.seq_length * self.micro_batch_size * self._mlp_bytes
        return 4 * self.hidden_bytes + self._split(of_mlp, self.tensor_parallel_size)

    @property
    def attention_scratch_bytes(self) -> int:
        """Return the bytes of the parts that deterministic flash attention adds up for a gradient.

        Each part is of all queries in float32 and of 256 keys, which fits benchmarks on an H200.
        """
        if not (self.is_deterministic and self.has_flash_attention):
            return 0
        width = self.num_attention_heads * (self.head_size or 0) or self.hidden_size
        part_bytes = self.seq_length * self.micro_batch_size * width * _FLOAT_BYTES
        num_parts = -(-self.seq_length // _KEYS_OF_PART)
        return self._split(num_parts * part_bytes, self.tensor_parallel_size)

    @property
    def exchange_bytes(self) -> int:
        """Return the bytes of a layer's rows on their way between the ranks of its experts."""
        experts = self.experts
        if experts is None or experts.num_local_experts >= experts.num_experts:
            return 0
        num_rows = self.seq_length * self.micro_batch_size * experts.top_k * experts.room
        row_bytes = self.hidden_size * self.bytes_per_element
        return self._split(_NUM_EXCHANGED * math.ceil(num_rows) * row_bytes, self._num_splits)

    @property
    def logit_bytes(self) -> int:
        """Return the bytes of the logits of one microbatch, as they are and in float32."""
        num_logits = self.seq_length * self.micro_batch_size * self.vocab_size
        num_bytes = self.bytes_per_element + (
            _FLOAT_BYTES if self.bytes_per_element < _FLOAT_BYTES else 0
        )
        return self._split(num_logits * num_bytes, self.tensor_parallel_size)

    @property
    def num_layer_parameters(self) -> int:
        """Return the parameters of a layer on a tensor-parallel rank, without biases and norms."""
        return self.num_shared_parameters + self.num_expert_parameters

    @property
    def num_shared_parameters(self) -> int:
        """Return the parameters outside of the experts."""
        if self.latent is not None:
            attention = self.latent.num_parameters(self.hidden_size, self.num_attention_heads)
        else:
            attention = self.hidden_size * self._attention_width
        mlp, router = self.ffn_hidden_size, 0
        if self.experts is not None:
            mlp = self.experts.shared_ffn_hidden_size
            router = self.hidden_size * self.experts.num_experts
        split = attention + self._num_mlp_matrices * self.hidden_size * mlp
        return self._split(split, self.tensor_parallel_size) + router

    @property
    def num_expert_parameters(self) -> int:
        """Return the parameters of a layer's experts on one rank."""
        if self.experts is None:
            return 0
        of_one = self._num_mlp_matrices * self.hidden_size * self.experts.ffn_hidden_size
        return self.experts.num_local_experts * of_one

    @property
    def copy_bytes_per_weight(self) -> int:
        """Return the bytes of the FP8 copies of a linear layer's weight, less what they replace."""
        if not self.is_quantized:
            return 0
        return 2 - (self.bytes_per_element if self.has_quantized_weights else 0)

    @property
    def _num_splits(self) -> int:
        return self.tensor_parallel_size if self.has_sequence_parallel else 1

    @property
    def _num_mlp_matrices(self) -> int:
        return 3 if self.has_gated_mlp else 2

    @property
    def _attention_width(self) -> int:
        """Queries, keys, values and the input of the output projection, elements of a token."""
        if self.latent is not None:
            recomputes = "mla_up_proj" in self.recomputed_modules
            return self.latent.width(self.num_attention_heads, recomputes=recomputes)
        if self.head_size is None and self.num_query_groups is None:
            return 4 * self.hidden_size
        head_size = self.head_size or self.hidden_size // self.num_attention_heads
        num_groups = self.num_query_groups or self.num_attention_heads
        return 2 * head_size * (self.num_attention_heads + num_groups)

    @property
    def _input_bytes(self) -> int:
        """Bytes of one element of a linear layer's input."""
        return 1 if self.is_quantized else self.bytes_per_element

    @property
    def _mlp_bytes(self) -> int:
        """Bytes that the MLP or the experts save of one token."""

        def middle(ffn_hidden_size: int, *modules: str) -> int:
            if not self.recomputed_modules.isdisjoint(modules):
                return 0
            inputs = 0 if "moe_act" in self.recomputed_modules else self._input_bytes
            outputs = (self._num_mlp_matrices - 1) * self.bytes_per_element
            return ffn_hidden_size * (outputs + inputs)

        experts = self.experts
        if experts is None:
            return middle(self.ffn_hidden_size, "mlp")
        if "moe" in self.recomputed_modules:
            return 0
        rows = self.hidden_size * self._input_bytes + middle(experts.ffn_hidden_size)
        shared = middle(experts.shared_ffn_hidden_size, "shared_experts")
        return math.ceil(experts.room * experts.top_k * rows) + shared

    @staticmethod
    def _split(total: int, num_parts: int) -> int:
        return -(-total // num_parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Estimated bytes on one rank.

    Attributes:
        slot_bytes_per_chunk: Bytes of one slot of each chunk: saved activations, input and output.
        slot_bytes: Bytes of all slots of all chunks.
        scratch_bytes: Bytes that are dead at the end of every graph and that all graphs share.
        parameter_bytes: Bytes of the weights, including the embedding on the first rank and the
            output layer on the last.
        gradient_bytes: Bytes of the accumulated gradients of these weights.
        optimizer_bytes: Bytes of the optimizer's state: Adam's moments, and float32 weights of
            16-bit ones.
        logit_bytes: Bytes of one microbatch's logits on the last rank, as they are and in float32.
    """

    slot_bytes_per_chunk: tuple[int, ...]
    slot_bytes: int
    scratch_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    logit_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return the sum of all bytes."""
        of_weights = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return self.slot_bytes + self.scratch_bytes + self.logit_bytes + of_weights


def estimate_memory(plan: SlotPlan, model: ModelSizes) -> MemoryEstimate:
    """Estimate the memory of a plan on one rank.

    Context parallelism only reduces the tokens on a rank. A slot also holds its chunk's output (the
    first norm saves the input) and, if layers are recomputed, room for the forward of one. Scratch
    is roughly the gradients of one layer's (or recomputed group's) activations and of one layer's
    weights, and what attention adds up. Of embedding, output layer and loss only the logits are
    counted, once.

    Args:
        plan: Plan of the rank.
        model: Sizes of the model.

    Raises:
        TopologyError: The layers cannot be spread evenly over the stages.
    """
    num_stages = plan.num_ranks * plan.num_chunks
    if model.num_layers % num_stages:
        raise TopologyError(
            f"{model.num_layers} layers cannot be spread evenly over {num_stages} stages "
            f"({plan.num_ranks} ranks x {plan.num_chunks} chunks): choose a multiple of "
            f"{num_stages} layers, or other sizes"
        )
    layers_per_chunk = model.num_layers // num_stages
    group_size, num_recomputed = model.recompute_group_size or 1, 0
    if model.recompute_group_size is not None:
        num_recomputed = min(layers_per_chunk, model.num_recomputed_layers or layers_per_chunk)
    kept_bytes = (layers_per_chunk - num_recomputed) * model.layer_activation_bytes
    chunk_bytes = kept_bytes + (-(-num_recomputed // group_size) + 1) * model.hidden_bytes
    whole = replace(model, recomputed_modules=frozenset())  # as a backward recomputes a layer
    if num_recomputed:
        chunk_bytes += whole.layer_forward_bytes
    embedding = -(-model.vocab_size * model.hidden_size // model.tensor_parallel_size)
    num_embeddings = (plan.rank == 0) + (plan.rank == plan.num_ranks - 1)
    if model.has_tied_embeddings:
        num_embeddings = min(num_embeddings, 1)
    is_last = plan.rank == plan.num_ranks - 1
    num_mtp = model.num_mtp_layers if is_last else 0
    num_layers = layers_per_chunk * plan.num_chunks + num_mtp
    num_shared = num_layers * model.num_shared_parameters + num_embeddings * embedding
    # Each projects a token's hidden state and embedding, which it keeps, to one of the same width.
    num_shared += num_mtp * 2 * model.hidden_size**2 // model.tensor_parallel_size
    mtp_bytes = num_mtp * (model.layer_activation_bytes + 4 * model.hidden_bytes)
    slots = [chunk_bytes] * (plan.num_chunks - 1) + [chunk_bytes + mtp_bytes]
    num_of_experts = num_layers * model.num_expert_parameters
    num_parameters = num_shared + num_of_experts
    num_optimized = -(-num_shared // model.num_optimizer_shards)
    if model.experts is not None:
        num_optimized += -(-num_of_experts // model.experts.num_optimizer_shards)
    return MemoryEstimate(
        slot_bytes_per_chunk=tuple(slots),
        slot_bytes=sum(map(mul, plan.slots_per_chunk, slots)),
        scratch_bytes=group_size * whole.layer_activation_bytes
        + model.attention_scratch_bytes
        + model.exchange_bytes
        + model.num_layer_parameters * model.bytes_per_element,
        parameter_bytes=num_parameters * model.bytes_per_element
        + (num_parameters - num_embeddings * embedding) * model.copy_bytes_per_weight,
        gradient_bytes=num_parameters * model.gradient_bytes_per_element,
        optimizer_bytes=num_optimized * model.optimizer_bytes_per_parameter,
        logit_bytes=model.logit_bytes * (1 + num_mtp) if is_last else 0,
    )
