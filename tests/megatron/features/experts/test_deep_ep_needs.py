"""DeepEP's requirements on the machine, and their errors."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deep_ep_config import BACKENDS, HOLDS

from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.launch.arguments import settle_arguments
from chunkgraph.launch.flags import FLAGS
from chunkgraph.launch.hooks import _set_rank_budget
from chunkgraph.megatron.features.experts import cublaslt as cublaslt_module
from chunkgraph.megatron.features.experts import deep_ep as moe_flex
from chunkgraph.megatron.features.experts import deep_ep_needs
from chunkgraph.megatron.features.experts.deep_ep import refuse_for_deep_ep
from chunkgraph.megatron.refusals import facts_of_model

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]


def machine(
    monkeypatch: pytest.MonkeyPatch,
    *,
    deep_ep: tuple[str | None, bool] = ("1.2.1", True),
    cublaslt: int | None = 130801,
    fused: str = "1",
    has_nvml: object = object(),
) -> None:
    monkeypatch.setattr(deep_ep_needs, "deep_ep_state", lambda: deep_ep)
    monkeypatch.setattr(deep_ep_needs, "supports_worst_case", lambda: deep_ep[1])
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: has_nvml if name == "pynvml" else real(name)
    )
    monkeypatch.setattr(cublaslt_module, "cublaslt_version", lambda: cublaslt)
    monkeypatch.setenv(deep_ep_needs.FUSED_GROUPED_MLP, fused)


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ({"deep_ep": (None, False)}, "deep_ep is not installed; build the branch hybrid-ep"),
        ({"deep_ep": ("1.1.0", False)}, r"deep_ep \(1.1.0\) has no HybridEP"),
        ({"cublaslt": 130100}, "cuBLASLt 13.1.0 moves token counts through the host; .*13.8.1"),
        ({"cublaslt": None}, "cuBLASLt 13.8.1 or newer was not found"),
        ({"fused": "0"}, "NVTE_CUTEDSL_FUSED_GROUPED_MLP is not set to 1"),
        ({"fused": "yes"}, "NVTE_CUTEDSL_FUSED_GROUPED_MLP is not set to 1"),
    ],
)
def test_what_the_machine_lacks_is_reported_with_another_way(
    monkeypatch: pytest.MonkeyPatch, lacks: dict[str, Any], message: str
) -> None:
    machine(monkeypatch)
    config = SimpleNamespace(**HOLDS)
    assert deep_ep_needs.deep_ep_is_missing(facts_of_model(config)) is None
    refuse_for_deep_ep(facts_of_model(config))
    machine(monkeypatch, **lacks)
    with pytest.raises(MissingDependencyError, match=message) as error:
        refuse_for_deep_ep(facts_of_model(config))
    assert "moe_token_dispatcher_type='alltoall'" in str(error.value)
    config.moe_token_dispatcher_type = "alltoall"
    refuse_for_deep_ep(facts_of_model(config))  # not requested


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ({"deep_ep": (None, False)}, "deep_ep is not installed; build DeepEP for this machine"),
        ({"deep_ep": ("1.1.0", False)}, r"deep_ep \(1.1.0\) cannot size its output"),
        ({"cublaslt": 130100}, "cuBLASLt 13.1.0 moves token counts"),
        ({"has_nvml": None}, "pynvml is not installed"),
    ],
)
def test_what_deep_ep_itself_lacks_is_reported(
    monkeypatch: pytest.MonkeyPatch, lacks: dict[str, Any], message: str
) -> None:
    config = SimpleNamespace(**{**HOLDS, "moe_flex_dispatcher_backend": "deepep"})
    machine(monkeypatch)
    refuse_for_deep_ep(facts_of_model(config))
    machine(monkeypatch, **lacks)
    with pytest.raises(MissingDependencyError, match=rf"Dispatch with DeepEP (.|\n)*{message}"):
        refuse_for_deep_ep(facts_of_model(config))


@pytest.mark.parametrize(
    ("ranks", "rank", "local", "others"),
    [
        ([4, 5, 6, 7], 5, ("1", "4"), []),
        ([2, 3, 4, 5], 3, ("3", "4"), [4, 5]),
        ([2, 3, 4, 5], 4, ("0", "4"), [2, 3]),
        ([0, 4], 4, ("0", "4"), [0]),
        ([0, 4], 4, ("", "4"), []),  # no setting
        ([0, 4], 4, (None, None), []),
    ],
)
def test_experts_of_several_nodes_are_refused_where_deep_ep_stays_within_one(
    monkeypatch: pytest.MonkeyPatch,
    ranks: list[int],
    rank: int,
    local: tuple[str | None, str | None],
    others: list[int],
) -> None:
    machine(monkeypatch)
    monkeypatch.setattr(moe_flex, "expert_ranks", lambda: ranks)
    monkeypatch.setattr(moe_flex.dist, "get_rank", lambda: rank)
    for name, value in zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local, strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    config = SimpleNamespace(**HOLDS)
    refuse_for_deep_ep(facts_of_model(config))  # HybridEP detects it
    config.moe_flex_dispatcher_backend = "deepep"
    if not others:
        refuse_for_deep_ep(facts_of_model(config))
        return
    with pytest.raises(ConfigError, match=rf"rank {rank}: (.|\n)*of which \{others} are on other"):
        refuse_for_deep_ep(facts_of_model(config))


def test_the_worst_case_is_looked_for_without_an_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "deep_ep"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('it wants a GPU')")
    importlib.invalidate_caches()
    assert not deep_ep_needs.supports_worst_case()
    (folder / "buffer.py").write_text("def dispatch(num_worst_tokens: int = 0) -> None: ...")
    assert deep_ep_needs.supports_worst_case()


@pytest.mark.parametrize("backend", BACKENDS)
def test_launch_names_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    flags = dict.fromkeys(flag.dest for flag in FLAGS)
    arguments: dict[str, Any] = {
        **flags,
        **{name: value for name, value in HOLDS.items() if name != "gated_linear_unit"},
        "moe_flex_dispatcher_backend": backend,
        "cuda_graph_granularity": "chunk",
        "cuda_graph_impl": "local",
        "cuda_graph_warmup_steps": 3,
        "cuda_graph_token_drops": "rerun",
        "num_experts": 8,
        "swiglu": True,
        "transformer_impl": "local",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    machine(monkeypatch, deep_ep=(None, False), fused="0")
    with pytest.raises(ConfigError) as error:
        settle_arguments(argparse.Namespace(**arguments), on_cpu=False)
    assert f"--moe-flex-dispatcher-backend {backend}: " in str(error.value)
    assert "deep_ep is not installed" in str(error.value)
    assert "NVTE_CUTEDSL_FUSED_GROUPED_MLP" in str(error.value)
    with pytest.raises(ConfigError, match=f"{backend}: it needs GPUs"):
        settle_arguments(argparse.Namespace(**arguments), on_cpu=True)
    machine(monkeypatch)
    args = argparse.Namespace(**arguments)
    assert settle_arguments(args, on_cpu=False) is not None
    # Megatron's config refuses a budget with deepep; it is set later.
    later = getattr(args, "cuda_graph_expert_rank_capacity_factor", None)
    kept = (args.moe_expert_rank_capacity_factor, later)
    assert kept == ((1.5, None) if backend == "hybridep" else (None, 1.5))


def test_launch_puts_the_budget_where_megatron_refuses_it(one_rank: Any) -> None:
    chunk = torch.nn.Linear(2, 2)
    chunk.config = SimpleNamespace(moe_expert_rank_capacity_factor=None)  # type: ignore[assignment]
    _set_rank_budget(argparse.Namespace(), [chunk])
    assert chunk.config.moe_expert_rank_capacity_factor is None
    args = argparse.Namespace(cuda_graph_expert_rank_capacity_factor=1.5)
    _set_rank_budget(args, [chunk])
    assert chunk.config.moe_expert_rank_capacity_factor == 1.5
