"""Random programs train to the same bits with graphs as eagerly, or are refused."""

from __future__ import annotations

import collections
import os
import random
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .programs import Program, make_program
from .verdicts import Verdict, compare

MINUTES = float(os.environ.get("CHUNKGRAPH_RANDOM_MINUTES", "0"))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    return make_program(lambda values: draw(st.sampled_from(values)))


def sampled(seed: int, number: int) -> Program:
    """Draw a program of a long run."""
    return make_program(random.Random(f"{seed} {number}").choice)


def check(program: Program, verdict: Verdict) -> None:
    """Fail with the program, if it differs."""
    assert verdict.kind != "different", f"{verdict.why}\ncompare({program!r})"


@settings(
    max_examples=30,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # shrinking takes longer than a test may
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(programs())
def test_random_programs_are_equal_or_refused(program: Program) -> None:
    check(program, compare(program))


def test_most_programs_without_exotic_behaviour_are_replayed_and_equal() -> None:
    plain = [p for p in (sampled(0, number) for number in range(60)) if p.is_plain][:16]
    assert len(plain) == 16
    verdicts = [compare(program) for program in plain]
    for program, verdict in zip(plain, verdicts, strict=True):
        check(program, verdict)
    num_equal = sum(v.kind == "equal" and v.num_replays > 0 for v in verdicts)
    assert num_equal >= len(plain) // 2, [v.why for v in verdicts if v.kind != "equal"]


def test_programs_that_sleep_before_every_step_are_equal_or_refused() -> None:
    programs = [sampled(1, number) for number in range(16)]
    sleeping = [
        replace(p, steps=tuple(replace(s, before=(*s.before, "sleep")) for s in p.steps))
        for p in programs
    ]
    verdicts = [compare(program) for program in sleeping]
    for program, verdict in zip(sleeping, verdicts, strict=True):
        check(program, verdict)
    assert sum(v.kind == "equal" and v.num_replays > 0 for v in verdicts) >= 6


@pytest.mark.skipif(not MINUTES, reason="a long run, by hand: CHUNKGRAPH_RANDOM_MINUTES is not set")
@pytest.mark.timeout(60 * MINUTES + 600)
def test_random_programs_for_long() -> None:
    """CHUNKGRAPH_RANDOM_MINUTES=20 CHUNKGRAPH_RANDOM_SEED=1 pytest -s -k for_long"""
    end = time.monotonic() + 60 * MINUTES
    seed = int(os.environ.get("CHUNKGRAPH_RANDOM_SEED", "0"))
    counts: collections.Counter[str] = collections.Counter()
    number = 0
    while time.monotonic() < end:
        program = sampled(seed, number)
        verdict = compare(program)
        counts[verdict.kind] += 1
        if verdict.kind == "different":
            print(f"\nprogram {number}: {verdict.why}\ncompare({program!r})")
        number += 1
    print(f"\nseed {seed}: {dict(counts)}")
    assert not counts["different"]
