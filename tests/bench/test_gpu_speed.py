"""`bench` reports the speed of each GPU next to its times."""

from __future__ import annotations

import pytest
import torch

from chunkgraph.bench.gpu_speed import matmul_tflops


def test_a_cpu_has_none() -> None:
    assert matmul_tflops(torch.device("cpu")) is None


@pytest.mark.gpu
def test_a_gpu_has_one_and_training_draws_the_same_numbers() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state = torch.cuda.get_rng_state(device)
    tflops = matmul_tflops(device)
    assert tflops is not None
    assert 10 < tflops < 5000
    assert torch.equal(torch.cuda.get_rng_state(device), state)
