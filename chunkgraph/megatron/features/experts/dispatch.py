"""Remove host reads of token counts from dispatch with a fixed capacity.

With ``moe_expert_capacity_factor`` and ``moe_pad_expert_input_to_capacity`` every expert gets the
same number of rows from every rank, known before the tokens are. Megatron's all-to-all dispatcher
then uses host numbers only. Its all-gather dispatcher counts the rows on the device anyway and
waits for the result; the patched one uses the known number instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names
from chunkgraph.megatron.core.host_tensors import HostTorch, has_gpu, host_full

__all__ = ["gather_fixed_rows", "patch_router", "scattered_routes", "static_dispatch"]

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_ROUTER = "megatron.core.transformer.moe.router"
_ROUTING = "topk_routing_with_score_function"
_UTILS = "megatron.core.transformer.moe.moe_utils"


@contextlib.contextmanager
def static_dispatch() -> Iterator[None]:
    """Make dispatch with a fixed capacity read nothing from the device."""
    module = import_megatron(_DISPATCHER)
    with contextlib.ExitStack() as stack:
        stack.enter_context(scattered_routes())
        stack.callback(gather_fixed_rows())
        if not has_gpu():
            stack.callback(patch_attributes(module, {"torch": HostTorch()}))
        yield


@contextlib.contextmanager
def scattered_routes() -> Iterator[None]:
    """Let routers scatter the chosen probabilities, with deterministic algorithms too.

    No token chooses an expert twice, so a scatter has one result. The index_put_ that deterministic
    routing uses instead, in forward and backward, checks and sorts its indices, in 30 kernels.
    """
    (eager,) = private_names(_ROUTER, _ROUTING)

    def routing(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.are_deterministic_algorithms_enabled():
            return eager(logits, *args, **kwargs)
        return _Scattered.apply(
            logits, torch.is_grad_enabled(), lambda logits: eager(logits, *args, **kwargs)
        )

    undo = patch_attributes(import_megatron(_ROUTER), {_ROUTING: routing})
    try:
        yield
    finally:
        undo()


@contextlib.contextmanager
def _without_determinism() -> Iterator[None]:
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)


class _Scattered(torch.autograd.Function):
    """Runs a function of logits, and its backward, without deterministic algorithms."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        is_grad_enabled: bool,
        route: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, ...]:
        # Megatron also chooses its kernel by whether gradients are enabled.
        with _without_determinism(), torch.set_grad_enabled(is_grad_enabled):
            ctx.logits = logits.detach().requires_grad_(logits.requires_grad)
            probs, *others = route(ctx.logits)
        ctx.probs = probs
        ctx.mark_non_differentiable(*others)
        return (probs.detach(), *others)

    @staticmethod
    def backward(ctx: Any, of_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None, None]:
        with _without_determinism():
            (grads,) = torch.autograd.grad(ctx.probs, ctx.logits, of_probs, retain_graph=True)
        return grads, None, None


def gather_fixed_rows() -> Callable[[], None]:
    """Make the all-gather dispatcher use a fixed number of rows; return the undo function.

    It returns the same rows in the same order as Megatron's, which selects them by a mask: for each
    expert the rows of its column, in the order of the tokens.
    """
    module = import_megatron(_DISPATCHER)
    (gathering,) = private_names(_DISPATCHER, "MoEAllGatherTokenDispatcher")
    private_names(_DISPATCHER, "permute", "get_capacity")

    def dispatch_postprocess(
        self: Any, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.hidden_shape_before_permute = hidden_states.shape
        local = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        self.local_map = self.routing_map[:, local].contiguous()
        num_ranks = self.tp_size * self.ep_size
        num_rows = num_ranks * module.get_capacity(
            num_tokens=hidden_states.shape[0] // num_ranks * self.router_topk,
            num_experts=self.config.num_moe_experts,
            capacity_factor=self.config.moe_expert_capacity_factor,
        )
        rows, self.local_probs, self.reversed_local_input_permutation_mapping, *_ = module.permute(
            hidden_states,
            self.local_map,
            probs=probs[:, local].contiguous(),
            num_out_tokens=num_rows * self.num_local_experts,
            drop_and_pad=True,
        )
        self.routing_map = None
        return rows, host_full((self.num_local_experts,), num_rows), self.local_probs

    return patch_attributes(gathering, {"dispatch_postprocess": dispatch_postprocess})


def patch_router() -> Callable[[], None]:
    """Let Megatron's router and dispatchers run on a CPU host; return the undo function.

    Releases before 0.17 look up Transformer Engine's matrix product under a name that exists only
    with Transformer Engine, and one compiled function of the router needs a compiler on the host.
    """
    utils = import_megatron(_UTILS)
    (top_k,) = private_names(_ROUTER, "TopKRouter")
    undo = contextlib.ExitStack()
    if not hasattr(utils, "te_general_gemm"):
        undo.callback(patch_attributes(utils, {"te_general_gemm": None}))
    compiled = vars(top_k).get("_apply_expert_bias")
    original = getattr(compiled, "_torchdynamo_orig_callable", None)
    if original is not None:
        undo.callback(patch_attributes(top_k, {"_apply_expert_bias": original}))
    module = import_megatron(_DISPATCHER)
    undo.callback(patch_attributes(module, {"maybe_move_tensor_to_cpu": _on_the_host}))
    return undo.close


def _on_the_host(tensor: Any, as_numpy: bool = False, **_: object) -> Any:
    """Return the splits in the requested form; Megatron moves them to the host only from GPUs."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
