"""What of a model chunk is captured: its transformer block, or the whole of its forward.

=========== =================================================== ================================
scope       captured                                            its own input
=========== =================================================== ================================
``block``   ``TransformerBlock.forward``                        ``hidden_states``
``chunk``   ``GPTModel.forward``: the embedding on the first    tokens on the first stage, the
            stage, final norm, output layer and the loss of     received activations on others
            each token on the last
``auto``    ``chunk`` where it can be captured, else ``block``
=========== =================================================== ================================

Of a hybrid model it is the forward of its stack, and of HybridModel (before 0.19 MambaModel).
Either way one module gets a ``forward`` of its own, which hands the call to the engine. Its first
argument there is what the stage works on, so that activations can be received into it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from chunkgraph.engine import Chunk, unchanging
from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.core.cached_tables import GROWING_BUFFERS
from chunkgraph.megatron.core.data_parallel import (
    call_parameter_gather_hooks,
    gathers_parameters,
    gradient_marker,
    unwrap_ddp,
)
from chunkgraph.megatron.core.model_kinds import hybrid_names, is_hybrid_model
from chunkgraph.megatron.core.parameter_gather import ParameterGates
from chunkgraph.megatron.module_hooks import refuse_hooks

__all__ = [
    "Call",
    "CapturedPart",
    "CapturedScope",
    "Scope",
    "find_block",
    "innermost",
    "lacks",
    "new_part",
]

Scope = Literal["auto", "block", "chunk"]
CapturedScope = Literal["block", "chunk"]
Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Takes the positional and the keyword arguments of a part's forward."""

_BLOCK_ATTRIBUTES = ("layers", "set_input_tensor", "input_tensor", "pre_process")
_MODEL_ATTRIBUTES = ("decoder", "set_input_tensor", "pre_process", "post_process")
_REFUSED_ARGUMENTS = {
    "inference_context": "it is for inference",
    "inference_params": "it is for inference",
    "output_processor": "it is Python code that a replay does not run",
}
_ROTARY_TABLES = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")


