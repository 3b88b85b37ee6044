"""Megatron-Bridge's training loop with chunk graphs: its real package, and its order of calls."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping
from in_process import Trained, detach_all
from training_needs import HAS_MEGATRON, NEEDS_TRAINING

from chunkgraph.errors import ConfigError

ROOT = Path(__file__).parents[2]
HAS_BRIDGE = HAS_MEGATRON and importlib.util.find_spec("megatron.bridge") is not None

pytestmark = [pytest.mark.megatron, NEEDS_TRAINING]


class Events:
    """The callback's base class: events that do nothing."""

    def on_train_start(self, context: Any) -> None:
        """Begin the training."""

    def on_train_end(self, context: Any) -> None:
        """End the training."""


@pytest.fixture
def bridge(one_rank: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install modules with the names that the callback uses; return that of the loop."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    modules = {name: ModuleType(name) for name in ("train", "eval", "callbacks", "training")}
    for name in ("train", "eval"):
        modules[name].get_forward_backward_func = get_forward_backward_func  # type: ignore[attr-defined]
    modules["callbacks"].Callback = Events  # type: ignore[attr-defined]
    modules["callbacks"].CallbackContext = SimpleNamespace  # type: ignore[attr-defined]
    vars(modules["training"]).update(train=modules["train"], eval=modules["eval"], __path__=[])
    monkeypatch.setitem(sys.modules, "megatron.bridge", ModuleType("megatron.bridge"))
    for name, module in modules.items():
        path = "megatron.bridge.training" + ("" if name == "training" else f".{name}")
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.delitem(sys.modules, "chunkgraph.integrations.megatron_bridge", raising=False)
    yield SimpleNamespace(**modules)
    detach_all()
    sys.modules.pop("chunkgraph.integrations.megatron_bridge", None)


def train(bridge: Any, trained: Trained, callback: Any, optimizer: Any) -> list[list[float]]:
    """Train as ``megatron.bridge.training.train.train`` does; return the losses of each step."""
    cfg = SimpleNamespace(optimizer=SimpleNamespace(optimizer_cuda_graph=False))
    state = SimpleNamespace(cfg=cfg)
    trained.train = bridge.train.get_forward_backward_func()
    context = SimpleNamespace(model=trained.chunks, state=state, optimizer=optimizer)
    callback.on_train_start(context)
    losses = [trained.step(step, count) for step, count in enumerate((2, 3, 1))]
    trained.train = bridge.eval.get_forward_backward_func()
    with torch.no_grad():
        losses.append(trained.step(0, 2, forward_only=True))
    callback.on_train_end(context)
    return losses


def test_a_schedule_fetched_before_the_first_event_runs_graphs(
    bridge: Any, one_rank: torch.device, make_config: Callable[..., dict[str, Any]]
) -> None:
    from chunkgraph.integrations.megatron_bridge import ChunkGraphsCallback

    config = config_from_mapping(make_config())
    originals = bridge.train.get_forward_backward_func, bridge.eval.get_forward_backward_func
    expected = train(bridge, Trained(one_rank, config, None), Events(), None)
    callback = ChunkGraphsCallback(scope="block")
    assert bridge.train.get_forward_backward_func is not originals[0]
    counters: list[Any] = []
    end = callback.on_train_end

    def on_train_end(context: Any) -> None:
        counters.append(callback.graphs.counters)
        end(context)

    callback.on_train_end = on_train_end
    assert train(bridge, Trained(one_rank, config, None), callback, None) == expected
    assert callback.graphs is None
    assert counters[0].replayed_steps == 2
    assert counters[0].replays == 4
    assert (
        bridge.train.get_forward_backward_func,
        bridge.eval.get_forward_backward_func,
    ) == originals


def test_bridges_own_graph_of_the_optimizer_is_refused(bridge: Any) -> None:
    from chunkgraph.integrations.megatron_bridge import ChunkGraphsCallback

    cfg = SimpleNamespace(optimizer=SimpleNamespace(optimizer_cuda_graph=True))
    callback = ChunkGraphsCallback()
    with pytest.raises(ConfigError, match="optimizer_cuda_graph"):
        callback.on_train_start(SimpleNamespace(state=SimpleNamespace(cfg=cfg)))
    callback.on_train_end(None)
    assert "chunkgraph" not in repr(bridge.train.get_forward_backward_func)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_BRIDGE, reason="megatron-bridge is not installed")
def test_bridges_pretrain_equals_eager(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """Two stages, evaluations and tests between and after the steps, to the last bit."""
    logs = {}
    for kind in ("eager", "chunk"):
        job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        job |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        job |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        program = ROOT / "tests" / "support" / "bridge_pretrain.py"
        ranks = [
            subprocess.Popen(
                [sys.executable, str(program), str(tmp_path / kind), kind],
                env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
            )
            for rank in range(2)
        ]
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], (
            outputs[0][-4000:] + outputs[1][-4000:]
        )
        logs[kind] = [(tmp_path / f"{kind}.rank{rank}").read_text() for rank in range(2)]
    assert logs["chunk"] == logs["eager"]
    assert [log.count("\n") for log in logs["eager"]] == [4, 4]
    assert "replayed_steps=3" in outputs[0]
    assert "captures=2" in outputs[0]
