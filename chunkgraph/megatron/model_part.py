"""`ModelPart`: the captured part of a model chunk, its transformer block or its whole forward.

=========== =================================================== ================================
scope       captured                                            input
=========== =================================================== ================================
``block``   ``TransformerBlock.forward``                        ``hidden_states``
``chunk``   ``GPTModel.forward``: the embedding on the first    tokens on the first stage, the
            stage, final norm, output layer and the loss of     received activations on others
            each token on the last
``auto``    ``chunk`` if it can be captured, else ``block``
=========== =================================================== ================================

For a hybrid model these are the forward of its stack, and of HybridModel (before 0.19 MambaModel).
In both cases the ``forward`` of one module instance is replaced by one that calls the engine. The
engine's first argument is the stage's input, so that activations can be received into it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn

from chunkgraph.engine import Chunk, mark_constant
from chunkgraph.engine.forward_only import ForwardOnlySteps
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron, patch_attributes
from chunkgraph.megatron.core.data_parallel import (
    ParameterGates,
    call_parameter_gather_hooks,
    gathers_parameters,
    gradient_marker,
    unwrap_ddp,
    wrappers_of,
)
from chunkgraph.megatron.core.model_kinds import HybridNames, is_hybrid_model
from chunkgraph.settings.rule import Facts, Rule
from chunkgraph.settings.words import FLAGS

Scope = Literal["auto", "block", "chunk"]
CapturedScope = Literal["block", "chunk"]
Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""A function of the positional and keyword arguments of a part's forward."""

GROWING_BUFFERS = ("cos_cached", "sin_cached")
"""The buffers that fused RoPE of multi-latent attention reads."""
_BLOCK_ATTRIBUTES = ("layers", "set_input_tensor", "input_tensor", "pre_process")
_MODEL_ATTRIBUTES = ("decoder", "set_input_tensor", "pre_process", "post_process")
_OF_INFERENCE = ("output_processor", "inference_context", "inference_params")
"""Arguments that are Python objects, which calls in forward-only steps may have."""
_ROTARY_TABLES = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")


