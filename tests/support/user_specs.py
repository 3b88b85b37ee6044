"""Layer specs as a user would write them, named in configurations as ``user_specs:function``."""

from __future__ import annotations

import functools
import os
from typing import Any
from unittest import mock

import torch
from gathering import Gather
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn


class WatchfulWhereFaulty(TransformerLayer):
    """Reads its input on the host, on one rank and from its second layer on."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output after reading its input."""
        if os.environ.get("FAULTY") == "1" and self.layer_number > 1:
            hidden_states.sum().item()  # the line of one rank alone
        return super().forward(hidden_states, *args, **kwargs)


def watchful_where_faulty() -> Any:
    """Return the local spec with `WatchfulWhereFaulty`."""
    return _with_layer(WatchfulWhereFaulty)


class LatentCore(nn.Module):
    """Attention with another width of values, which Megatron's local attention lacks."""

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Attend with [s, b, heads, width] each; the mask is true at hidden places."""
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self.scale
        weights = scores.masked_fill(attention_mask, -10000.0).softmax(-1)
        with get_cuda_rng_tracker().fork():
            weights = self.dropout(weights)
        return torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(2)


def latent() -> Any:
    """Return the local spec of multi-latent attention with `LatentCore`."""
    return _with_core(LatentCore, multi_latent_attention=True)


class SplitNorm(nn.LayerNorm):
    """A norm of split sequences, whose gradients are summed over tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def split_sequences_2() -> Any:
    """Return two local layers with `SplitNorm`, for sequence parallelism."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = SplitNorm
    spec.submodules.pre_mlp_layernorm = SplitNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * 2, layer_norm=SplitNorm)


class PackedCore(nn.Module):
    """Attention of packed sequences in plain operators, the reference for kernels on a GPU.

    A row sees the rows of its document up to itself. Rows without a document (padding and the tail)
    are cleared in the inputs and in the output. A mask on the scores would not be enough: a weight
    of 0 times NaN is NaN, in the sum over values and in every product of the backward.

    Where the ranks of a group share documents, each has two of the 2 C pieces of every document.
    Queries are those of its rows, keys and values those of all ranks.
    """

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.dropout = nn.Dropout(config.attention_dropout)

    def prepared(self, t: torch.Tensor, is_tail: torch.Tensor) -> torch.Tensor:
        """Return query, key or value [t, heads, width] with a cleared tail."""
        return t.masked_fill(is_tail[:, None, None], 0.0)

    def group_of(self, packed_seq_params: Any) -> Any:
        """Return the group that shares the microbatch; None: this rank alone."""
        return None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend with [t, heads, width] each; return [t, 1, heads * width]."""
        assert attention_mask is None
        assert packed_seq_params.qkv_format == "thd"
        # Another table than that of the queries would be an error in the parameters.
        assert packed_seq_params.cu_seqlens_kv is packed_seq_params.cu_seqlens_q
        group = self.group_of(packed_seq_params)
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        real = packed_seq_params.cu_seqlens_q.long()
        padded = packed_seq_params.cu_seqlens_q_padded
        padded = real if padded is None else padded.long()  # None: no padding between documents
        own = torch.arange(query.size(0), device=query.device)
        starts = padded // size
        document = torch.searchsorted(starts[1:], own, right=True).clamp(max=len(padded) - 2)
        piece = ((padded[1:] - padded[:-1]) // (2 * size))[document]
        within = own - starts[document]

        def place(of: int) -> torch.Tensor:
            """Return the place in its document of each row of a rank."""
            if size == 1:
                return within
            is_first = within < piece
            return torch.where(is_first, of * piece, (2 * size - 2 - of) * piece) + within

        places = [place(r) for r in range(size)]
        length = (real[1:] - real[:-1])[document]
        is_tail = places[rank] >= length
        query = self.prepared(query, is_tail)
        if group is not None:
            key, value = Gather.apply(key, group), Gather.apply(value, group)
        of_keys, all_places = document.repeat(size), torch.cat(places)
        is_padding = all_places >= length.repeat(size)
        key, value = (_of_every_head(self.prepared(t, is_padding), query) for t in (key, value))
        seen = (document[:, None] == of_keys) & (places[rank][:, None] >= all_places)
        scores = torch.einsum("snd,tnd->nst", query, key) * self.scale
        weights = scores.masked_fill(~seen, -10000.0).softmax(-1)
        with get_cuda_rng_tracker().fork():
            weights = self.dropout(weights)
        mixed = torch.einsum("nst,tnd->snd", weights, value)
        return mixed.masked_fill(is_tail[:, None, None], 0.0).reshape(query.size(0), 1, -1)


def _of_every_head(t: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values [rows, groups, width] for all heads of the queries."""
    if t.size(1) == query.size(1):
        return t
    return t.repeat_interleave(query.size(1) // t.size(1), 1)


class PoisonedCore(PackedCore):
    """Gets NaN in every row of the tail, forward and backward."""

    poison = float("nan")

    def prepared(self, t: torch.Tensor, is_tail: torch.Tensor) -> torch.Tensor:
        """Prepare a tensor with a poisoned tail."""
        tail = is_tail[:, None, None]
        return super().prepared(t.masked_fill(tail, self.poison), is_tail)


def packed() -> Any:
    """Return the local spec with `PackedCore`."""
    return _with_core(PackedCore)


def packed_latent() -> Any:
    """Return the local spec of multi-latent attention with `PackedCore`."""
    return _with_core(PackedCore, multi_latent_attention=True)


def packed_experts() -> Any:
    """Return the local spec of four experts with `PackedCore`."""
    return _with_core(PackedCore, num_experts=4)


def packed_experts_split() -> Any:
    """Return such layers with `SplitNorm`, for sequence parallelism."""
    return _split_layer(packed_experts())


def experts_split() -> Any:
    """Return the local spec with experts and `SplitNorm`."""
    return _split_layer(get_gpt_layer_local_spec(num_experts=4))


class GroupedLinear(nn.Module):
    """Stands for Transformer Engine's grouped linear layer on a CPU."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        skip_bias_add: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self.returns_bias = num_gemms, bias, skip_bias_add
        for index in range(num_gemms):
            weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init_method(weight)
            self.register_parameter(f"weight{index}", weight)
            weight.allreduce = config.expert_model_parallel_size == 1
            if bias:
                values = nn.Parameter(torch.full((output_size,), 0.1, dtype=config.params_dtype))
                self.register_parameter(f"bias{index}", values)
                values.allreduce = weight.allreduce

    def forward(self, rows: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, Any]:
        """Multiply rows, sorted by expert, by the weight of their expert."""
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        pieces = [r @ w.t() for r, w in zip(rows.split(splits), weights, strict=True)]
        if not self.use_bias:
            return torch.cat(pieces), None
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        if self.returns_bias:
            return torch.cat(pieces), biases
        return torch.cat([p + b for p, b in zip(pieces, biases, strict=True)]), None


def grouped_experts() -> Any:
    """Return the local spec with experts that are multiplied at once, by `GroupedLinear`."""
    with mock.patch.object(LocalSpecProvider, "grouped_mlp_modules", grouped_modules):
        return get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=True)


def grouped_modules(*_: Any, **__: Any) -> Any:
    """Return the modules of experts that are multiplied at once."""
    if hasattr(experts, "GroupedMLPSubmodules"):  # later releases build them with a function
        linears = experts.GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        return functools.partial(experts.TEGroupedMLP, submodules=linears)
    return experts.TEGroupedMLP, MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)


