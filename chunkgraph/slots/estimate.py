"""Estimate the memory of a plan from the sizes of a transformer.

Activations follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", section 4: a layer saves ``s b h (34 + 5 a s / h)`` bytes in 16-bit without recomputation,
and with tensor parallel size t ``s b h (10 + 24 / t + 5 a s / (h t))``. Term by term, with e bytes
per element (e = 2 and ffn = 4 h give the paper's numbers):

- not split by t: two norm inputs, the inputs of attention and MLP, 4 e h; two dropout masks, 2 h;
- split by t: queries, keys, values and the input of the output projection, 4 e h (the paper's
  multi-head attention; fewer key-value heads save less); the two MLP middles, 2 e ffn;
- attention scores, split by t: softmax, its dropout mask and its dropped output, (2 e + 1) a s.
  Flash attention keeps none of the three, only one 4-byte log-sum-exp per head and token.

This is an estimate for choosing sizes, not a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunkgraph.errors import ConfigError, TopologyError

from .plan import SlotPlan

__all__ = ["MemoryEstimate", "ModelSizes", "estimate_memory"]

_LOG_SUM_EXP_BYTES = 4


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
        bytes_per_element: Bytes e of one element of an activation or a parameter.
        gradient_bytes_per_element: Bytes of one element of an accumulated gradient; Megatron
            accumulates in fp32.
        tensor_parallel_size: Size t, without sequence parallelism.
        has_flash_attention: Whether attention is fused, so that its scores are not saved.
        has_gated_mlp: Whether the MLP has a gate, a third matrix (SwiGLU).
        has_tied_embeddings: Whether the output layer shares the embedding's weights. A rank then
            holds them once; the first and the last rank both hold them.
        recompute_group_size: Number of layers that are recomputed together and keep only their
            input; None without recomputation.
        num_recomputed_layers: Number of recomputed layers of each chunk; None for all.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    vocab_size: int
    bytes_per_element: int = 2
    gradient_bytes_per_element: int = 4
    tensor_parallel_size: int = 1
    has_flash_attention: bool = True
    has_gated_mlp: bool = False
    has_tied_embeddings: bool = False
    recompute_group_size: int | None = None
    num_recomputed_layers: int | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool) and value < 1:
                raise ConfigError(f"model: {name} is {value}, but must be at least 1")

    @property
    def hidden_bytes(self) -> int:
        """Return the bytes of one hidden-state tensor of one microbatch."""
        tokens = self.seq_length * self.micro_batch_size
        return tokens * self.hidden_size * self.bytes_per_element

    @property
    def layer_activation_bytes(self) -> int:
        """Return the bytes that one layer saves for its backward, for one microbatch."""
        tokens = self.seq_length * self.micro_batch_size
        hidden, element = self.hidden_size, self.bytes_per_element
        whole = hidden * (4 * element + 2)
        num_middles = 3 if self.has_gated_mlp else 2
        split = 4 * element * hidden + num_middles * element * self.ffn_hidden_size
        if self.has_flash_attention:
            split += _LOG_SUM_EXP_BYTES * self.num_attention_heads
        else:
            split += (2 * element + 1) * self.num_attention_heads * self.seq_length
        return tokens * whole + -(-tokens * split // self.tensor_parallel_size)

    @property
    def num_layer_parameters(self) -> int:
        """Return the parameters of a layer on a tensor-parallel rank, without biases and norms."""
        num_mlp_matrices = 3 if self.has_gated_mlp else 2
        attention = 4 * self.hidden_size * self.hidden_size
        mlp = num_mlp_matrices * self.hidden_size * self.ffn_hidden_size
        return -(-(attention + mlp) // self.tensor_parallel_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Estimated bytes on one rank, without optimizer state.

    Attributes:
        slot_bytes_per_chunk: Bytes of one slot of each chunk: saved activations, input and output.
        slot_bytes: Bytes of all slots of all chunks.
        scratch_bytes: Bytes that are dead at the end of every graph and that all graphs share.
        parameter_bytes: Bytes of the weights, including the embedding on the first rank and the
            output layer on the last.
        gradient_bytes: Bytes of the accumulated gradients of these weights.
    """

    slot_bytes_per_chunk: tuple[int, ...]
    slot_bytes: int
    scratch_bytes: int
    parameter_bytes: int
    gradient_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return the sum of all bytes."""
        return self.slot_bytes + self.scratch_bytes + self.parameter_bytes + self.gradient_bytes


def estimate_memory(
    plan: SlotPlan, model: ModelSizes, *, shared_slots: bool = False
) -> MemoryEstimate:
    """Estimate the memory of a plan on one rank.

    The estimate assumes dense layers and no sequence parallelism; context parallelism only reduces
    the tokens on a rank. A slot also holds its chunk's output (the first norm saves the input).
    Scratch is roughly the gradients of one layer's (or recomputed group's) activations and of one
    layer's weights. Embedding, output layer and loss run outside the slots; their activations are
    not counted.

    Args:
        plan: Plan of the rank.
        model: Sizes of the model.
        shared_slots: Whether the rank's chunks share slots, as many as its peak of microbatches in
            flight.

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
    embedding = -(-model.vocab_size * model.hidden_size // model.tensor_parallel_size)
    num_embeddings = (plan.rank == 0) + (plan.rank == plan.num_ranks - 1)
    if model.has_tied_embeddings:
        num_embeddings = min(num_embeddings, 1)
    num_parameters = (
        layers_per_chunk * plan.num_chunks * model.num_layer_parameters + num_embeddings * embedding
    )
    return MemoryEstimate(
        slot_bytes_per_chunk=(chunk_bytes,) * plan.num_chunks,
        slot_bytes=(plan.peak_in_flight if shared_slots else plan.num_slots) * chunk_bytes,
        scratch_bytes=group_size * model.layer_activation_bytes
        + model.num_layer_parameters * model.bytes_per_element,
        parameter_bytes=num_parameters * model.bytes_per_element,
        gradient_bytes=num_parameters * model.gradient_bytes_per_element,
    )