class ModelPart:
    """The module of a model chunk whose forward is captured as a chunk of the engine.

    Args:
        module: The module, whose forward `divert_to` replaces.
        block: The transformer block in ``module``, or ``module`` itself; received activations are
            stored in its ``input_tensor``.
        ddp: Megatron's DDP around the module, or None.
        label: Name of the chunk in errors.
        name: Path of the module in the model, a prefix of the names of layers in errors.

    Attributes:
        index: Index of the model chunk among those of this rank.
        modules: The module and all its submodules.
        config: Megatron's TransformerConfig of the block.
        predicts_tokens: Whether the module contains layers of multi-token prediction.
        takes_all_calls: Whether `divert_to` diverts every call now, in any mode.
    """

    takes_all_calls = False

    def __init__(
        self,
        module: nn.Module,
        block: nn.Module,
        ddp: nn.Module | None,
        label: str,
        name: str = "",
    ) -> None:
        self.module: Any = module
        self.index = 0
        self.label = label
        self.name = name
        self.modules = tuple(module.modules())
        self.parameters = tuple(p for p in module.parameters() if p.requires_grad)
        self._block: Any = block
        self._ddp = ddp
        self._eager = type(module).forward
        parameters = list(inspect.signature(self._eager).parameters.values())[1:]
        self._optional = {p.name for p in parameters if p.default is None}
        # The names of positional arguments.
        self._names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            self._names = []
        self.config: Any = getattr(block, "config", None)
        self.predicts_tokens = bool(getattr(module, "mtp_process", False))

    @property
    def inner_modules(self) -> dict[str, nn.Module]:
        """Return the submodules of the captured module by their names in the model."""
        modules = self.module.named_modules(prefix=self.name)
        return {name: module for name, module in modules if module is not self.module}

    def chunk(self) -> Chunk:
        """Return the chunk that the engine captures."""
        run: Callable[..., Any] = self._run
        before: Callable[[], None] | None = None
        new_marker = None
        if self._ddp is not None:
            new_marker = gradient_marker(self._ddp, self.parameters)
            if gathers_parameters(self._ddp):
                before = partial(call_parameter_gather_hooks, self.modules)
                if any(p.is_cuda for p in self.module.parameters()):
                    gates = ParameterGates(self._ddp, self.module, self._block.layers)
                    before = gates.gather
                    run = gates.wait_in_capture()(run)  # decorates: entered in each call
        return Chunk(
            forward=run,
            parameters=self.parameters,
            label=self.label,
            module=self.module,
            module_name=self.name,
            follows_module=self._ddp is None,
            buffers=tuple(self.module.buffers()),
            before_forward=before,
            new_marker=new_marker,
            copies_outputs=self._gives_losses,
            caches=GROWING_BUFFERS,
        )

    def divert_to(self, call: Call, steps: ForwardOnlySteps, undo: ExitStack) -> None:
        """Send the module's forwards in steps to ``call``, until ``undo`` is closed."""
        module, num_named = self.module, len(self._names)

        def forward(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_training = module.training and torch.is_grad_enabled()
            is_taken = is_training or steps.takes_calls or self.takes_all_calls
            if called is not module or not is_taken:  # a copy of the model is not captured
                return self._eager(called, *args, **kwargs)
            keywords = kwargs
            if args:  # by name, so that equivalent calls look the same to the engine
                keywords = {**dict(zip(self._names, args, strict=False)), **kwargs}
            if not is_training and any(keywords.get(n) is not None for n in _OF_INFERENCE):
                return self._eager(module, *args, **kwargs)
            if keywords.get("output_processor") is not None:
                raise ConfigError(
                    f"{self.label} was called with output_processor, Python code that a replay "
                    "does not run. Train without it, or detach() the chunk graphs."
                )
            first = self._take_input(keywords)
            keywords = {
                n: v for n, v in keywords.items() if v is not None or n not in self._optional
            }
            return call((first, *args[num_named:]), keywords)

        vars(forward)["of"] = module
        undo.callback(patch_attributes(module, {"forward": MethodType(forward, module)}))

    def _take_input(self, keywords: dict[str, Any]) -> Any:
        """Return the engine's first argument; leave its other arguments in ``keywords``."""
        raise NotImplementedError

    def _gives_losses(self, *_args: Any, **_kwargs: Any) -> bool:
        """Return whether the result of a call with these arguments is a tensor of losses.

        Loss functions keep the losses for logs, but the next replay overwrites a slot's losses.
        """
        return False

    def _run(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module's eager forward with its input as ``first``."""
        raise NotImplementedError

    def _run_received(self, received: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the eager forward with ``received`` as the block's ``input_tensor``."""
        block = self._block
        previous = block.input_tensor
        block.input_tensor = received
        try:
            return self._eager(self.module, *args, **kwargs)
        finally:
            block.input_tensor = previous


class _Block(ModelPart):
    """The transformer block alone; embedding, output layer and loss stay eager."""

    def _take_input(self, keywords: dict[str, Any]) -> Any:
        hidden = keywords.pop("hidden_states", None)
        for name in _ROTARY_TABLES:
            table = keywords.get(name)
            if isinstance(table, torch.Tensor):
                # GPTModel takes it from a cache, or just created it, and does not write it.
                mark_constant(table)
        return hidden if self._block.pre_process else self._block.input_tensor

    def _run(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        if self._block.pre_process:
            return self._eager(self.module, first, *args, **kwargs)
        return self._run_received(first, first, *args, **kwargs)


class _Model(ModelPart):
    """The whole model of this stage."""

    def __init__(
        self, module: nn.Module, block: nn.Module, ddp: nn.Module | None, label: str
    ) -> None:
        super().__init__(module, block, ddp, label)
        self._unused = _unused_arguments(module)

    def _take_input(self, keywords: dict[str, Any]) -> Any:
        for name in self._unused:
            if name in keywords:
                keywords[name] = None
        return self._block.input_tensor

    def _gives_losses(self, *_args: Any, labels: Any = None, **_kwargs: Any) -> bool:
        return self.module.post_process and labels is not None

    def _run(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run_received(first, *args, **kwargs)


def new_part(scope: CapturedScope, model_chunk: nn.Module, label: str) -> ModelPart:
    """Find the part of ``model_chunk``, with its wrappers, that ``scope`` captures.

    Raises:
        ConfigError: The chunk has no such part, or graphs are attached to it already.
    """
    ddp = unwrap_ddp(model_chunk)
    block = _find_block(model_chunk, label)
    *_, model = wrappers_of(model_chunk)
    for module in (block, model):
        if getattr(vars(module).get("forward"), "of", module) is not module:
            del module.forward  # of the model that this one is a deep copy of
    if any("forward" in module.__dict__ for module in (block, model)):
        raise ConfigError(
            f"The forward of {label} is already replaced on the instance; detach() the earlier "
            "chunk graphs first."
        )
    if scope == "block":
        name = next(name for name, module in model.named_modules() if module is block)
        return _Block(block, block, ddp, label, name)
    if scope != "chunk":
        raise ConfigError(f"The scope of a capture is 'auto', 'block' or 'chunk', not {scope!r}.")
    if missing := _lacks(model, block):
        raise ConfigError(
            f"{label}: {type(model).__name__} is not built like GPTModel or HybridModel (it has no "
            f"{missing}), so that it cannot be captured whole. Use scope='auto' or 'block'."
        )
    return _Model(model, block, ddp, label)


def _lacks(model: nn.Module, block: nn.Module) -> str:
    """Return the attributes of GPTModel that ``model`` lacks, as text; "" for none."""
    missing = [name for name in _MODEL_ATTRIBUTES if not hasattr(model, name)]
    if not missing and getattr(model, "decoder", None) is not block:
        return "transformer block as its decoder"
    return ", ".join(missing)


def _unused_arguments(model: Any) -> tuple[str, ...]:
    """Return the arguments that the model's forward ignores on this stage.

    Forward steps pass them on every stage anyway, and each would be copied into a slot for every
    microbatch. For models that override Megatron's methods, no argument counts as unused.
    """
    if not _is_megatrons(model):
        return ()
    if getattr(model, "mtp_process", False):
        return ()  # it embeds tokens and weighs losses inside the model
    unused = ["loss_mask"]
    if not model.pre_process:
        unused.append("input_ids")
    if not model.post_process:
        unused.append("labels")
    if not _reads_position_ids(model):
        unused.append("position_ids")
    return tuple(unused)


def _is_megatrons(model: Any) -> bool:
    """Return whether the model's forward is that of GPTModel or HybridModel."""
    if is_hybrid_model(model):
        return type(model).forward is HybridNames().model.forward
    gpt = import_megatron("megatron.core.models.gpt").GPTModel
    methods = ("forward", "_preprocess", "_postprocess")
    return all(getattr(type(model), name) is getattr(gpt, name, None) for name in methods)


def _reads_position_ids(model: Any) -> bool:
    if model.position_embedding_type not in ("rope", "yarn", "none"):
        return model.pre_process or model.position_embedding_type != "learned_absolute"
    module = "megatron.core.models.common.embeddings.language_model_embedding"
    embedding = import_megatron(module).LanguageModelEmbedding
    return model.pre_process and type(model.embedding) is not embedding


def _find_block(model_chunk: nn.Module, label: str) -> nn.Module:
    """Return the only transformer block of a model chunk with its wrappers.

    Raises:
        ConfigError: There is no block, or there are several.
    """
    blocks = [
        module
        for module in model_chunk.modules()
        if all(hasattr(module, name) for name in _BLOCK_ATTRIBUTES)
    ]
    if len(blocks) != 1:
        raise ConfigError(
            f"{label}: found {len(blocks)} transformer blocks in {type(model_chunk).__name__}, "
            f"expected one (a module with {', '.join(_BLOCK_ATTRIBUTES)}). Encoder-decoder models "
            "and other layouts are not supported."
        )
    return blocks[0]


@dataclass(frozen=True)
class ChosenScope:
    """The captured scope, and why it is not the whole chunk.

    Attributes:
        scope: ``block`` or ``chunk``.
        why_block: Why ``auto`` resolved to ``block``; "" for ``chunk`` or a requested scope.
    """

    scope: CapturedScope
    why_block: str = ""


def choose_scope(
    scope: Scope,
    facts: Facts,
    model_chunks: Sequence[nn.Module],
    *,
    agree: Callable[[Sequence[int]], list[int]] | None,
) -> ChosenScope:
    """Resolve ``auto``: the whole chunk if there is no obstacle on any rank, else the block.

    Capture sessions run the collectives of the captured part, so all ranks use the same scope.

    Args:
        scope: The requested scope.
        facts: Facts of the model.
        model_chunks: The model chunks of this rank.
        agree: Element-wise maximum over all ranks, which call this together; None for one rank.
    """
    if scope != "auto":
        return ChosenScope(scope)
    flags = facts.within(FLAGS)
    obstacles = [rule.subject(flags) for rule in _OBSTACLES if rule.broken(facts)]
    if not obstacles:
        obstacles = [why for chunk in model_chunks if (why := _obstacle_in_model(chunk))][:1]
    own = [int(bool(obstacles))]
    if not any(own if agree is None else agree(own)):
        return ChosenScope("chunk")
    return ChosenScope("block", ", ".join(obstacles) or "the model on another rank")


_OBSTACLES = (
    Rule(
        "cross_entropy_fusion_impl: its backward reads the loss gradient on the host",
        lambda f: f.cross_entropy_loss_fusion and f.cross_entropy_fusion_impl == "te",
    ),
    Rule(
        "fp8_recipe mtp_num_layers=: every prediction layer updates the scales in the middle of "
        "the backward, but a graph updates them once, at its end",
        lambda f: f.fp8_recipe == "delayed" and f.mtp_num_layers,
    ),
    Rule("mtp_detach_heads: the heads begin with tensors that take gradients, but are no inputs"),
    Rule("defer_embedding_wgrad_compute: its queue is Python state that a replay does not advance"),
    Rule("mtp_num_layers= packed: Megatron then reads the offsets on the host"),
)
"""Settings with which only the block can be captured."""


def _for_chunks(rule: Rule) -> Rule:
    return replace(
        rule,
        text=f"scope {rule.text}; leave it out, or use {{scope=block}}",
        when=lambda f: f.scope == "chunk" and rule.broken(f),
    )


SCOPE_RULES = tuple(map(_for_chunks, _OBSTACLES))
"""The same obstacles, where a user requests the whole chunk."""

_METHODS = (
    "forward",
    "_preprocess",
    "_postprocess",
    "compute_language_model_loss",
    "compute_output_layer_and_language_model_loss",
)
"""Methods of a model that run around the block."""


def _obstacle_in_model(model_chunk: nn.Module) -> str:
    """Return why ``auto`` captures only the block of this model, or "".

    A model that overrides Megatron's methods may run arbitrary code around its block, and a replay
    does not run hooks.
    """
    *_, model = wrappers_of(model_chunk)
    name = type(model).__name__
    block = _find_block(model_chunk, name)
    if _lacks(model, block):
        return f"{name}, which is not built like GPTModel"
    libraries = ("megatron.core.", "torch.")
    others = [vars(c) for c in type(model).__mro__ if not c.__module__.startswith(libraries)]
    for method in _METHODS:
        if any(method in names for names in (vars(model), *others)):
            return f"{name}, which overrides {method}"
    inner = set(block.modules())
    for path, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if module not in inner and not all(map(_is_library_hook, hooks)):
            return f"hooks on {path or name}"
    return ""


def _is_library_hook(hook: Callable[..., Any]) -> bool:
    """Return whether a library defines the hook; chunk graphs handle DDP's parameter gathers."""
    return (getattr(hook, "__module__", None) or "").startswith(
        ("megatron.core.", "transformer_engine.")
    )
