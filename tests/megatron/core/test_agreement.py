"""Ranks that agree without gloo, through the store of the job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(90)]


@pytest.fixture
def run_text(
    run_script: Callable[..., tuple[list[int], str]], tmp_path: Path
) -> Callable[..., tuple[list[int], str]]:
    """Run a script as ranks; return the exit codes and the output of all."""

    def run(text: str, num_ranks: int) -> tuple[list[int], str]:
        script = tmp_path / "probe.py"
        script.write_text(text, encoding="utf-8")
        return run_script(script, num_ranks=num_ranks, timeout_s=60.0)

    return run


PROBE = """
import os, re, signal, sys, time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from chunkgraph.errors import WorkerError
from chunkgraph.megatron.core import agreement
from chunkgraph.megatron.core.agreement import StoreMaximum, exchange_between

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank, size = dist.get_rank(), dist.get_world_size()
maximum, another = StoreMaximum(range(size)), StoreMaximum(range(size))
agreement.uses_gloo = lambda: False
of_store = exchange_between(dist.group.WORLD)
agreement.uses_gloo = lambda: True
of_gloo = exchange_between(dist.group.WORLD)
for step in range(20):
    ahead = maximum.start([rank * step, -rank, step])
    if rank == step % size:
        time.sleep(0.01)
    assert another([step, -step]) == [step, -step]
    assert maximum([rank]) == [size - 1]  # asks before the other answer arrives
    assert ahead() == ahead() == [step * (size - 1), 0, step]
    for exchange in (of_store, of_gloo):
        assert exchange.gather((rank, "a" * rank)) == [(r, "a" * r) for r in range(size)]
        shared = exchange.share({"of": rank, "row": torch.full((rank + 1,), step)})
        assert shared["of"] == 0 and shared["row"].tolist() == [step]
dist.barrier()
assert maximum._posts._store.num_keys() < 30  # of 20 steps, and torch's own
dist.barrier()
if rank == int(os.environ["LOST"]):
    if rank == 0:  # it serves the store
        if not os.fork():
            time.sleep(25)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
begun = time.monotonic()
try:
    maximum([1])
except WorkerError as error:
    assert "another rank ended or did not answer in time" in str(error), error
    assert time.monotonic() - begun < 20
    lost = os.environ["LOST"]  # a rank that waits itself may have said so too late
    assert re.search(rf"rank ([0-9]+, )*{lost}", str(error).lower()), error
    if lost == "0":  # the store
        with pytest.raises(WorkerError):
            StoreMaximum(range(size))
    print("noticed the rank that is lost", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("lost", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_agreement_through_the_store_and_the_loss_of_a_rank(
    run_text: Callable[..., tuple[list[int], str]], monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """The last rank ends, or the first one, whose process serves the store, is stopped."""
    monkeypatch.setenv("LOST", str(lost))
    codes, output = run_text(PROBE, 3)
    assert codes == [0 if lost else -9, 0, 0], output[-3000:]
    assert output.count("noticed the rank that is lost") == 2


WITHOUT_GLOO = """
import torch.distributed as dist, megatron.core.parallel_state as state

from chunkgraph.megatron.core import agreement

dist.init_process_group("gloo")
backends = []
new_group = dist.new_group

def counted(*args, backend=None, **kwargs):
    backends.append(backend)
    return new_group(*args, backend=backend, **kwargs)

dist.new_group = counted
for create, kinds in ((True, {"gloo"}), (False, set())):
    state.initialize_model_parallel(
        tensor_model_parallel_size=2, create_gloo_process_groups=create
    )
    assert agreement.uses_gloo() == create
    backends.clear()
    maximum = agreement.agree_by_maximum()
    tensor_ranks = agreement.exchange_between(state.get_tensor_model_parallel_group())
    assert maximum([dist.get_rank()]) == [1]
    assert tensor_ranks.share(f"of rank {dist.get_rank()}") == "of rank 0"
    state.destroy_model_parallel()
    state.initialize_model_parallel(create_gloo_process_groups=create)
    data_ranks = agreement.exchange_between(state.get_data_parallel_group(True))
    assert data_ranks.gather(dist.get_rank()) == [0, 1]
    assert "gloo" in backends if create else backends.count("gloo") == 0
    for one in (maximum, tensor_ranks, data_ranks):
        one.close()
    state.destroy_model_parallel()
dist.barrier()
print("done", flush=True)
import os
os._exit(0)
"""


def test_no_group_of_gloo_is_made_where_megatron_may_make_none(
    run_text: Callable[..., tuple[list[int], str]],
) -> None:
    codes, output = run_text(WITHOUT_GLOO, 2)
    assert codes == [0, 0], output[-3000:]
    assert output.count("done") == 2
