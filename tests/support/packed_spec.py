"""Layers of packed sequences for Megatron's ``--spec``, which accepts no functions."""

from __future__ import annotations

from context_specs import experts, split
from user_specs import packed, packed_contexts, packed_contexts_experts, packed_experts

packed_layer = packed()
experts_layer = packed_experts()
split_layer = split()
contexts_layer = packed_contexts()
contexts_experts_layer = packed_contexts_experts()
split_contexts_experts_layer = experts()
