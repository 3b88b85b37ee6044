"""Compare tensors to the last bit: directly, or by digests that tell the size of a difference.

A digest is a few hundred numbers, and needs no copy of the tensor. Sums of the elements' bits in
buckets differ, in practice, whenever a bit differs or two elements change places. Sums of the
values in buckets estimate the distance of two tensors: independent errors of the elements add up to
a difference of the sums with the same Euclidean norm, and systematic ones to a larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

# Prime numbers of buckets. Two of them, so that elements change places unseen only if they are a
# multiple of both apart.
_BUCKETS = (251, 241)
_NUM_AT_ONCE = 32
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bytes: NaNs equal themselves, 0.0 is not -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def has_nan(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Return whether any floating-point tensor holds a NaN. Waits for the device once."""
    flags = [
        t.detach().isnan().any()
        for t in tensors
        if t is not None and (t.is_floating_point() or t.is_complex())
    ]
    return bool(torch.stack(flags).any()) if flags else False


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has its own dense memory, unlike sparse and wrapper tensors."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not tensor.is_quantized
        and not torch.nn.parameter.is_lazy(tensor)
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() > 0  # 0: its owner has freed it
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True)
class Digests:
    """Digests of ``n`` tensors, on the host.

    Attributes:
        bits: int64, shape (n, 492): sums of the elements' bits, in words of 8 bytes.
        sums: float64, shape (n, 251): sums of the elements' values.
        norms: float64, shape (n,): Euclidean norms; 0 if one is not finite.
        are_float: bool, shape (n,): whether the tensors hold floating-point numbers.
    """

    bits: torch.Tensor
    sums: torch.Tensor
    norms: torch.Tensor
    are_float: torch.Tensor

    def equal(self, other: Digests) -> torch.Tensor:
        """Return, for each tensor, whether all bits are equal: bool, shape (n,)."""
        return (self.bits == other.bits).all(dim=1)

    def ratios(self, other: Digests) -> torch.Tensor:
        """Return the norms of the differences as fractions of ``other``'s norms.

        At most 1, or inf if one tensor alone has a NaN.
        """
        distance = self.distance(other)
        ratios = (distance / other.norms.clamp_min(1e-300)).clamp_max(1.0)
        return ratios.masked_fill(distance.isinf(), torch.inf)

    def distance(self, other: Digests) -> torch.Tensor:
        """Estimate the norm of each difference: float64, shape (n,); inf if one alone has a NaN."""
        difference = self.sums - other.sums
        same = (self.sums == other.sums) | (self.sums.isnan() & other.sums.isnan())
        return difference.masked_fill(same, 0.0).norm(dim=1).nan_to_num(nan=torch.inf)


def digests_of(tensors: Sequence[torch.Tensor | None]) -> Digests:
    """Return the digests of tensors; those of None and of tensors without own memory are zero.

    Waits for the device, and holds few digests there. Modes that record or watch operators do not
    see it.
    """
    columns: list[tuple[torch.Tensor, torch.Tensor]] = []
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        for begin in range(0, max(1, len(tensors)), _NUM_AT_ONCE):
            # One more at least, to stack.
            rows = [_digest(t) for t in (None, *tensors[begin : begin + _NUM_AT_ONCE])]
            device = max((bits.device for bits, _ in rows), key=lambda d: d.type == "cuda")
            bits, sums = (
                torch.stack([row.to(device) for row in column]).cpu()[1:]
                for column in zip(*rows, strict=True)
            )
            columns.append((bits, sums))
    bits, sums = map(torch.cat, zip(*columns, strict=True))
    are_float = [t is not None and t.is_floating_point() for t in tensors]
    return Digests(
        bits, sums[:, :-1], sums[:, -1], torch.tensor(are_float, dtype=torch.bool, device="cpu")
    )


@torch.no_grad()
def _digest(tensor: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bit sums, and the value sums followed by the norm."""
    tensor = getattr(tensor, "_local_tensor", tensor)  # the local part of a DTensor
    if tensor is None or not has_memory(tensor):
        num_sums = _BUCKETS[0] + 1
        return torch.zeros(sum(_BUCKETS), dtype=torch.int64), torch.zeros(num_sums).double()
    values = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    if values.is_complex():
        values = torch.view_as_real(values).reshape(-1)
    words, rest = _words(values)
    bits = [_bucketed(words, n) for n in _BUCKETS]
    bits[0][: len(rest)] += rest
    # Sums in the dtype of the result need no copy of the tensor.
    has_sums = values.is_floating_point() and values.element_size() > 1
    dtype = torch.promote_types(values.dtype, torch.float32) if has_sums else torch.int64
    sums = _bucketed(values if has_sums else words, _BUCKETS[0], dtype).double()
    norm = sums.new_zeros(1)
    if values.is_floating_point() and values.numel():
        norm_dtype = torch.promote_types(values.dtype, torch.float32)
        norm = torch.linalg.vector_norm(values, dtype=norm_dtype).double().view(1)
    return torch.cat(bits), torch.cat([sums, norm.nan_to_num(nan=0.0, posinf=0.0)])


def _words(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of a flat tensor as int64 words, without a copy, and of the elements left."""
    per_word = 8 // values.element_size()
    integers = values.view(_INTEGERS[values.element_size()])
    if values.data_ptr() % 8 or values.storage_offset() % per_word:
        integers = integers.clone()
    num_whole = integers.numel() // per_word * per_word
    return integers[:num_whole].view(torch.int64), integers[num_whole:].long()


def _bucketed(
    flat: torch.Tensor, num_buckets: int, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Sum elements into buckets by their position modulo ``num_buckets``."""
    num_whole = flat.numel() // num_buckets * num_buckets
    sums = flat[:num_whole].view(-1, num_buckets).sum(dim=0, dtype=dtype)
    sums[: flat.numel() - num_whole] += flat[num_whole:]
    return sums
