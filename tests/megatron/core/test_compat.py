"""The adapters to private names work with the installed Megatron."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
from chunkgraph.megatron.core.data_parallel import (
    DDP_MODULE,
    call_parameter_gather_hooks,
    gradient_marker,
)
from chunkgraph.megatron.features import tracked_losses as token_prediction

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]


def test_only_the_hooks_of_ddp_are_called_and_the_list_is_read_again(
    one_rank: torch.device,
) -> None:
    called: list[str] = []
    module = nn.Linear(2, 2)

    def gather(module: nn.Module, args: tuple[()]) -> None:
        called.append("gather")

    gather.__module__ = DDP_MODULE

    def foreign(module: nn.Module, args: tuple[()]) -> None:
        called.append("foreign")

    module.register_forward_pre_hook(foreign)
    call_parameter_gather_hooks([module])
    assert called == []
    handle = module.register_forward_pre_hook(gather)
    call_parameter_gather_hooks([module, module])
    handle.remove()
    call_parameter_gather_hooks([module])
    assert called == ["gather", "gather"]


def test_the_hooks_of_this_release_are_recognised(one_rank: torch.device) -> None:
    """DDP's pre-hook comes from the module that the plug-in expects."""
    from megatron.core.distributed import DistributedDataParallel

    hook = DistributedDataParallel._make_forward_pre_hook(SimpleNamespace())
    assert hook.__module__ == DDP_MODULE


def test_gradients_are_ready_as_in_eager_training(one_rank: torch.device) -> None:
    calls: list[tuple[Any, ...]] = []

    class Group:
        is_last_microbatch = True

        def register_grad_ready(self, param: Any, force_all_reduce: bool = False) -> None:
            calls.append((param, force_all_reduce))

    parameter, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    ddp: Any = nn.Module()
    ddp.ddp_config = SimpleNamespace(overlap_grad_reduce=True)
    ddp.param_to_bucket_group = {parameter: Group()}
    ddp.force_all_reduce = True
    new_marker = gradient_marker(ddp, [parameter, other])
    assert new_marker is not None
    marker = new_marker()
    marker.accumulated(1)  # not DDP's
    marker.replayed()
    assert calls == []
    marker.accumulated(0)
    marker.replayed()
    assert calls == [(parameter, True)]
    group = ddp.param_to_bucket_group[parameter]
    group.is_last_microbatch = False
    marker.replayed()
    assert len(calls) == 1


def test_no_signal_without_overlap() -> None:
    ddp: Any = nn.Module()
    ddp.ddp_config = SimpleNamespace(overlap_grad_reduce=False)
    ddp.param_to_bucket_group = {}
    assert gradient_marker(ddp, []) is None


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


def test_the_number_of_predicted_tokens_stays_on_the_device(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For releases that check on the host whether there are any."""
    from megatron.core.transformer import multi_token_prediction as module

    def process_mtp_loss(mask: torch.Tensor) -> torch.Tensor:
        _, num_tokens = module.roll_tensor(mask, -1, -1)
        total = torch.tensor(3.0)
        mean = total / num_tokens if num_tokens > 0 else total.new_tensor(0.0)
        return mean + total / num_tokens.clamp(min=1)

    roll = module.roll_tensor
    monkeypatch.setattr(module, "process_mtp_loss", process_mtp_loss, raising=False)
    undo = token_prediction._count_on_the_device()
    on_device = [process_mtp_loss(torch.full((4,), value)) for value in (1.0, 0.0)]
    _, count = module.roll_tensor(torch.zeros(4), -1, -1)
    assert bool(count > 0)  # no read on the host
    assert all(type(mean) is torch.Tensor for mean in on_device)
    undo()
    assert module.roll_tensor is roll
    on_host = [process_mtp_loss(torch.full((4,), value)) for value in (1.0, 0.0)]
    assert on_device == on_host == [2.0, 3.0]
    monkeypatch.setattr(module, "process_mtp_loss", roll)  # a release without this check
    token_prediction._count_on_the_device()()
    assert module.roll_tensor is roll
