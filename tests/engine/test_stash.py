"""Captured chunks with the paged stash equal eager ones, in any order of slots in flight."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from chunkgraph import ChunkGraphs
from chunkgraph.engine import CaptureOptions, Host
from chunkgraph.graphs import GraphBackend
from chunkgraph.memory.stash import PagedStash, RowsInUse, Saving

TOKENS, WIDTH, EXPERTS = 12, 16, 2
PAGE_BYTES = 128  # two rows of the input, one of an expert's inner tensor
MOST_PAGES = 7 + 12 + 12  # of one forward


class Experts(nn.Module):
    """Top-1 routing into experts with room for all tokens; the loads stay on the device."""

    def __init__(self, saving: Saving | None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.ParameterList(nn.Parameter(torch.randn(32, WIDTH)) for _ in range(EXPERTS))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, 32)) for _ in range(EXPERTS))
        self.saving = saving

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        weight, chosen = scores.max(-1)
        chosen = (chosen.unsqueeze(-1) == torch.arange(EXPERTS, device=x.device)).long()
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1) + chosen.argmax(-1) * len(x)
        rows = torch.zeros(EXPERTS * len(x), WIDTH, device=x.device).index_copy(0, place, x)
        used = torch.zeros(EXPERTS * len(x), dtype=torch.bool, device=x.device)
        used = RowsInUse.of(used.index_fill(0, place, True))
        rows, outputs = rows * 1.5, []
        for index, part in enumerate(rows.split(len(x))):
            with self.inside(used, index * len(x), len(x)):
                inner = torch.nn.functional.silu(part @ self.up[index].t())
                outputs.append(inner @ self.down[index].t())
        return x + torch.cat(outputs).index_select(0, place) * weight.unsqueeze(-1)

    def inside(self, used: RowsInUse, first: int, num_rows: int) -> AbstractContextManager[None]:
        if self.saving is None:
            return nullcontext()
        part = used.part(first, num_rows)
        return self.saving.scope(part, list(self.parameters()), f"expert from row {first}")


def make_chunks(num_chunks: int, saving: Saving | None, device: torch.device) -> list[Experts]:
    torch.manual_seed(3)
    return [Experts(saving).to(device) for _ in range(num_chunks)]


def make_saving(num_pages: int, device: torch.device) -> Saving:
    saving = Saving(PAGE_BYTES)
    saving.stash = PagedStash(PAGE_BYTES, num_pages, device)
    return saving


class SavingHost(Host):
    """Saves in pages while graphs are captured, and not in eager passes of ``verify``."""

    def __init__(self, saving: Saving) -> None:
        self._saving = saving

    def capturing(self) -> AbstractContextManager[object]:
        return self._saving.during("stash")

    def verifying(self) -> AbstractContextManager[object]:
        return self._saving.during("off")


class Captured:
    """Captured chunks with a stash, next to the same chunks in eager mode without one."""

    def __init__(
        self,
        num_slots: list[int],
        backend: GraphBackend,
        saving: Saving | None,
        num_tokens: int = TOKENS,
        **options: Any,
    ) -> None:
        device = backend.device
        self.num_tokens = num_tokens
        self.saving = saving
        self.eager = make_chunks(len(num_slots), None, device)
        self.chunks = make_chunks(len(num_slots), saving, device)
        self.graphs = ChunkGraphs(
            self.chunks,
            num_slots,
            backend=backend,
            options=CaptureOptions(**options),
            host=Host() if saving is None else SavingHost(saving),
        )
        sample = torch.randn(num_tokens, WIDTH, device=device, requires_grad=True)
        self.graphs.capture([(sample,) for _ in num_slots])
        if saving is not None:
            saving.check_all_read()
        self.num_slots = num_slots

    def step(self, rng: random.Random, num_forwards: int) -> tuple[int, bool]:
        """Run random forwards and backwards; return the peak of pages, and whether all is equal."""
        waiting: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        equal, left = True, num_forwards
        in_flight = [0] * len(self.num_slots)
        with self.graphs.step(num_forwards):
            while left or waiting:
                free = [c for c, n in enumerate(self.num_slots) if in_flight[c] < n]
                if left and free and (not waiting or rng.random() < 0.6):
                    c = rng.choice(free)
                    # A shift in one direction: loads between no tokens and all of them.
                    x = torch.randn(self.num_tokens, WIDTH, device=self.graphs.backend.device)
                    x += self.eager[c].router.weight[0].detach() * rng.uniform(-9, 9)
                    mine = x.clone().requires_grad_()
                    y = self.graphs.callables[c](mine)
                    waiting.append((c, x, mine, y))
                    in_flight[c] += 1
                    left -= 1
                else:
                    c, x, mine, y = waiting.pop(rng.randrange(len(waiting)))
                    theirs = x.clone().requires_grad_()
                    out = self.eager[c](theirs)
                    equal &= torch.equal(out, y)
                    out.square().sum().backward()
                    y.square().sum().backward()
                    in_flight[c] -= 1
                    equal &= torch.equal(mine.grad, theirs.grad)
                self.check_pages()
        pairs = zip(self.eager, self.chunks, strict=True)
        for a, b in ((p, q) for m, n in pairs for p, q in zip(*map(_params, (m, n)), strict=True)):
            equal &= torch.equal(a.grad, b.grad)
            a.grad = b.grad = None
        if self.saving is None:
            return 0, equal
        return self.saving.stash.status().num_peak_pages, equal

    def check_pages(self) -> None:
        """Check that no page is free twice."""
        if self.saving is None:
            return
        stash = self.saving.stash
        status = stash.status()
        free = stash.stack[: status.num_free_pages].tolist()
        assert len(set(free)) == len(free)
        assert set(free) <= set(range(stash.num_pages))
        if not status.num_short:
            assert len(free) + status.num_required_pages == stash.num_pages


def _params(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters())


@settings(
    max_examples=2,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    num_slots=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_random_replays_equal_eager_and_conserve_pages(
    new_backend: Callable[[], GraphBackend],
    num_slots: list[int],
    seed: int,
) -> None:
    """250 per example; poison fills every unused slot and scratch with NaN."""
    backend = new_backend()
    saving = make_saving(9 * MOST_PAGES, backend.device)
    run = Captured(num_slots, backend, saving, verify="poison")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(10):
        assert run.step(rng, 25)[1]
    assert run.graphs.counters.replays == 250
    status = saving.stash.status()
    assert (status.num_required_pages, status.num_short) == (0, 0)


def test_an_overflow_is_reported_once_for_its_step_and_the_next_step_is_right(
    backend: GraphBackend,
) -> None:
    """The peak is the number of pages that would have been enough."""
    rng = random.Random(1)
    enough = Captured([3], backend, make_saving(200, backend.device))
    peak, equal = enough.step(rng, 9)
    assert equal
    run = Captured([3], backend, make_saving(peak - 1, backend.device))
    stash = run.saving.stash
    torch.manual_seed(0)
    peak_of_step, equal = run.step(random.Random(1), 1)
    assert equal
    assert stash.status().num_short == 0
    assert peak_of_step < peak
    peaks = []
    for step in range(6):
        stash.forget_overflow()
        peak_of_step, equal = run.step(rng, 12 if step % 2 else 2)
        peaks.append(peak_of_step)
        assert equal == (stash.status().num_short == 0) == (peak_of_step <= peak - 1), step
        assert stash.status().num_required_pages == 0
        assert stash.status().num_free_pages == peak - 1
    assert max(peaks) >= peak > min(peaks)


def test_shadow_and_warmup_passes_leave_no_page_in_use(backend: GraphBackend) -> None:
    saving = make_saving(200, backend.device)
    run = Captured([2, 1], backend, saving, verify="shadow")
    assert run.step(random.Random(0), 12)[1]
    assert saving.stash.status().num_required_pages == 0