class FusedExperts(experts.TEGroupedMLP):
    """Stands for Transformer Engine's fused operations in Megatron's eager passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._with_fused_impl = True

    def _fused_forward(
        self, rows: torch.Tensor, splits: torch.Tensor, probs: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        assert isinstance(splits, torch.Tensor), "fused operations cannot use the graphs' splits"
        self._with_fused_impl = False
        try:
            output, _ = self.forward(rows, splits, probs)
        finally:
            self._with_fused_impl = True
        return output


def fused_experts() -> Any:
    """Return `grouped_experts` with `FusedExperts`; earlier releases do not fuse them."""
    with mock.patch.object(experts, "TEGroupedMLP", FusedExperts):
        return grouped_experts()


def _split_layer(spec: Any) -> Any:
    spec.submodules.input_layernorm = SplitNorm
    spec.submodules.pre_mlp_layernorm = SplitNorm
    return TransformerBlockSubmodules(layer_specs=[spec], layer_norm=SplitNorm)


def packed_poisoned() -> Any:
    """Return the local spec with `PoisonedCore`."""
    return _with_core(PoisonedCore)


def _with_layer(layer: type[TransformerLayer]) -> Any:
    spec = get_gpt_layer_local_spec()
    spec.module = layer
    return spec


def _with_core(core: type[nn.Module], **options: Any) -> Any:
    spec = get_gpt_layer_local_spec(**options)
    spec.submodules.self_attention.submodules.core_attention = core
    return spec


class ContextCore(PackedCore):
    """`PackedCore` for documents that the ranks of the parameters' group share."""

    def group_of(self, packed_seq_params: Any) -> Any:
        """Return the group of the parameters; an evaluation has none."""
        group = packed_seq_params.cp_group
        assert (packed_seq_params.local_cp_size or 1) == (1 if group is None else group.size())
        return group


def packed_contexts() -> Any:
    """Return the local spec with `ContextCore`."""
    return _with_core(ContextCore)


def packed_contexts_experts() -> Any:
    """Return the local spec of four experts with `ContextCore`."""
    return _with_core(ContextCore, num_experts=4)


def packed_contexts_latent_experts() -> Any:
    """Return `packed_contexts_experts` with multi-latent attention."""
    return _with_core(ContextCore, multi_latent_attention=True, num_experts=4)
