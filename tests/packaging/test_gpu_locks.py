"""GPU locks of test processes: a GPU has a limited number of users, and no test starves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

GPUS = ["2", "3", "5", "7"]
Hold = Callable[..., AbstractContextManager[list[str]]]


@pytest.fixture
def hold(pytestconfig: pytest.Config, tmp_path: Path) -> Hold:
    path = str(Path(__file__).parents[1] / "conftest.py")
    conftest: Any = pytestconfig.pluginmanager.get_plugin(path)
    return lambda num, gpus=GPUS, **more: conftest.gpus_held(num, gpus, tmp_path, **more)


def together(*calls: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors


@pytest.mark.timeout(90)
@pytest.mark.parametrize("seats", [1, 2])
def test_no_gpu_has_too_many_users(hold: Hold, seats: int) -> None:
    users = dict.fromkeys(GPUS, 0)
    counts: list[tuple[int, int]] = []
    count = threading.Lock()

    def use(num: int) -> None:
        for _ in range(5):
            with hold(num, seats=seats) as held:
                with count:
                    for gpu in held:
                        users[gpu] += 1
                counts.append((len(held), max(users.values())))
                time.sleep(0.002)
                with count:
                    for gpu in held:
                        users[gpu] -= 1

    together(*(lambda num=num: use(num) for num in (4, 1, 2, 1, 4, 2)))  # type: ignore[misc]
    assert sorted(num for num, _ in counts) == sorted(5 * [4, 1, 2, 1, 4, 2])
    assert max(most for _, most in counts) <= seats


def test_seats_are_shared_where_no_gpu_is_free(hold: Hold) -> None:
    with hold(3, seats=2) as most, hold(2, seats=2) as rest, hold(3, seats=2) as again:
        assert (most, rest, again) == (["3", "5", "7"], ["2", "7"], ["2", "3", "5"])


def test_more_than_there_are_is_not_waited_for(hold: Hold) -> None:
    with hold(5) as held:
        assert held == []
    with hold(0, []) as held:
        assert held == []
