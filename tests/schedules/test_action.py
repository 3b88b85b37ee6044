from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkgraph.errors import ScheduleError
from chunkgraph.schedules import Action, Op

numbers = st.integers(min_value=0, max_value=10**6)
actions = st.builds(Action, st.sampled_from(Op), numbers, numbers)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Op.F, 2, 0)),
        ("0I13", Action(Op.I, 0, 13)),
        ("3SEND_B1", Action(Op.SEND_B, 3, 1)),
        (" 10W7 ", Action(Op.W, 10, 7)),
    ],
)
def test_text_form(text, action):
    assert Action.parse(text) == action
    assert str(action) == text.strip()


@settings(deadline=None)
@given(actions)
def test_text_round_trip(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "2F", "F0", "2X0", "2F-1", "2F0 3F0", "2f0", "2F0.5"])
def test_bad_text_shows_form_and_example(text):
    with pytest.raises(ScheduleError, match=r"<stage><operation><microbatch>.*'2F0'"):
        Action.parse(text)
