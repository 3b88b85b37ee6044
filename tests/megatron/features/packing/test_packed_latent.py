"""Multi-latent attention with YARN on packed documents, on a CPU: chunk graphs equal eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import packed_cases
import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(150)]

_PP2 = {"pipeline_model_parallel_size": 2}


@pytest.fixture
def make(
    make_config: Callable[..., Any],
    write_documents: Callable[..., Path],
) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a run of two layers on documents of 3 to 23 bytes."""
    if not packed_cases.HAS_LATENT:
        pytest.skip("this release's multi-latent attention cannot be built on a CPU")
    text = write_documents(range(2, 23))
    return lambda kind, counts, **more: packed_cases.cpu_case(
        text, make_config, kind, counts, **more
    )


@pytest.mark.every_release
def test_one_rank(run_equal: Callable[..., Any], make: Callable[..., dict[str, Any]]) -> None:
    cases = {
        "block": make("latent", [2, 3, 1], capture={"verify": "poison"}),
        "chunk": make("latent", [2, 3], capture={"scope": "chunk"}),
    }
    packed_cases.all_but_the_first_replay(run_equal(cases, 1))


@pytest.mark.slow
def test_two_ranks(run_equal: Callable[..., Any], make: Callable[..., dict[str, Any]]) -> None:
    """Two stages, and two ranks that share every document."""
    chunk = {"capture": {"scope": "chunk"}}
    cases = {
        "pp2": make("latent", [3, 1, 2], **chunk, **_PP2),
        "cp2": make("shared_latent", [2, 3], context_parallel_size=2),
    }
    packed_cases.all_but_the_first_replay(run_equal(cases, 2))
