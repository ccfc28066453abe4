"""When the owner of a slot may take it: by kvd's word, or early, by its own."""

from __future__ import annotations

import itertools

import pytest

from engine_shim.gate import AcquiredEpochs
from kvd.wire.gate_layout import (
    STATE_CLOSED,
    STATE_FREE,
    STATE_HELD,
    STATE_NAMES,
    STATE_QUARANTINED,
    make_word,
)

WORDS = list(itertools.product(range(6), range(len(STATE_NAMES))))


def after(*epochs: int) -> AcquiredEpochs:
    """A member that acquired slot 0 of two at these epochs."""
    made = AcquiredEpochs(2)
    for epoch in epochs:
        made.acquire(0, make_word(epoch, STATE_FREE))
    return made


@pytest.mark.parametrize(("epoch", "state"), WORDS)
def test_the_word_must_say_free_at_a_later_epoch(epoch: int, state: int) -> None:
    word = make_word(epoch, state)
    assert after(1, 3).may_acquire(0, word) == (state == STATE_FREE and epoch > 3)
    assert after(1, 3).may_acquire(0, word, early=True) == (state == STATE_FREE and epoch > 3)


@pytest.mark.parametrize(("epoch", "state"), WORDS)
def test_a_tenancy_that_is_over_may_be_followed_early(epoch: int, state: int) -> None:
    made, word = after(1, 3), make_word(epoch, state)
    made.is_over(0)
    assert made.may_acquire(0, word) == (state == STATE_FREE and epoch > 3)
    assert made.may_acquire(0, word, early=True) == (state in (STATE_FREE, STATE_HELD))
    assert not made.may_acquire(1, make_word(0, STATE_HELD), early=True), "another slot"


@pytest.mark.parametrize("state", [STATE_CLOSED, STATE_QUARANTINED])
def test_a_slot_that_kvd_keeps_shut_is_not_taken(state: int) -> None:
    made = after(3)
    made.is_over(0)
    with pytest.raises(ValueError, match="slot 0 may not be acquired at word 0x3"):
        made.acquire(0, make_word(3, state), early=True)


def test_early_epochs_follow_one_another_and_each_is_taken_once() -> None:
    made = after(3)
    for epoch in (4, 5, 6):
        made.is_over(0)
        assert made.acquire(0, make_word(3, STATE_FREE), early=True) == epoch
        assert not made.may_acquire(0, make_word(3, STATE_FREE), early=True)
        assert not made.may_acquire(0, make_word(epoch, STATE_FREE)), "kvd heard of it meanwhile"
    assert made.last(0) == 6


def test_kvd_may_be_further_than_the_member_knew() -> None:
    """A later life of kvd begins where the announcement said, or where it had been before."""
    made = after(3)
    made.is_over(0)
    assert made.acquire(0, make_word(9, STATE_FREE), early=True) == 9
