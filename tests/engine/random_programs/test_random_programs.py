"""Random programs train to the same bits with graphs as eagerly, or are refused."""

from __future__ import annotations

import collections
import os
import random
import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .layers import EXOTIC, NESTING, PLAIN
from .programs import Program, make_program, reduced
from .verdicts import Verdict, compare

MINUTES = float(os.environ.get("CHUNKGRAPH_RANDOM_MINUTES", "0"))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    return make_program(lambda values: draw(st.sampled_from(values)))


def sampled(seed: int, number: int) -> Program:
    """Draw a program of a long run."""
    return make_program(random.Random(f"{seed} {number}").choice)


def check(program: Program, verdict: Verdict) -> None:
    """Fail with the simplest program that differs."""
    if verdict.kind == "different":
        small = reduced(program, lambda p: compare(p).kind == "different", max_tries=60)
        pytest.fail(f"{compare(small).why}\ncompare({small!r})")


@settings(
    max_examples=30,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # no shrinking phase: `reduced` simplifies a failure sooner
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


def test_there_are_as_many_kinds_of_layers_as_random_models_need() -> None:
    assert len(PLAIN) >= 25
    assert not (PLAIN.keys() & EXOTIC.keys()) | (NESTING.keys() & (PLAIN.keys() | EXOTIC.keys()))


@pytest.mark.skipif(not MINUTES, reason="a long run, by hand: CHUNKGRAPH_RANDOM_MINUTES is not set")
@pytest.mark.timeout(60 * MINUTES + 600)
def test_random_programs_for_long() -> None:
    """CHUNKGRAPH_RANDOM_MINUTES=20 CHUNKGRAPH_RANDOM_SEED=1 pytest -s -k for_long"""
    end = time.monotonic() + 60 * MINUTES
    seed = int(os.environ.get("CHUNKGRAPH_RANDOM_SEED", "0"))
    counts: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    number = 0
    while time.monotonic() < end:
        program = sampled(seed, number)
        verdict = compare(program)
        counts[_category(program, verdict)] += 1
        if verdict.kind == "different":
            small = reduced(program, lambda p: compare(p).kind == "different", max_tries=100)
            failures.append(f"{compare(small).why}\ncompare({small!r})")
            print(f"\nprogram {number}:\n{failures[-1]}")
        number += 1
    print(f"\nseed {seed}, {number} programs, {len(failures)} different")
    for category, count in counts.most_common():
        print(f"{count:6d}  {category}")
    assert not failures, failures


def _category(program: Program, verdict: Verdict) -> str:
    style = "plain" if program.is_plain else "exotic"
    replayed = "replayed" if verdict.num_replays else "never replayed"
    why = verdict.why.split(":")[0].split(" at ")[0] if verdict.kind != "different" else ""
    return f"{verdict.kind}, {style}, {replayed}{', ' * bool(why)}{why}"
