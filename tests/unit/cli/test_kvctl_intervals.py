"""When a watch takes its samples."""

from __future__ import annotations

import pytest

from kvd.cli.kvctl import WATCH_BACKLOG, next_due


def _samples(pauses: dict[int, float], total: int) -> list[float]:
    """Times of samples that take no time, but for those that are held up by a pause."""
    taken, due, now = [], 0.0, 0.0
    for number in range(total):
        taken.append(now)
        now += pauses.get(number, 0.0)
        due = next_due(due, 0.05, now)
        now = max(now, due)
    return taken


def test_samples_come_at_equal_intervals() -> None:
    assert _samples({}, 21)[-1] == pytest.approx(1.0)


def test_late_samples_are_made_up_for() -> None:
    taken = _samples(dict.fromkeys(range(5), 0.09), 21)
    assert taken[-1] == pytest.approx(1.0), "as many samples in a second as without delays"


def test_a_long_pause_is_not_made_up_for() -> None:
    taken = _samples({3: 60.0}, 40)
    at_once = [at for at in taken if at == pytest.approx(taken[4])]
    assert len(at_once) <= WATCH_BACKLOG + 1
