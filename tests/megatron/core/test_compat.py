"""The adapters to private names work with the installed Megatron."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chunkgraph.errors import ConfigError, MissingDependencyError
from chunkgraph.megatron import attach
from chunkgraph.megatron.core.access import (
    import_megatron,
    private_names,
    refuse_other_releases,
)

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]


def test_a_name_that_a_release_moved_is_reported(one_rank: torch.device) -> None:
    with pytest.raises(ConfigError, match="no_such_name"):
        private_names("megatron.core.transformer.cuda_graphs", "no_such_name")
    with pytest.raises(MissingDependencyError, match="no_such_room"):
        import_megatron("megatron.core.no_such_room")


@pytest.mark.parametrize(("major", "minor", "is_known"), [(0, 15, 0), (0, 16, 1), (0, 20, 0)])
def test_other_releases_are_refused(
    one_rank: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    major: int,
    minor: int,
    is_known: int,
) -> None:
    from megatron.core import package_info

    refuse_other_releases()  # the installed one is in the range
    monkeypatch.setattr(package_info, "MAJOR", major)
    monkeypatch.setattr(package_info, "MINOR", minor)
    if is_known:
        refuse_other_releases()
        return
    with pytest.raises(ConfigError, match=r"support the releases 0\.16 to 0\.19"):
        refuse_other_releases()
    with pytest.raises(ConfigError, match="train without chunk graphs"):
        attach(nn.Linear(2, 2))
