"""RoPE by row for packed sequences, fused (with stand-ins for the two kernels) and plain."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunkgraph.graphs import RecorderBackend
from chunkgraph.megatron.features.packing.rope import packed_rope

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(120)]

_HEADS, _WIDTH, _TURNED = 2, 12, 8


def _turned(t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate rows [n, heads, width] by angles [n, turned]."""
    angles = freqs[:, None, :]
    part, rest = t[..., :_TURNED].float(), t[..., _TURNED:]
    first, second = part.chunk(2, dim=-1)
    turned = part * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
    return torch.cat((turned.to(t.dtype), rest), dim=-1)


class Kernels:
    """The kernels for packed and for plain sequences, with counts of their calls."""

    def __init__(self) -> None:
        self.num_packed = self.num_plain = 0
        self.utils: Any = None

    def packed(
        self,
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        cp_size: int = 1,
        cp_rank: int = 0,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Rotate as the kernel does, over all sequences and all entries of the table."""
        self.num_packed += 1
        rows = []
        for begin, end in itertools.pairwise((cu_seqlens // cp_size).tolist()):
            length = end - begin
            for s in range(length):
                at = s
                if cp_size > 1 and s < length // 2:
                    at += cp_rank * length // 2
                elif cp_size > 1:
                    at += length * cp_size - (cp_rank + 1) * length // 2 - length // 2
                rows.append(at)
        return _turned(t, freqs[torch.tensor(rows), 0, 0, :_TURNED])

    def plain(
        self, t: torch.Tensor, freqs: torch.Tensor, interleaved: bool = False
    ) -> torch.Tensor:
        assert freqs.size(0) >= t.size(0)
        assert t.size(1) == 1
        self.num_plain += 1
        return _turned(t[:, 0], freqs[: t.size(0), 0, 0, :_TURNED])[:, None]


@pytest.fixture
def kernels(one_rank: Any, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    from megatron.core.models.common.embeddings import rope_utils

    kernels = Kernels()
    kernels.utils = rope_utils
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", kernels.packed)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", kernels.plain)
    return kernels


def _drawn(num_rows: int, num_freqs: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_rows, _HEADS, _WIDTH, generator=generator).bfloat16()
    return tokens, torch.randn(num_freqs, 1, 1, _TURNED, generator=generator) * 50


def _offsets(lengths: list[int], num_seqs: int) -> torch.Tensor:
    ends = list(itertools.accumulate(lengths, initial=0))
    return torch.tensor((ends + [ends[-1]] * num_seqs)[: num_seqs + 1], dtype=torch.int32)


def _rotated(
    tokens: torch.Tensor,
    freqs: torch.Tensor,
    offsets: torch.Tensor,
    size: int = 1,
    rank: int = 0,
    *,
    is_fused: bool = False,
    mscale: float = 1.0,
    **options: Any,
) -> torch.Tensor:
    """Run Megatron's ``apply_rotary_pos_emb`` on one of ``size`` context-parallel ranks."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    values = {"rotary_interleaved": False, "multi_latent_attention": False, **options}
    config = SimpleNamespace(apply_rope_fusion=is_fused, mrope_section=None, **values)
    group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    return apply_rotary_pos_emb(
        tokens, freqs, config, cu_seqlens=offsets, mscale=mscale, cp_group=group
    )


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), cp_size=st.sampled_from([1, 2, 4]))
def test_rows_are_turned_as_in_their_documents(
    kernels: Kernels, data: st.DataObject, cp_size: int
) -> None:
    pieces = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any))
    lengths = [2 * cp_size * n for n in pieces]
    rank = data.draw(st.integers(0, cp_size - 1))
    # Also as long as all documents together, which the unfused RoPE reads as another kind of table.
    num_freqs = data.draw(st.sampled_from([max(lengths), sum(lengths), sum(lengths) + 3]))
    enough = ((1 << 13) + sum(lengths) // cp_size) // num_freqs + 1
    num_seqs = max(len(lengths), data.draw(st.integers(enough - 2, enough + 2)))
    tokens, freqs = _drawn(sum(lengths) // cp_size, num_freqs)
    offsets = _offsets(lengths, num_seqs)
    expected = kernels.packed(tokens, offsets, freqs, cp_size, rank)
    with packed_rope():
        kernels.num_plain = kernels.num_packed = 0
        actual = _rotated(tokens, freqs, offsets, cp_size, rank, is_fused=True)
    assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))
    spared = num_seqs * num_freqs - tokens.size(0)
    assert (kernels.num_plain, kernels.num_packed) == ((1, 0) if spared >= 1 << 13 else (0, 1))


def test_one_capture_serves_all_offsets(kernels: Kernels) -> None:
    backend = RecorderBackend()
    tokens, freqs = _drawn(64, 256)
    tokens.requires_grad_()
    gradient = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    static = _offsets([64], 65)
    with packed_rope(), backend.capture("rope", backend.new_pool("rope"), ()) as graph:
        actual = _rotated(tokens, freqs, static, is_fused=True)
        (gradient_of_actual,) = torch.autograd.grad(actual, tokens, gradient)
    for lengths in ([64], [1] * 64, [5, 0, 40, 19], [0, 0, 64]):
        offsets = _offsets(lengths, 65)
        static.copy_(offsets)
        graph.replay()
        expected = kernels.packed(tokens, offsets, freqs)
        (gradient_of_expected,) = torch.autograd.grad(expected, tokens, gradient)
        assert torch.equal(actual, expected), lengths
        assert torch.equal(gradient_of_actual, gradient_of_expected), lengths
    graph.release()


# Packed rotary embedding on the device equals Megatron's, which reads offsets on the host.

_OFFSETS = {
    "one": [0, 48],
    "even": [0, 16, 32, 48],
    "uneven": [0, 8, 36, 40, 48],
    "empty ones": [0, 12, 12, 44, 48, 48, 48],
}


def _inputs(num_freqs: int, num_rows: int = 48) -> list[torch.Tensor]:
    """Draw tokens, frequencies, and the gradient of the result."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(num_rows, 2, 12, generator=generator).requires_grad_()
    freqs = torch.randn(num_freqs, 1, 1, 8, generator=generator)
    return [tokens, freqs, torch.randn(tokens.shape, generator=generator)]


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
    table = torch.tensor(offsets, dtype=torch.int32)
    tokens, freqs, gradient = _inputs(num_freqs, 48 // size)

    def rotated() -> list[torch.Tensor]:
        result = _rotated(tokens, freqs, table, size, rank, **options)
        return [result, torch.autograd.grad(result, tokens, gradient)[0]]

    try:
        expected = rotated()
    except RuntimeError as error:  # 0.19 cannot rotate a document without rows, interleaved
        assert "interleaved" in str(options) and "0 elements" in str(error)  # noqa: PT018, PT017
        return
    with packed_rope():
        actual = rotated()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert expected[1].any()
