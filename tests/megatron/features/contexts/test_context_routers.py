"""Routers count the tokens of whole microbatches, over the groups that share them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from chunkgraph.megatron.features.contexts import follow_groups
from chunkgraph.megatron.features.contexts.feature import _follows

# No `megatron` marker: `test_context_training` has whole jobs.


class _Group:
    """The part of a process group that routers use."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class _Router(nn.Module):
    """Has Megatron's losses; records them and the group that reduces each."""

    def __init__(self, num_tensor_ranks: int) -> None:
        super().__init__()
        self.tp_group = self.tp_cp_group = _Group(num_tensor_ranks)
        self.tp_dp_cp_group = _Group(8 * num_tensor_ranks)
        self.seen: list[tuple[str, float, Any]] = []

    def attach_and_log_load_balancing_loss(
        self, activation: Any, _coefficient: float, loss: float, name: str, group: Any, **_: Any
    ) -> Any:
        self.seen.append((name, loss, group))
        assert (
            self.tp_cp_group is self.tp_group
        )  # Megatron multiplies by its size if the loss is per token
        return activation

    def apply_z_loss(self, logits: Any) -> Any:
        self.seen.append(("z", 1.0 / self.tp_cp_group.size(), None))
        return logits

    def forward(self) -> None:
        self.apply_z_loss(0)
        counted_over = self.tp_cp_group
        attach = self.attach_and_log_load_balancing_loss
        attach(0, 0.5, 1.0, "balance", counted_over)
        attach(0, 0.5, 1.0, "global", self.tp_dp_cp_group, valid_token_count=3)
        assert self.tp_cp_group is counted_over


class _Layer(nn.Module):
    def __init__(self, num_tensor_ranks: int = 1) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.router = _Router(num_tensor_ranks)

    def forward(self, *, packed_seq_params: Any = None) -> None:
        self.mlp.router()


def test_a_microbatch_of_several_ranks_weighs_as_much_as_its_rows() -> None:
    layer = _Layer()
    router = layer.mlp.router
    own = router.tp_cp_group
    undo = follow_groups([layer], _Groups())  # type: ignore[arg-type]
    for group in (_Group(4), None):
        layer(packed_seq_params=SimpleNamespace(cp_group=group))
    undo()
    shared, alone = router.seen[:3], router.seen[3:]
    assert shared == [
        ("z", 1.0, None),
        ("balance", 4.0, own),
        ("global", 1.0, router.tp_dp_cp_group),
    ]
    assert alone == [
        ("z", 1.0, None),
        ("balance", 1.0, own),
        ("global", 1.0, router.tp_dp_cp_group),
    ]
    assert router.tp_cp_group is own
    assert not {"apply_z_loss", "attach_and_log_load_balancing_loss"} & vars(router).keys()


class _Groups:
    """Groups of microbatches on one, two and four ranks, with two tensor-parallel ranks."""

    def __init__(self) -> None:
        self.two, self.four = _Group(2), _Group(4)
        self._of_routers = {self.two: _Group(4), self.four: _Group(8), None: None}

    def of_routers(self, group: Any) -> Any:
        return self._of_routers[group]


def test_a_model_follows_the_groups_that_it_was_given() -> None:
    chunks, groups = [nn.Sequential(_Layer(), _Layer(num_tensor_ranks=2))], _Groups()
    undo = follow_groups(chunks, groups)  # type: ignore[arg-type]
    assert _follows(chunks, groups)  # type: ignore[arg-type]
    assert not _follows(chunks, _Groups())  # type: ignore[arg-type]
    undo()
    assert not _follows(chunks, groups)  # type: ignore[arg-type]
