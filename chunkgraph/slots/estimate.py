"""Estimate the memory of a plan from the sizes of a transformer.

This is an estimate for choosing sizes, not a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunkgraph.errors import TopologyError

from .model_sizes import ModelSizes
from .plan import SlotPlan

__all__ = ["MemoryEstimate", "estimate_memory"]


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


def estimate_memory(
    plan: SlotPlan, model: ModelSizes, *, shared_slots: bool = False
) -> MemoryEstimate:
    """Estimate the memory of a plan on one rank.

    Context parallelism only reduces the tokens on a rank. A slot also holds its chunk's output (the
    first norm saves the input). Scratch is roughly the gradients of one layer's (or recomputed
    group's) activations and of one layer's weights. Of embedding, output layer and loss only the
    logits are counted, once.

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
    num_layers = layers_per_chunk * plan.num_chunks
    num_shared = num_layers * model.num_shared_parameters + num_embeddings * embedding
    num_of_experts = num_layers * model.num_expert_parameters
    num_parameters = num_shared + num_of_experts
    num_optimized = -(-num_shared // model.num_optimizer_shards)
    if model.experts is not None:
        num_optimized += -(-num_of_experts // model.experts.num_optimizer_shards)
    return MemoryEstimate(
        slot_bytes_per_chunk=(chunk_bytes,) * plan.num_chunks,
        slot_bytes=(plan.peak_in_flight if shared_slots else plan.num_slots) * chunk_bytes,
        scratch_bytes=group_size * model.layer_activation_bytes
        + model.exchange_bytes
        + model.num_layer_parameters * model.bytes_per_element,
        parameter_bytes=num_parameters * model.bytes_per_element,
        gradient_bytes=num_parameters * model.gradient_bytes_per_element,
        optimizer_bytes=num_optimized * model.optimizer_bytes_per_parameter,
        logit_bytes=model.logit_bytes if plan.rank == plan.num_ranks - 1 else 0,
    )
