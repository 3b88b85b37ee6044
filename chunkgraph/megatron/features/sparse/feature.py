"""Support Megatron's sparse attention (DSA), whose indexer has a loss with state in Python.

The loss's backward also makes a constant on the host and copies it to the GPU, which a capture
cannot hold; here it is filled on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, Self

import torch

from chunkgraph.engine import Chunk
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.captured_part import CapturedPart
from chunkgraph.megatron.core.access import (
    import_megatron,
    patch_attributes,
    private_names,
    versions,
)
from chunkgraph.megatron.feature import Feature, Work
from chunkgraph.megatron.site import Site
from chunkgraph.megatron.tracked_loss import TrackedLoss
from chunkgraph.settings.rule import Facts, Rule

__all__ = ["SparseAttention", "constants_on_device"]

_MODULE = "megatron.core.transformer.experimental_attention_variant.dsa"
_ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
_VARIANT = "experimental_attention_variant"


def _with_sparse(text: str, when: Callable[[Facts], object]) -> Rule:
    """Return a rule for models with sparse attention."""
    return Rule(text, lambda f: f.experimental_attention_variant == "dsa" and when(f))


class SparseAttention(Feature):
    """Keep the loss scale and the metrics of the indexers right in one rank's graphs."""

    rules = (
        _with_sparse(
            f"{_VARIANT} packed: it reads the offsets of sequences on the host", lambda f: f.packed
        ),
        _with_sparse(
            f"context_parallel_size {_VARIANT}: it reads the lengths of other ranks on the host; "
            "use {context_parallel_size=1}",
            lambda f: (f.context_parallel_size or 1) > 1,
        ),
        _with_sparse(
            "dsa_indexer_topk_freq: layers share their choice of tokens in Python; use "
            "{dsa_indexer_topk_freq=1}",
            lambda f: (f.dsa_indexer_topk_freq or 1) > 1,
        ),
        _with_sparse(
            "dsa_kernel_backend: its kernels are untested in graphs; leave it out",
            lambda f: f.dsa_kernel_backend not in (None, "none"),
        ),
    )

    @classmethod
    def prepare(cls, site: Site, _undo: ExitStack) -> None:
        """Refuse the sparse attention of earlier releases.

        Raises:
            ConfigError: This release of Megatron has no absorbed latent attention.
        """
        if getattr(site.config, _VARIANT, None) == "dsa" and find_spec(_ABSORBED) is None:
            raise ConfigError(
                f"{_VARIANT}='dsa': graphs of the sparse attention of megatron-core "
                f"{versions()['megatron_core']} are untested. Use 0.19, or train without graphs."
            )

    def __init__(self) -> None:
        self._loss = TrackedLoss(
            *private_names(_MODULE, "DSAIndexerLossAutoScaler", "DSAIndexerLossLoggingHelper")
        )

    @classmethod
    def of(cls, site: Site, _undo: ExitStack) -> Self | None:
        """Apply if an indexer in a captured part has a loss."""
        return cls() if any(map(_has_loss, site.parts)) else None

    def wrap(self, part: CapturedPart, chunk: Chunk) -> Chunk:
        """Handle the scale and the metrics of a part with indexers."""
        return self._loss.wrap(chunk) if _has_loss(part) else chunk

    @contextmanager
    def around(self, work: Work) -> Iterator[None]:
        """Let graphs read the scale from a fixed tensor, and copy nothing from the host."""
        with ExitStack() as stack:
            if work == "capture":
                stack.enter_context(constants_on_device())
            stack.enter_context(self._loss.around(work))
            yield


@contextmanager
def constants_on_device() -> Iterator[None]:
    """Make Megatron's module fill tensors of one number on their device."""
    unpatch = patch_attributes(import_megatron(_MODULE), {"torch": _FillingTorch()})
    try:
        yield
    finally:
        unpatch()


class _FillingTorch:
    """Replaces the name ``torch`` in Megatron's module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(value: float, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of one number, which Megatron passes with its type and device."""
        return torch.full((), value, dtype=dtype, device=device)


def _has_loss(part: CapturedPart) -> bool:
    if getattr(part.config, _VARIANT, None) != "dsa":
        return False
    (attention,) = private_names(_MODULE, "DSAttention")
    return bool(part.config.dsa_indexer_loss_coeff) and any(
        isinstance(module, attention) for module in part.modules
    )
