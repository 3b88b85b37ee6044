"""The device of a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chunkgraph.settings import config_from_mapping
from chunkgraph.trainer.setup import choose_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_ranks_share_a_gpu_only_where_nccl_lets_them(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_from_mapping({**make_config(), "device": "cuda"})
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device(config) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device(config) == torch.device("cuda", 3)  # which torch refuses
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert choose_device(config) == torch.device("cuda", 1)
