"""Packed rotary embedding on the device equals Megatron's, which reads offsets on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chunkgraph.graphs import RecorderBackend
from chunkgraph.megatron.features.packing.rope import packed_rope

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

_OFFSETS = {
    "one": [0, 48],
    "even": [0, 16, 32, 48],
    "uneven": [0, 8, 36, 40, 48],
    "empty ones": [0, 12, 12, 44, 48, 48, 48],
}


def _group(size: int, rank: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def _inputs(num_freqs: int, num_rows: int = 48) -> list[torch.Tensor]:
    """Draw tokens, frequencies, and the gradient of the result."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(num_rows, 2, 12, generator=generator).requires_grad_()
    freqs = torch.randn(num_freqs, 1, 1, 8, generator=generator)
    return [tokens, freqs, torch.randn(tokens.shape, generator=generator)]


def _rotated(
    inputs: list[torch.Tensor], offsets: torch.Tensor, group: Any, **options: Any
) -> list[torch.Tensor]:
    """Run Megatron's ``apply_rotary_pos_emb``; return the result and the tokens' gradient."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    tokens, freqs, gradient = inputs
    values = {"rotary_interleaved": False, "multi_latent_attention": False, "mscale": 1.0}
    values.update(options)
    mscale = values.pop("mscale")
    config = SimpleNamespace(apply_rope_fusion=False, mrope_section=None, **values)
    result = apply_rotary_pos_emb(
        tokens, freqs, config, cu_seqlens=offsets, mscale=mscale, cp_group=group
    )
    return [result, torch.autograd.grad(result, tokens, gradient)[0]]


@pytest.mark.parametrize("offsets", _OFFSETS.values(), ids=_OFFSETS)
@pytest.mark.parametrize("num_freqs", [48, 64], ids=["whole-pack", "each-document"])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize(
    "options",
    [{}, {"rotary_interleaved": True}, {"mscale": 1.25}, {"multi_latent_attention": True}],
)
def test_equal_to_megatrons_own(
    one_rank: Any,
    offsets: list[int],
    num_freqs: int,
    size: int,
    rank: int,
    options: dict[str, Any],
) -> None:
    table, group = torch.tensor(offsets, dtype=torch.int32), _group(size, rank)
    inputs = _inputs(num_freqs, 48 // size)
    try:
        expected = _rotated(inputs, table, group, **options)
    except RuntimeError as error:  # 0.19 cannot rotate a document without rows, interleaved
        assert "interleaved" in str(options) and "0 elements" in str(error)  # noqa: PT018, PT017
        return
    with packed_rope():
        actual = _rotated(inputs, table, group, **options)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert expected[1].any()


def test_one_capture_serves_all_offsets(one_rank: Any) -> None:
    backend = RecorderBackend()
    pool = backend.new_pool("rope")
    padded = {n: (o + [48] * 7)[:7] for n, o in _OFFSETS.items()}
    static = torch.tensor(padded["one"], dtype=torch.int32)
    inputs, group = _inputs(48), _group(1, 0)
    with packed_rope(), backend.capture("rope", pool, ()) as graph:
        actual = _rotated(inputs, static, group)
    for name, offsets in padded.items():
        static.copy_(torch.tensor(offsets, dtype=torch.int32))
        graph.replay()
        # Megatron's embedding must not see the table that the capture kept with its offsets.
        expected = _rotated(inputs, static.clone(), group)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), name
    graph.release()
