"""Support losses inside of layers, whose scale and metrics are state in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
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
from chunkgraph.megatron.feature import Feature, Work, chained
from chunkgraph.megatron.site import Site
from chunkgraph.settings.rule import Facts, Rule

__all__ = ["SparseAttention", "TokenPrediction", "constants_on_device"]

_GROUPS = ("reduce_group", "avg_group")


class TrackedLoss:
    """Keeps the scale and the metrics of a loss right in one rank's graphs.

    Megatron may set the scale to another tensor in every microbatch, and keeps the metrics in
    process-wide tensors. A captured backward reads the scale from a fixed tensor, and a captured
    forward adds to the metrics in place.

    Args:
        scaler: Megatron's class with the scale.
        log: Megatron's class with the metrics.
    """

    def __init__(self, scaler: Any, log: Any) -> None:
        self._scaler = scaler
        self._log = log
        self._scale: torch.Tensor | None = None
        self._groups: dict[str, Any] = {}

    def wrap(self, chunk: Chunk) -> Chunk:
        """Return a chunk with the loss, whose replays have the current scale and groups."""
        return replace(
            chunk,
            before_forward=chained(chunk.before_forward, self._before_forward),
            before_backward=chained(chunk.before_backward, self._before_backward),
        )

    def around(self, work: Work) -> AbstractContextManager[None]:
        """Enclose passes of the engine, which are not part of the training."""
        if work == "session":
            return nullcontext()
        return self._capturing() if work == "capture" else self._restoring()

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Set Megatron's scale to the tensor that the graphs read; restore the metrics on exit."""
        current = self._scaler.main_loss_backward_scale
        self._scale = current.detach().clone()
        tracker = self._log.tracker
        self._scaler.main_loss_backward_scale = self._scale
        try:
            with self._restoring():
                yield
                self._groups = {name: tracker[name] for name in _GROUPS if name in tracker}
        finally:
            self._scaler.main_loss_backward_scale = current

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Restore the metrics on exit."""
        tracker = self._log.tracker
        saved = {name: v.clone() for name, v in tracker.items() if isinstance(v, torch.Tensor)}
        groups = {name: tracker[name] for name in _GROUPS if name in tracker}
        try:
            yield
        finally:
            tracker.update(groups)
            for name, value in saved.items():
                tracker[name].copy_(value)

    def _before_forward(self) -> None:
        """Set the groups over which metrics are reduced, as an eager forward does."""
        self._log.tracker.update(self._groups)

    def _before_backward(self) -> None:
        """Copy Megatron's current scale into the tensor that the graphs read."""
        assert self._scale is not None
        self._scale.copy_(self._scaler.main_loss_backward_scale)


_PREDICTION = "megatron.core.transformer.multi_token_prediction"


class TokenPrediction(Feature):
    """Keep the loss scale and the metrics of multi-token prediction right in one rank's graphs.

    Megatron 0.17 also checks on the host whether any token counts, before it divides by their
    number; a captured forward checks on the device.
    """

    def __init__(self) -> None:
        self._loss = TrackedLoss(
            *private_names(_PREDICTION, "MTPLossAutoScaler", "MTPLossLoggingHelper")
        )

    @classmethod
    def of(cls, site: Site, _undo: ExitStack) -> Self | None:
        """Apply if a captured part predicts several tokens at once."""
        return cls() if any(part.predicts_tokens for part in site.parts) else None

    def wrap(self, part: CapturedPart, chunk: Chunk) -> Chunk:
        """Handle the scale and the metrics of a part that predicts several tokens."""
        return self._loss.wrap(chunk) if part.predicts_tokens else chunk

    @contextmanager
    def around(self, work: Work) -> Iterator[None]:
        """Let graphs read the scale from a fixed tensor, and count tokens on the device."""
        with ExitStack() as stack:
            if work == "capture":
                stack.callback(_count_on_the_device())
            stack.enter_context(self._loss.around(work))
            yield


class _Count(torch.Tensor):
    """A number of tokens that the host treats as nonzero; the division checks on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # gives plain tensors

    def __gt__(self, _: object) -> Any:
        return True

    def __rtruediv__(self, total: Any) -> torch.Tensor:
        count = self.as_subclass(torch.Tensor)
        return torch.where(count > 0, total / count, torch.zeros_like(total))


def _count_on_the_device() -> Callable[[], None]:
    """Stop a release from reading numbers of tokens on the host; return the undo function."""
    module = import_megatron(_PREDICTION)
    process = getattr(module, "process_mtp_loss", None)
    if process is None or "if num_tokens > 0" not in inspect.getsource(process):
        return lambda: None
    (roll,) = private_names(_PREDICTION, "roll_tensor")

    def roll_tensor(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rolled, count = roll(*args, **kwargs)
        return rolled, count.as_subclass(_Count)

    return patch_attributes(module, {"roll_tensor": roll_tensor})


_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
_ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
_VARIANT = "experimental_attention_variant"


def _with_sparse(text: str, when: Callable[[Facts], object]) -> Rule:
    """Return a rule for models with sparse attention."""
    return Rule(text, lambda f: f.experimental_attention_variant == "dsa" and when(f))


class SparseAttention(Feature):
    """Keep the loss scale and the metrics of sparse attention's (DSA's) indexers right.

    The loss's backward also makes a constant on the host and copies it to the GPU, which a capture
    cannot hold; here it is filled on the device.
    """

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
            *private_names(_DSA, "DSAIndexerLossAutoScaler", "DSAIndexerLossLoggingHelper")
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
    unpatch = patch_attributes(import_megatron(_DSA), {"torch": _FillingTorch()})
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
    (attention,) = private_names(_DSA, "DSAttention")
    return bool(part.config.dsa_indexer_loss_coeff) and any(
        isinstance(module, attention) for module in part.modules
    )
