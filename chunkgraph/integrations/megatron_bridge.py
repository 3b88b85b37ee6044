"""Train with chunk graphs in Megatron-Bridge.

A callback attaches them::

    from chunkgraph.integrations.megatron_bridge import ChunkGraphsCallback

    pretrain(config, forward_step, callbacks=[ChunkGraphsCallback()])

With ``config.model.cuda_graph_impl`` and ``config.optimizer.optimizer_cuda_graph`` at their
defaults, since chunk graphs replace both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from megatron.bridge.training import eval as evaluation
from megatron.bridge.training import train
from megatron.bridge.training.callbacks import Callback, CallbackContext

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.attachment import MegatronChunkGraphs, attach
from chunkgraph.megatron.core.access import patch_attributes


class ChunkGraphsCallback(Callback):  # type: ignore[misc]
    """Attach chunk graphs when training starts, and detach them when it ends.

    Create it before ``pretrain()``, on every rank, for one training: Bridge's loop asks for the
    schedule before its first event, so the schedules that it gets from now on look for graphs in
    each step.

    Attributes:
        graphs: The graphs during training, otherwise None.

    Args:
        options: Options of `chunkgraph.megatron.attach`. With the scope ``auto`` the optimizer's
            step is captured too, if a graph can hold it.
    """

    def __init__(self, **options: Any) -> None:
        self.graphs: MegatronChunkGraphs | None = None
        self._options = options
        self._undo = ExitStack()
        for module in (train, evaluation):
            get = partial(self._late_bound, module.get_forward_backward_func)
            self._undo.callback(patch_attributes(module, {"get_forward_backward_func": get}))

    def _late_bound(self, get: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Return Megatron's schedule, run by the graphs that are attached when it is called."""
        schedule = get(*args, **kwargs)

        def forward_backward(**kwargs: Any) -> Any:
            graphs = self.graphs
            run = schedule if graphs is None else graphs.wrap_forward_backward(schedule)
            return run(**kwargs)

        return forward_backward

    def on_train_start(self, context: CallbackContext) -> None:
        """Attach graphs to the model, which is wrapped and loaded now.

        Raises:
            ConfigError: The model, or a setting of the run, does not go with chunk graphs.
        """
        if getattr(context.state.cfg.optimizer, "optimizer_cuda_graph", False):
            raise ConfigError(
                "optimizer.optimizer_cuda_graph: chunk graphs capture the optimizer's step "
                "themselves. Leave it out."
            )
        self.graphs = attach(context.model, **self._options)
        self._undo.callback(self.graphs.detach)
        if self._options.get("scope", "auto") == "auto":
            self.graphs.capture_optimizer(context.optimizer)

    def on_train_end(self, context: CallbackContext) -> None:  # noqa: ARG002
        """Detach the graphs, and give Bridge its schedules back."""
        self.graphs = None
        self._undo.close()
