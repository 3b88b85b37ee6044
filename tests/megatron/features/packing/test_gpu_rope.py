"""Transformer Engine's RoPE kernels for packed and for plain sequences, on a GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from chunkgraph.megatron.features.packing.rope import packed_rope

pytestmark = [pytest.mark.gpu(in_process=True), pytest.mark.megatron]


# With more, Transformer Engine uses its own kernel that starts for each row.
@pytest.mark.parametrize("num_empty", [24, 200])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_the_plain_one_is_used_by_row_and_has_the_same_bits(
    rotated: Callable[..., Any], cp_size: int, num_empty: int
) -> None:
    pytest.importorskip("transformer_engine")
    from megatron.core.models.common.embeddings import rope_utils

    own, plain = rope_utils.fused_apply_rotary_pos_emb_thd, rope_utils.fused_apply_rotary_pos_emb
    num_plain = 0

    def counting(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal num_plain
        num_plain += 1
        return plain(*args, **options)

    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).cuda()

    lengths = [2 * cp_size * n for n in torch.randint(0, 20, (40,), generator=generator).tolist()]
    rows = sum(lengths) // cp_size
    ends = list(itertools.accumulate(lengths, initial=0))
    offsets = torch.tensor(ends + [ends[-1]] * num_empty, dtype=torch.int32).cuda()
    freqs = drawn(1024, 1, 1, 128) * 100
    # Queries are next to keys and values in memory.
    wide, gradient = drawn(rows, 4, 3 * 128).bfloat16(), drawn(rows, 4, 128).bfloat16()
    for rank in range(cp_size):
        results = []
        for is_ours in (False, True):
            leaf = wide.clone().requires_grad_()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(rope_utils, "fused_apply_rotary_pos_emb", counting)
                with packed_rope() if is_ours else contextlib.nullcontext():
                    num_plain = 0
                    result = rotated(leaf[..., :128], offsets, freqs, cp_size, rank)
            assert num_plain == int(is_ours)
            results.append([result, torch.autograd.grad(result, leaf, gradient)[0]])
        assert all(
            torch.equal(a.view(torch.int16), b.view(torch.int16))
            for a, b in zip(*results, strict=True)
        )
    assert rope_utils.fused_apply_rotary_pos_emb_thd is own