class CapturedPart:
    """One module whose forward is captured, as a chunk of the engine, and the way back.

    Args:
        module: gets a forward of its own by `divert_to`.
        block: the transformer block in it, or itself; received activations are put there.
        ddp: Megatron's DDP around the module, or None.
        label: names the chunk in errors.
        name: of the module in the model, for the names of layers in errors.

    Attributes:
        index: of the model chunk among those of this rank.
        modules: the module and all that are in it.
        config: Megatron's TransformerConfig of the block.
        predicts_tokens: whether the module holds layers of multi-token prediction.

    Raises:
        ConfigError: the module has a forward of its own already.
    """

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
        self._gates: Any = None
        if (
            ddp is not None
            and gathers_parameters(ddp)
            and any(p.is_cuda for p in module.parameters())
        ):
            layers: Any = block.layers
            self._gates = ParameterGates(ddp, module, layers)
        self._eager = type(module).forward
        self._names = _positional_names(self._eager)
        self._optional = _none_by_default(self._eager)
        self.config: Any = getattr(block, "config", None)
        self.predicts_tokens = bool(getattr(module, "mtp_process", False))

    @property
    def inner_modules(self) -> dict[str, nn.Module]:
        """What the captured module calls, by names in the model."""
        named = self.module.named_modules(prefix=self.name)
        return {name: module for name, module in named if module is not self.module}

    def chunk(self) -> Chunk:
        """What the engine captures."""
        before = new_marker = None
        if self._ddp is not None:
            if gathers_parameters(self._ddp):
                before = self._gather_parameters if self._gates is None else self._gates.gather
            new_marker = gradient_marker(self._ddp, self.parameters)
        return Chunk(
            forward=self._run if self._gates is None else self._run_gated,
            parameters=self.parameters,
            label=self.label,
            module=self.module,
            module_name=self.name,
            buffers=tuple(self.module.buffers()),
            before_forward=before,
            new_marker=new_marker,
            copies_outputs=self._gives_losses,
            check_sample=self._check_sample,
            caches=GROWING_BUFFERS,
            # Megatron's layers set again what they leave; features follow what of it is state.
            may_leave_values=True,
        )

    def divert_to(self, call: Call) -> None:
        """Send the module's training forwards to ``call``."""
        module, num_named = self.module, len(self._names)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (module.training and torch.is_grad_enabled()):
                return self._eager(module, *args, **kwargs)
            given = kwargs
            if args:  # by name, so that calls that mean the same look the same to the engine
                given = {**dict(zip(self._names, args, strict=False)), **kwargs}
            for name in _REFUSED_ARGUMENTS:
                if given.get(name) is not None:
                    raise _refused(self.label, name)
            first = self._take_input(given)
            given = {n: v for n, v in given.items() if v is not None or n not in self._optional}
            return call((first, *args[num_named:]), given)

        module.forward = forward

    def restore(self) -> None:
        """Give the module the forward of its class back."""
        self.module.__dict__.pop("forward", None)

    def _take_input(self, given: dict[str, Any]) -> Any:
        """The engine's first argument; ``given`` is left with what else the engine gets."""
        raise NotImplementedError

    def _gives_losses(self, *_args: Any, **_kwargs: Any) -> bool:
        """Whether the result of the engine's call with these arguments is a tensor of losses.

        Loss functions keep the losses they get, for logs; a slot's are soon overwritten.
        """
        return False

    def _run(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's eager forward, from its arguments alone."""
        raise NotImplementedError

    def _check_sample(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuse hooks that came since `attach`."""
        refuse_hooks(self.inner_modules, self.label)

    def _run_gated(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        with self._gates.held_by_forward():
            return self._run(first, *args, **kwargs)

    def _run_received(self, received: Any, *args: Any, **kwargs: Any) -> Any:
        """The eager forward, with the input in the attribute that later stages read it from."""
        block = self._block
        given = block.input_tensor
        block.input_tensor = received
        try:
            return self._eager(self.module, *args, **kwargs)
        finally:
            block.input_tensor = given

    def _gather_parameters(self) -> None:
        call_parameter_gather_hooks(self.modules)


class _Block(CapturedPart):
    """The transformer block alone; embedding, output layer and loss stay eager."""

    def _take_input(self, given: dict[str, Any]) -> Any:
        hidden = given.pop("hidden_states", None)
        for name in _ROTARY_TABLES:
            table = given.get(name)
            if isinstance(table, torch.Tensor):
                # GPTModel takes it from a cache, or made it just now; only torch writes it.
                unchanging(table)
        return _unwrapped(hidden) if self._block.pre_process else self._block.input_tensor

    def _run(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        if self._block.pre_process:
            return self._eager(self.module, first, *args, **kwargs)
        return self._run_received(first, first, *args, **kwargs)


class _Model(CapturedPart):
    """The whole model of this stage."""

    def __init__(
        self, module: nn.Module, block: nn.Module, ddp: nn.Module | None, label: str
    ) -> None:
        super().__init__(module, block, ddp, label)
        self._unused = _unused_arguments(module)

    def _take_input(self, given: dict[str, Any]) -> Any:
        for name in self._unused:
            if name in given:
                given[name] = None
        return self._block.input_tensor

    def _gives_losses(self, *_args: Any, labels: Any = None, **_kwargs: Any) -> bool:
        return self.module.post_process and labels is not None

    def _run(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run_received(first, *args, **kwargs)


def new_part(scope: CapturedScope, model_chunk: nn.Module, label: str) -> CapturedPart:
    """Find what ``scope`` captures of ``model_chunk``.

    Args:
        scope: see the module's table.
        model_chunk: as the schedule gets it, wrappers included.
        label: names the chunk in errors.

    Raises:
        ConfigError: it is not there, or something is attached to it already.
    """
    ddp = unwrap_ddp(model_chunk)
    block = find_block(model_chunk, label)
    model = innermost(model_chunk)
    if any("forward" in module.__dict__ for module in (block, model)):
        raise ConfigError(
            f"The model of {label} has a forward of its own already; detach() what was attached "
            "before."
        )
    if scope == "block":
        name = next(name for name, module in model.named_modules() if module is block)
        return _Block(block, block, ddp, label, name)
    if scope != "chunk":
        raise ConfigError(f"The scope of a capture is 'auto', 'block' or 'chunk', not {scope!r}.")
    if missing := lacks(model, block):
        raise ConfigError(
            f"{label}: {type(model).__name__} is not built like GPTModel or HybridModel (it has no "
            f"{missing}), so that it cannot be captured whole. Use scope='auto' or 'block'."
        )
    return _Model(model, block, ddp, label)


def lacks(model: nn.Module, block: nn.Module) -> str:
    """What of GPTModel's attributes a model has not, or ""."""
    missing = [name for name in _MODEL_ATTRIBUTES if not hasattr(model, name)]
    if not missing and getattr(model, "decoder", None) is not block:
        return "transformer block as its decoder"
    return ", ".join(missing)


def _unused_arguments(model: Any) -> tuple[str, ...]:
    """Arguments that the model's forward does not look at on this stage.

    Schedules' forward steps pass them on every stage all the same; each would be copied into a
    slot for every microbatch. Told only of Megatron's own methods, whose code was read.
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
    """Whether its forward is that of GPTModel or HybridModel."""
    if is_hybrid_model(model):
        return type(model).forward is hybrid_names().model.forward
    gpt = import_megatron("megatron.core.models.gpt").GPTModel
    methods = ("forward", "_preprocess", "_postprocess")
    return all(getattr(type(model), name) is getattr(gpt, name, None) for name in methods)


def _reads_position_ids(model: Any) -> bool:
    if model.position_embedding_type not in ("rope", "yarn", "none"):
        return model.pre_process or model.position_embedding_type != "learned_absolute"
    module = "megatron.core.models.common.embeddings.language_model_embedding"
    embedding = import_megatron(module).LanguageModelEmbedding
    return model.pre_process and type(model.embedding) is not embedding


def find_block(model_chunk: nn.Module, label: str) -> nn.Module:
    """The one transformer block of a model chunk.

    Args:
        model_chunk: as the schedule gets it, wrappers included.
        label: names the chunk in errors.

    Raises:
        ConfigError: there is none, or there are several.
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


def innermost(model_chunk: nn.Module) -> nn.Module:
    """The model in its wrappers (DDP, Float16Module), which call it ``module``."""
    module = model_chunk
    while isinstance(getattr(module, "module", None), nn.Module):
        module = module.module  # type: ignore[assignment]
    return module


def _positional_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters after ``self``; none where it takes any number."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return ()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def _none_by_default(function: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.default is None)


def _unwrapped(hidden: Any) -> Any:
    """Megatron passes a one-use wrapper in inference code paths; take the tensor out of it."""
    unwrap = getattr(hidden, "unwrap", None)
    return unwrap() if callable(unwrap) else hidden


def _refused(label: str, name: str) -> ConfigError:
    return ConfigError(
        f"{label} was called with {name}, which a chunk graph cannot hold: "
        f"{_REFUSED_ARGUMENTS[name]}. Train without it, or detach() the chunk graphs."
    )
