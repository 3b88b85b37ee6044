"""What tests of Megatron's part attach is detached when they end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from in_process import detach_all


@pytest.fixture(autouse=True)
def _detached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Detach before patches of the test are undone, which attaching may have saved."""
    yield
    detach_all()
