"""Least recently used first."""

from __future__ import annotations

from kvd.core.evict import LruPolicy


def test_nothing_to_evict_is_none_and_no_error() -> None:
    policy = LruPolicy(8)
    policy.withdraw(7)
    assert policy.victim() is None
    assert len(policy) == 0


def test_withdrawn_block_is_no_victim() -> None:
    policy = LruPolicy(8)
    for block in (1, 2, 3):
        policy.admit(block)
    policy.withdraw(1)
    policy.withdraw(1)
    assert policy.victim() == 2
    assert list(policy) == [2, 3]


def test_victim_stays_until_it_is_withdrawn() -> None:
    policy = LruPolicy(8)
    policy.admit(4)
    assert (policy.victim(), policy.victim()) == (4, 4)


def test_admitting_again_makes_a_block_the_youngest_and_does_not_double_it() -> None:
    policy = LruPolicy(8)
    for block in (1, 2, 1):
        policy.admit(block)
    assert list(policy) == [2, 1]
    assert len(policy) == 2


def test_range_is_admitted_in_order_behind_what_is_there() -> None:
    policy = LruPolicy(8)
    for start, stop in ((5, 7), (0, 1), (2, 5)):
        policy.admit_range(start, stop)
    assert list(policy) == [5, 6, 0, 2, 3, 4]
    for block in (6, 2, 5, 4):
        policy.withdraw(block)
    policy.admit(0)
    assert list(policy) == [3, 0]
    assert len(policy) == 2
